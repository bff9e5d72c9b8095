"""Hypothesis strategies: legal workloads, small enough that exact attention takes milliseconds on a CPU.

Example::

    from hypothesis import given, settings
    from pytest_attn import check
    from pytest_attn.strategies import workloads

    @settings(deadline=None)
    @given(workloads(masks=(None, "causal"), layouts=("plain",), features=("grouped heads", "fewer queries")))
    def test_mine(workload):
        check(lambda q, k, v: my_attention(q, k, v, causal=workload.mask is not None), workload)

`pytest --attn-fuzz 100` draws for every marked test without a line of this. Needs `pip install "pytest-attn[fuzz]"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError('pytest_attn.strategies needs Hypothesis: pip install "pytest-attn[fuzz]"') from error

from pytest_attn.workloads.dtypes import DTYPES, dtype_name
from pytest_attn.workloads.fields import BIAS_DIMENSIONS
from pytest_attn.workloads.masks import Mask, as_mask, kind_of_words
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.traits import LAYOUT_KINDS
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

__all__ = ["FEATURES", "HEAD_DIMS", "LAYOUT_KINDS", "MASK_KINDS", "MAX_BATCH", "PAGE_SIZES", "workloads"]

#: kinds of masks, the simplest first; None: without a mask
MASK_KINDS = (None, *kind_of_words())
#: what is drawn where nothing else is said; the fewer, the better a failure shrinks
USUAL_LAYOUTS = LAYOUT_KINDS[:4]
PACKED, PAGED = ("packed", "packed pages"), ("paged", "packed pages")
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
#: fields of `Workload` that may be given a value that every draw has
FIXED = (
    *("q_len", "cached", "pad", "softcap", "scale", "bias", "alibi", "sinks", "score_mod"),
    *("head_groups", "bias_before_softcap", "dropout"),
)
MAX_BATCH = 3
#: lengths at which tiles end, begin or are one row short
_EDGES = tuple(sorted({1, *(max(1, tile + off) for tile in (8, 16, 32, 64, 128, 256, 512, 1024) for off in (-1, 0, 1))}))

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]


def workloads(
    *,
    masks: Sequence[object] | None = None,
    layouts: Sequence[str] = USUAL_LAYOUTS,
    features: Sequence[str] = FEATURES,
    dtypes: Sequence[object] = tuple(DTYPES),
    head_dims: Sequence[int | tuple[int, int]] = HEAD_DIMS,
    page_sizes: Sequence[int | Pages] = PAGE_SIZES,
    max_rows: int = 160,
    max_heads: int = 4,
    backward: bool = False,
    **fixed: Any,
) -> st.SearchStrategy[Workload]:
    """Draw legal workloads, which shrink to Workload(1, head_dim=16): one row, one head, no mask, no option.

    Each argument says what may be drawn, the simplest value first, which is what a failure shrinks to:
    masks: kinds out of MASK_KINDS, or masks as `Workload` takes them, which are then drawn as they are; by default all kinds.
    layouts: out of LAYOUT_KINDS; all but "packed pages" where none is said. features: out of FEATURES.
    max_rows: the longest q_len and kv_len.
    head_dims: of keys and values alike, or a pair (head_dim, v_head_dim).
    page_sizes: numbers of tokens, or `Pages`. backward: leave out what has no gradient: a paged KV cache.
    fixed: a value that every draw has, for q_len, pad, softcap, scale, bias, alibi, sinks, score_mod, head_groups or
    bias_before_softcap, e.g. softcap=20.0.

    cached=True draws a cached prefix. Raises ValueError for what is unknown, or where nothing legal is left.
    """
    require_known("layouts", layouts, LAYOUT_KINDS)
    require_known("features", features, FEATURES)
    require_known("fixed values", fixed, FIXED)
    dims = tuple(dim if isinstance(dim, tuple) else (dim, dim) for dim in head_dims)
    require_counts("head_dims", [dim for pair in dims for dim in pair])
    require_counts("page_sizes", [pages.size if isinstance(pages, Pages) else pages for pages in page_sizes])
    require_counts("max_rows and max_heads", (max_rows, max_heads))
    scope = Scope(
        places=legal_places(layouts, (None, *kind_of_words()) if masks is None else masks, backward, fixed),
        features=tuple(feature for feature in features if is_possible(feature, fixed, dims, max_heads)),
        dtypes=tuple(dtype_name(dtype) for dtype in dtypes),
        head_dims=dims,
        page_sizes=tuple(page_sizes),
        max_rows=max_rows,
        max_heads=max_heads,
        fixed=tuple(fixed.items()),
    )
    if not (scope.places and scope.dtypes and (scope.page_sizes or not set(PAGED) & set(layouts))):
        raise ValueError("workloads(): nothing legal is left to draw; allow more masks, layouts, dtypes or page sizes")
    return drawn(scope)


# -- what may be drawn, checked -----------------------------------------------------------------------------------------------


class LayoutAndMask(NamedTuple):
    """A layout with a mask, or a kind of masks, that is legal in it."""

    layout: str
    mask: Mask | str | None


@dataclass(frozen=True)
class Scope:
    """The bounds of what is drawn, checked."""

    places: tuple[LayoutAndMask, ...]
    features: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[tuple[int, int], ...]
    page_sizes: tuple[int | Pages, ...]
    max_rows: int
    max_heads: int
    fixed: tuple[tuple[str, Any], ...]


def legal_places(
    layouts: Sequence[str], masks: Sequence[object], backward: bool, fixed: Mapping[str, object]
) -> tuple[LayoutAndMask, ...]:
    """Return the pairs of a layout and a mask that a workload may have."""
    kinds = tuple(mask if isinstance(mask, str) and mask in kind_of_words() else as_mask(mask) for mask in masks)
    places = (LayoutAndMask(layout, mask) for layout in layouts for mask in kinds)
    return tuple(place for place in places if _is_legal(place, backward, fixed))


def _is_legal(place: LayoutAndMask, backward: bool, fixed: Mapping[str, object]) -> bool:
    """Return whether the other arguments leave room for a layout and its mask."""
    kind = None if place.mask is None else _kind_of(place.mask)
    if place.layout in PAGED and backward:
        return False
    if place.layout in PACKED and ("bias" in fixed or (kind and not kind.is_packable)):
        return False
    if {"q_len", "cached"} & fixed.keys() and kind and kind.is_square:
        return False
    return fixed.get("pad") != "left" or place.layout == "padded"


def _kind_of(mask: Mask | str) -> type[Mask]:
    return kind_of_words()[mask] if isinstance(mask, str) else type(mask)


def is_possible(feature: str, fixed: Mapping[str, object], dims: Sequence[tuple[int, int]], max_heads: int) -> bool:
    """Return whether the other arguments leave room for a feature."""
    if feature == "v_head_dim":
        return len({dim for dim, _ in dims}) > 1
    if feature == "grouped heads":
        return max_heads > 1
    return feature not in fixed


def require_known(what: str, names: Iterable[str], known: tuple[str, ...]) -> None:
    """Raise ValueError for a name that there is not."""
    for name in names:
        if name not in known:
            raise ValueError(f"workloads(): unknown {what} {name!r}; known: {', '.join(known)}")


def require_counts(name: str, values: Sequence[int]) -> None:
    """Raise ValueError where there is no value, or a value is not a whole number >= 1."""
    if not values or any(not isinstance(value, int) or value < 1 for value in values):
        raise ValueError(f"workloads(): {name} must be whole numbers >= 1, got {values!r}")


# -- whole workloads: what is simple takes few choices with small numbers, as Hypothesis shrinks toward both -----------------


@st.composite
def drawn(draw: Draw, scope: Scope) -> Workload:
    """Draw a workload of this scope."""
    place: LayoutAndMask = draw(st.sampled_from(scope.places))
    features: list[str] = draw(st.lists(st.sampled_from(scope.features), unique=True, max_size=3)) if scope.features else []
    fields = dict(scope.fixed)
    fields.update(_heads(draw, scope, "grouped heads" in features))
    fields["dtype"] = draw(st.sampled_from(scope.dtypes))
    fields["head_dim"], fields["v_head_dim"] = draw(st.sampled_from(scope.head_dims))
    if "v_head_dim" in features:
        others = dict.fromkeys(dim for dim, _ in scope.head_dims if dim != fields["head_dim"])
        fields["v_head_dim"] = draw(st.sampled_from(list(others)))
    for feature in features:
        if feature in _VALUES and not (feature == "bias" and place.layout in PACKED):
            fields[feature] = draw(_VALUES[feature])
    mask = fields["mask"] = _mask(draw, place.mask, scope.max_rows)
    q_len, kv_len = (mask.tokens, mask.tokens) if mask is not None and mask.is_square else lengths(draw, scope, features)
    fields.update(_laid_out(draw, scope, place.layout, features, q_len, kv_len))
    if fields.get("cached") is not None:
        fields.update(with_prefix(fields, draw(st.integers(1, scope.max_rows))))
    if fields.get("pad") == "left":
        fields.pop("bias", None)
    return Workload(**fields)


def _mask(draw: Draw, kind: Mask | str | None, max_rows: int) -> Mask | None:
    return _kind_of(kind).draw(kind, _Choices(draw, max_rows)) if isinstance(kind, str) else kind


@dataclass(frozen=True)
class _Choices:
    """The draws by which kinds of masks choose."""

    draw: Draw
    max_rows: int

    def flag(self) -> bool:
        return bool(self.draw(st.booleans()))

    def count(self, least: int, most: int) -> int:
        return int(self.draw(count(least, most)))

    def count_or_none(self, least: int, most: int) -> int | None:
        number: int | None = self.draw(st.none() | count(least, most))
        return number

    def length(self, most: int) -> int:
        return int(self.draw(lengths_up_to(most)))


def _heads(draw: Draw, scope: Scope, is_grouped: bool) -> dict[str, int]:
    if not is_grouped:
        return {"heads": draw(count(1, scope.max_heads))}
    group = draw(count(2, scope.max_heads))
    kv_heads = draw(count(1, scope.max_heads // group))
    return {"heads": group * kv_heads, "kv_heads": kv_heads}


def distance(score: torch.Tensor, _b: object, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """A score_mod: less for keys that are further away, by head."""
    return score - (q_idx - kv_idx).abs() / (16 * (h + 1))


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "softcap": st.sampled_from((5.0, 1.0, 20.0)),
    "scale": st.sampled_from((0.5, 1.0, 0.03125)),
    "bias": st.sampled_from(["".join(part) for size in range(1, 5) for part in combinations(BIAS_DIMENSIONS, size)]),
    "alibi": st.just(True),
    "sinks": st.just(True),
    "score_mod": st.just(distance),
}


# -- lengths -----------------------------------------------------------------------------------------------------------------


def count(least: int, most: int) -> st.SearchStrategy[int]:
    """Draw a number. Not with integers(), which only longest lengths are: Hypothesis likes to copy one integer to others."""
    return st.sampled_from(range(least, most + 1))


@st.composite
def lengths_up_to(draw: Draw, most: int) -> int:
    """Draw a length, often one at which a tile ends.

    The edge lies at or below the number drawn first: so a fault beyond some length shrinks to the first such length.
    """
    length: int = draw(st.integers(1, most))
    back = draw(count(0, 3))
    edges = [edge for edge in _EDGES if edge <= length]
    return edges[-min(back, len(edges))] if back else length


def lengths(draw: Draw, scope: Scope, features: list[str]) -> tuple[int, int]:
    """Draw q_len and kv_len: equal, unless a feature says which is less."""
    fixed = dict(scope.fixed).get("q_len")
    longer = draw(lengths_up_to(scope.max_rows))
    if fixed is not None:
        return fixed, longer
    if "fewer queries" in features:
        return draw(lengths_up_to(longer)), longer
    if "fewer keys" in features:
        return longer, draw(lengths_up_to(longer))
    return longer, longer


# -- layouts -----------------------------------------------------------------------------------------------------------------


def _laid_out(draw: Draw, scope: Scope, layout: str, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    """Draw the fields that say where sequences lie, of which the longest has these lengths."""
    fields: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len}
    if layout == "plain":
        return {**fields, "batch": draw(count(1, MAX_BATCH))}
    if layout in PACKED:
        fields = _packed(draw, features, q_len, kv_len)
    else:
        least = 0 if "empty sequences" in features else 1
        others = draw(st.lists(count(least, kv_len), max_size=MAX_BATCH - 1))
        fields["kv_lens"] = (*others, draw(count(1, kv_len)))  # at least one sequence has keys
    if layout in PAGED:
        pages = draw(st.sampled_from(scope.page_sizes))
        fields["kv_pages"] = pages if isinstance(pages, Pages) else Pages(pages)
    return fields


def with_prefix(fields: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return the lengths of drawn fields with as many new keys as queries, and at most `longest` cached ones before them.

    Where lengths of keys were drawn, they become those of the prefixes, as far as they go; one at least is not empty.
    """
    prefixes = tuple(min(length, longest) for length in fields.get("kv_lens") or (longest,) * fields.get("batch", 1))
    prefixes = prefixes if any(prefixes) else (1, *prefixes[1:])
    return {"cached": prefixes, "kv_len": None, "kv_lens": None, "batch": None}


def _packed(draw: Draw, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    """Pack a longest sequence with shorter ones, in each of which the queries are as many as, fewer or more than the keys."""
    least = 0 if "empty sequences" in features else 1
    pairs = [(q_len, kv_len)]
    for _ in range(draw(count(0, MAX_BATCH - 1))):
        if q_len == kv_len:
            rows = draw(count(least, q_len))
            pairs.append((rows, rows))
        elif q_len < kv_len:
            keys = draw(count(least, kv_len))
            pairs.append((draw(count(min(least, keys), min(keys, q_len))), keys))
        else:
            rows = draw(count(least, q_len))
            pairs.append((rows, draw(count(min(least, rows), min(rows, kv_len)))))
    q_lens, kv_lens = zip(*pairs, strict=True)
    return {"q_lens": q_lens, "kv_lens": kv_lens, "q_len": max(q_lens), "kv_len": max(kv_lens)}
