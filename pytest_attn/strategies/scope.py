"""What `workloads` may draw: the kinds that there are, and a checked choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_attn.workloads.masks import BooleanMask, Document, Mask, Neighborhood, as_mask
from pytest_attn.workloads.pages import Pages

#: kinds of masks, the simplest first; None: without a mask
MASK_KINDS = (None, "causal", "causal-bottom-right", "window", "documents", "neighborhood", "boolean", "mask_mod")
#: where queries and keys lie: all lengths alike, keys padded, sequences end to end, keys in pages, those of packed queries too
LAYOUT_KINDS = ("plain", "padded", "packed", "paged", "packed pages")
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
    page_sizes: tuple[int | Pages, ...]
    max_rows: int
    max_heads: int
    fixed: tuple[tuple[str, Any], ...]


def legal_places(
    layouts: Sequence[str], masks: Sequence[object], backward: bool, fixed: Mapping[str, object]
) -> tuple[Place, ...]:
    """Return the pairs of a layout and a mask that a workload may have."""
    kinds = tuple(mask if isinstance(mask, str) and mask in MASK_KINDS else as_mask(mask) for mask in masks)
    return tuple(
        Place(layout, mask)
        for layout in layouts
        for mask in kinds
        if not (layout in PAGED and backward)
        and not (layout in PACKED and (_needs_rectangle(mask) or "bias" in fixed))
        and not ({"q_len", "cached"} & set(fixed) and is_square(mask))
        and not (fixed.get("pad") == "left" and layout != "padded")
    )


def is_square(mask: object) -> bool:
    """Whether the mask fixes q_len and kv_len to one length."""
    return mask in ("documents", "neighborhood") or isinstance(mask, Document | Neighborhood)


def _needs_rectangle(mask: object) -> bool:
    """Whether the mask cannot be said of packed sequences."""
    return is_square(mask) or mask == "boolean" or isinstance(mask, BooleanMask)


def is_possible(feature: str, fixed: Mapping[str, object], dims: Sequence[tuple[int, int]], max_heads: int) -> bool:
    """Whether the other arguments leave room for a feature."""
    if feature == "v_head_dim":
        return len({dim for dim, _ in dims}) > 1
    if feature == "grouped heads":
        return max_heads > 1
    return feature not in fixed


def refuse_unknown(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError for a name that is not known."""
    for name in given:
        if name not in known:
            raise ValueError(f"workloads(): unknown {what} {name!r}; known: {', '.join(known)}")


def require_counts(name: str, values: Sequence[int]) -> None:
    """Raise ValueError where there is no value, or a value is not a whole number >= 1."""
    if not values or any(not isinstance(value, int) or value < 1 for value in values):
        raise ValueError(f"workloads(): {name} must be whole numbers >= 1, got {values!r}")
