"""The kinds of masks that there are, and how a user's `mask=` becomes one of them."""

from typing import Any, TypeVar

from pytest_attn.workloads.fields import did_you_mean
from pytest_attn.workloads.masks.band import Causal, Window
from pytest_attn.workloads.masks.document import Document
from pytest_attn.workloads.masks.function_mask import BooleanMask, MaskModMask, StoredMask
from pytest_attn.workloads.masks.mask import (
    Band,
    Mask,
    MaskMod,
    NearMiss,
    ScoreMod,
    Sequences,
    interval,
    intervals,
    visible_pairs,
)
from pytest_attn.workloads.masks.neighborhood import Neighborhood

__all__ = [
    "Band",
    "BooleanMask",
    "Causal",
    "Document",
    "Mask",
    "MaskMod",
    "MaskModMask",
    "NearMiss",
    "Neighborhood",
    "ScoreMod",
    "Sequences",
    "StoredMask",
    "Window",
    "as_mask",
    "capability_words",
    "interval",
    "intervals",
    "kind_of_words",
    "mask_from_dict",
    "mask_kinds",
    "mask_to_dict",
    "register",
    "unregister",
    "visible_pairs",
]

_Kind = TypeVar("_Kind", bound="type[Mask]")

#: in the order of messages, tables and draws, the simplest first
_KINDS: list[type[Mask]] = [Causal, Window, Document, Neighborhood, BooleanMask, MaskModMask]


def register(kind: _Kind) -> _Kind:
    """Add a kind of mask, also as a decorator; raise ValueError where another has its name or one of its words."""
    for other in _KINDS:
        if other.__name__ == kind.__name__ or set(other.kinds) & set(kind.kinds):
            raise ValueError(f"{kind.__name__}: there is a kind of mask of this name already, {other.__name__}")
    _KINDS.append(kind)
    return kind


def unregister(kind: type[Mask]) -> None:
    """Take a kind out again."""
    _KINDS.remove(kind)


def mask_kinds() -> tuple[type[Mask], ...]:
    """Return the kinds of masks."""
    return tuple(_KINDS)


def kind_of_words() -> dict[str, type[Mask]]:
    """Return the kinds by what strategies call them."""
    return {word: kind for kind in _KINDS for word in kind.kinds}


def capability_words() -> tuple[str, ...]:
    """Return what `Capabilities.masks` may hold; "any" is an arbitrary tensor or mask_mod, which can say every other."""
    return tuple(dict.fromkeys(word for kind in _KINDS for word in kind.capabilities))


def as_mask(mask: object) -> Mask | None:
    """Turn what a user writes as `mask=` into a mask; raise ValueError for anything else."""
    if mask is None or isinstance(mask, Mask):
        return mask
    for kind in _KINDS:
        if (found := kind.read(mask)) is not None:
            return found
    *spellings, last = (spelling for kind in _KINDS for spelling in kind.spellings or (kind.__name__,))
    raise ValueError(f"Workload: mask must be None, {', '.join(spellings)} or {last}, got {mask!r}{_suggestion(mask)}")


def _suggestion(mask: object) -> str:
    """Say which mask was meant: a word typed wrongly, one of other libraries, or a class where an object is expected."""
    if isinstance(mask, str):
        elsewhere = {word: here for kind in _KINDS for word, here in kind.elsewhere.items()} | {"full": "None", "none": "None"}
        if mask.lower() in elsewhere:
            return f"; say mask={elsewhere[mask.lower()]}"
        words = [*(string for kind in _KINDS for string in kind.strings), *elsewhere]
        meant = did_you_mean(mask.lower().replace("_", "-"), words)
        return f";{meant}" if meant else ""
    meant = "None" if mask is False else "".join(kind.meant(mask) for kind in _KINDS)
    return f"; did you mean {meant}?" if meant else ""


def mask_to_dict(mask: Mask | None) -> dict[str, Any] | None:
    """Return a mask as builtin types, with the name of its class."""
    return None if mask is None else {"kind": type(mask).__name__, **mask.to_dict()}


def mask_from_dict(written: dict[str, Any] | None, tensor: Any = None) -> Mask | None:
    """Return the mask of `mask_to_dict`; `tensor` stands in for a function that cannot be imported.

    Raises UnknownFunctionError where there is none, and ValueError where nobody knows the kind.
    """
    if written is None:
        return None
    fields = dict(written)
    name = fields.pop("kind")
    kinds = {kind.__name__: kind for kind in _KINDS}
    if name not in kinds:
        raise ValueError(f"no kind of mask is called {name!r}; there are {', '.join(kinds)}")
    return kinds[name].from_dict(fields, tensor)
