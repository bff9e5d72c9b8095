"""Hypothesis strategies: legal workloads, small enough that exact attention takes milliseconds on a CPU.

Example::

    from hypothesis import given, settings
    from pytest_attn import check
    from pytest_attn.strategies import workloads

    @settings(deadline=None)
    @given(workloads(masks=(None, "causal"), layouts=("plain",), features=("grouped heads", "fewer queries")))
    def test_mine(workload):
        check(lambda q, k, v: my_attention(q, k, v, causal=workload.mask is not None), workload)

`pytest --attn-fuzz 100` draws for every marked test without a line of this. Needs `pip install pytest-attn[fuzz]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_attn.workloads.masks import BooleanMask, Document, Mask, Neighborhood, Window, as_mask
from pytest_attn.workloads.pairs import blocks_by_head, distance, prefix_of_four
from pytest_attn.workloads.workload import BIAS_DIMENSIONS, DTYPES, Pages, Workload, dtype_name

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("pytest_attn.strategies needs Hypothesis: pip install pytest-attn[fuzz]") from error

#: kinds of masks, the simplest first; None is no mask
MASK_KINDS = (None, "causal", "causal-bottom-right", "window", "documents", "neighborhood", "boolean", "mask_mod")
#: where queries and keys lie: all lengths alike, keys padded, sequences end to end, keys in pages
LAYOUT_KINDS = ("plain", "padded", "packed", "paged")
#: what a workload may have beside its mask and layout; a draw has three of these at most
FEATURES = (
    "fewer queries",
    "fewer keys",
    "grouped heads",
    "scale",
    "softcap",
    "bias",
    "alibi",
    "sinks",
    "score_mod",
    "v_head_dim",
    "empty sequences",
)
HEAD_DIMS = (16, 32, 64, 8, 40, 128)
PAGE_SIZES = (16, 1, 8)
MAX_BATCH = 3
#: lengths at which tiles end, begin or are one row short
_EDGES = tuple(sorted({1, *(max(1, tile + off) for tile in (8, 16, 32, 64, 128, 256, 512, 1024) for off in (-1, 0, 1))}))
#: fields of `Workload` that may be given a value that every draw has
_FIXED = ("q_len", "softcap", "scale", "bias", "alibi", "sinks", "score_mod")


def workloads(
    *,
    masks: Sequence[object] = MASK_KINDS,
    layouts: Sequence[str] = LAYOUT_KINDS,
    features: Sequence[str] = FEATURES,
    dtypes: Sequence[object] = tuple(DTYPES),
    head_dims: Sequence[int | tuple[int, int]] = HEAD_DIMS,
    page_sizes: Sequence[int] = PAGE_SIZES,
    max_rows: int = 160,
    max_heads: int = 4,
    backward: bool = False,
    **fixed: Any,
) -> st.SearchStrategy[Workload]:
    """Draw legal workloads, which shrink to Workload(1, head_dim=16): one row, one head, no mask, no option.

    Each argument says what may be drawn, the simplest value first, which is what a failure shrinks to:
    masks: kinds out of MASK_KINDS, or masks as `Workload` takes them, which are then drawn as they are.
    layouts: out of LAYOUT_KINDS. features: out of FEATURES. max_rows: the longest q_len and kv_len.
    head_dims: of keys and values alike, or a pair (head_dim, v_head_dim).
    backward: leave out what has no gradient, which is paged keys.
    fixed: a value that every draw has, for q_len, softcap, scale, bias, alibi, sinks or score_mod, e.g. softcap=20.0.

    Raises ValueError for what is unknown, or where nothing legal is left.
    """
    _refuse_unknown("layouts", layouts, LAYOUT_KINDS)
    _refuse_unknown("features", features, FEATURES)
    _refuse_unknown("fixed values", fixed, _FIXED)
    dims = tuple(dim if isinstance(dim, tuple) else (dim, dim) for dim in head_dims)
    _require_counts("head_dims", [dim for pair in dims for dim in pair])
    _require_counts("page_sizes", page_sizes)
    _require_counts("max_rows and max_heads", (max_rows, max_heads))
    kinds = tuple(mask if isinstance(mask, str) and mask in MASK_KINDS else as_mask(mask) for mask in masks)
    scope = Scope(
        places=tuple(
            Place(layout, mask)
            for layout in layouts
            for mask in kinds
            if not (layout == "paged" and backward)
            and not (layout == "packed" and (_needs_rectangle(mask) or "bias" in fixed))
            and not ("q_len" in fixed and _is_square(mask))
        ),
        features=tuple(feature for feature in features if _is_possible(feature, fixed, dims, max_heads)),
        dtypes=tuple(dtype_name(dtype) for dtype in dtypes),
        head_dims=dims,
        page_sizes=tuple(page_sizes),
        max_rows=max_rows,
        max_heads=max_heads,
        fixed=tuple(fixed.items()),
    )
    if not (scope.places and scope.dtypes and (scope.page_sizes or "paged" not in layouts)):
        raise ValueError("workloads(): nothing legal is left to draw; allow more masks, layouts, dtypes or page sizes")
    return _drawn(scope)


class Place(NamedTuple):
    """A layout with a mask, or a kind of masks, that is legal in it."""

    layout: str
    mask: Mask | str | None


@dataclass(frozen=True)
class Scope:
    """What may be drawn, checked."""

    places: tuple[Place, ...]
    features: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[tuple[int, int], ...]
    page_sizes: tuple[int, ...]
    max_rows: int
    max_heads: int
    fixed: tuple[tuple[str, Any], ...]


def _refuse_unknown(what: str, given: Sequence[str] | dict[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"workloads(): unknown {what} {name!r}; known: {', '.join(known)}")


def _require_counts(name: str, values: Sequence[int]) -> None:
    if not values or any(not isinstance(value, int) or value < 1 for value in values):
        raise ValueError(f"workloads(): {name} must be whole numbers >= 1, got {values!r}")


def _is_square(mask: object) -> bool:
    """Whether the mask fixes q_len and kv_len to one length."""
    return mask in ("documents", "neighborhood") or isinstance(mask, Document | Neighborhood)


def _needs_rectangle(mask: object) -> bool:
    """Whether the mask cannot be said of packed sequences."""
    return _is_square(mask) or mask == "boolean" or isinstance(mask, BooleanMask)


def _is_possible(feature: str, fixed: dict[str, Any], dims: Sequence[tuple[int, int]], max_heads: int) -> bool:
    if feature == "v_head_dim":
        return len({dim for dim, _ in dims}) > 1
    if feature == "grouped heads":
        return max_heads > 1
    return feature not in fixed


# -- the draws: what is simple takes few choices with small numbers, as Hypothesis shrinks towards both --------------------

_Draw = Callable[[st.SearchStrategy[Any]], Any]


def _count(least: int, most: int) -> st.SearchStrategy[int]:
    """Draw a number. Not with integers(), which only longest lengths are: Hypothesis likes to copy one integer to others."""
    return st.sampled_from(range(least, most + 1))


@st.composite
def _drawn(draw: _Draw, scope: Scope) -> Workload:
    place: Place = draw(st.sampled_from(scope.places))
    features: list[str] = draw(st.lists(st.sampled_from(scope.features), unique=True, max_size=3)) if scope.features else []
    fields = dict(scope.fixed)
    fields.update(_heads(draw, scope, "grouped heads" in features))
    fields["dtype"] = draw(st.sampled_from(scope.dtypes))
    fields["head_dim"], fields["v_head_dim"] = draw(st.sampled_from(scope.head_dims))
    if "v_head_dim" in features:
        others = dict.fromkeys(dim for dim, _ in scope.head_dims if dim != fields["head_dim"])
        fields["v_head_dim"] = draw(st.sampled_from(list(others)))
    for feature in features:
        if feature in _VALUES and not (feature == "bias" and place.layout == "packed"):
            fields[feature] = draw(_VALUES[feature])
    if _is_square(place.mask):
        fields["mask"] = draw(_square_masks(scope.max_rows)[place.mask]) if isinstance(place.mask, str) else place.mask
        q_len = kv_len = _rows_of(fields["mask"])
    else:
        fields["mask"] = _mask(draw, place.mask, scope.max_rows)
        q_len, kv_len = _lengths(draw, scope, features)
    fields.update(_LAYOUTS[place.layout](draw, scope, features, q_len, kv_len))
    return Workload(**fields)


def _heads(draw: _Draw, scope: Scope, is_grouped: bool) -> dict[str, int]:
    if not is_grouped:
        return {"heads": draw(_count(1, scope.max_heads))}
    group = draw(_count(2, scope.max_heads))
    kv_heads = draw(_count(1, scope.max_heads // group))
    return {"heads": group * kv_heads, "kv_heads": kv_heads}


def _biases() -> list[str]:
    """Return every part of "bhqk", the shortest first."""
    parts = ("".join(d for place, d in enumerate(BIAS_DIMENSIONS) if bits >> place & 1) for bits in range(1, 16))
    return sorted(parts, key=lambda part: (len(part), part))


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "softcap": st.sampled_from((5.0, 1.0, 20.0)),
    "scale": st.sampled_from((0.5, 1.0, 0.03125)),
    "bias": st.sampled_from(_biases()),
    "alibi": st.just(True),
    "sinks": st.just(True),
    "score_mod": st.just(distance),
}


def _mask(draw: _Draw, mask: Mask | str | None, max_rows: int) -> object:
    """Return a mask that fits every length."""
    if mask == "window":
        side = st.none() | _count(0, max_rows)
        return Window(draw(side), draw(side))
    return (
        {"boolean": BooleanMask(blocks_by_head), "mask_mod": prefix_of_four}.get(mask, mask) if isinstance(mask, str) else mask
    )


@st.composite
def _lengths_up_to(draw: _Draw, most: int) -> int:
    """Draw a length, often one at which a tile ends.

    The edge lies at or below the number drawn first: so a fault beyond some length shrinks to the first such length.
    """
    length: int = draw(st.integers(1, most))
    back = draw(_count(0, 3))
    edges = [edge for edge in _EDGES if edge <= length]
    return edges[-min(back, len(edges))] if back else length


def _lengths(draw: _Draw, scope: Scope, features: list[str]) -> tuple[int, int]:
    """Draw q_len and kv_len: equal, unless a feature says which is less."""
    fixed = dict(scope.fixed).get("q_len")
    longer = draw(_lengths_up_to(scope.max_rows))
    if fixed is not None:
        return fixed, longer
    if "fewer queries" in features:
        return draw(_lengths_up_to(longer)), longer
    if "fewer keys" in features:
        return longer, draw(_lengths_up_to(longer))
    return longer, longer


def _rows_of(mask: Document | Neighborhood) -> int:
    return sum(mask.lengths) if isinstance(mask, Document) else math.prod(mask.shape)


def _square_masks(max_rows: int) -> dict[str, st.SearchStrategy[Any]]:
    return {"documents": _documents(max_rows), "neighborhood": _neighborhoods(max_rows)}


@st.composite
def _documents(draw: _Draw, max_rows: int) -> Document:
    lengths = [draw(_lengths_up_to(max_rows))]
    while len(lengths) < 4 and sum(lengths) < max_rows and draw(st.booleans()):
        lengths.append(draw(_lengths_up_to(max_rows - sum(lengths))))
    return Document(tuple(lengths), causal=draw(st.booleans()))


@st.composite
def _neighborhoods(draw: _Draw, max_rows: int) -> Neighborhood:
    axes = draw(_count(1, 3))
    longest = max(1, math.floor(max_rows ** (1 / axes) + 1e-9))
    sizes = [draw(_count(1, longest)) for _ in range(axes)]
    kernels = [draw(_count(1, size)) for size in sizes]
    dilations = [draw(_count(1, size // kernel)) for size, kernel in zip(sizes, kernels, strict=True)]
    strides = [draw(_count(1, kernel)) for kernel in kernels]
    causal = [draw(st.booleans()) for _ in sizes]
    return Neighborhood(tuple(sizes), tuple(kernels), tuple(strides), tuple(dilations), tuple(causal))


# -- layouts: each takes the longest lengths and returns the fields that say where they lie --------------------------------


def _plain(draw: _Draw, scope: Scope, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    return {"q_len": q_len, "kv_len": kv_len, "batch": draw(_count(1, MAX_BATCH))}


def _padded(draw: _Draw, scope: Scope, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    return {"q_len": q_len, "kv_len": kv_len, "kv_lens": _kv_lens(draw, features, kv_len)}


def _paged(draw: _Draw, scope: Scope, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    return {**_padded(draw, scope, features, q_len, kv_len), "kv_pages": Pages(draw(st.sampled_from(scope.page_sizes)))}


def _kv_lens(draw: _Draw, features: list[str], kv_len: int) -> tuple[int, ...]:
    least = 0 if "empty sequences" in features else 1
    others = draw(st.lists(_count(least, kv_len), max_size=MAX_BATCH - 1))
    return (*others, draw(_count(1, kv_len)))  # at least one sequence has keys


def _packed(draw: _Draw, scope: Scope, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    """Pack a longest sequence with shorter ones, in each of which the queries are as many as, fewer or more than the keys."""
    least = 0 if "empty sequences" in features else 1
    pairs = [(q_len, kv_len)]
    for _ in range(draw(_count(0, MAX_BATCH - 1))):
        if q_len == kv_len:
            rows = draw(_count(least, q_len))
            pairs.append((rows, rows))
        elif q_len < kv_len:
            keys = draw(_count(least, kv_len))
            pairs.append((draw(_count(min(least, keys), min(keys, q_len))), keys))
        else:
            rows = draw(_count(least, q_len))
            pairs.append((rows, draw(_count(min(least, rows), min(rows, kv_len)))))
    q_lens, kv_lens = zip(*pairs, strict=True)
    return {"q_lens": q_lens, "kv_lens": kv_lens, "q_len": max(q_lens), "kv_len": max(kv_lens)}


_LAYOUTS: dict[str, Callable[[_Draw, Scope, list[str], int, int], dict[str, Any]]] = {
    "plain": _plain,
    "padded": _padded,
    "packed": _packed,
    "paged": _paged,
}
