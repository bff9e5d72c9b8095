"""Which mask a tensor is: causal, a window, documents, padding; what is none of these is kept as the tensor that it is."""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pytest_attn.workloads.masks import BooleanMask, Causal, Document, Mask, MaskModMask, Window
from pytest_attn.workloads.visibility import bind
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: more documents than this are taken for a pattern
_MOST_DOCUMENTS = 4096


class StoredMask:
    """A mask's tensor as the factory of a BooleanMask; the same for every call."""

    __name__ = "captured"

    def __init__(self, visible: torch.Tensor) -> None:
        self.visible = visible

    def __call__(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
        """Return the tensor."""
        return self.visible.to(device)


def asks_the_same(one: Workload, other: Workload) -> bool:
    """Whether two workloads are equal: with functions that do the same, and masks whose tensors are equal.

    Each layer of a model may make its own function, or its own tensor, and mean the same.
    """
    if replace(one, mask=None, score_mod=None) != replace(other, mask=None, score_mod=None):
        return False
    if not _does_the_same(one.score_mod, other.score_mod):
        return False
    here, there = one.mask, other.mask
    if isinstance(here, BooleanMask) and isinstance(there, BooleanMask):
        return _makes_the_same(here.factory, there.factory)
    if isinstance(here, MaskModMask) and isinstance(there, MaskModMask):
        return _does_the_same(here.fn, there.fn)
    return bool(here == there)


def _makes_the_same(one: Any, other: Any) -> bool:
    if isinstance(one, StoredMask) and isinstance(other, StoredMask):
        here, there = one.visible, other.visible
        return here.device == there.device and here.shape == there.shape and bool((here == there).all())
    return one is other


def _does_the_same(one: Any, other: Any) -> bool:
    """Whether two functions are one, or made twice by the same lines around the same objects."""
    if one is other:
        return True
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)) or vars(one) or vars(other):
        return False
    if one.__code__ is not other.__code__ or one.__globals__ is not other.__globals__:
        return False
    return all(
        len(here) == len(there) and all(_is_same(a, b) for a, b in zip(here, there, strict=True))
        for here, there in zip(_holds(one), _holds(other), strict=True)
    )


def _holds(function: FunctionType) -> tuple[tuple[Any, ...], ...]:
    cells = function.__closure__ or ()
    try:
        closed = tuple(cell.cell_contents for cell in cells)
    except ValueError:  # a cell that is not filled yet
        closed = tuple(cells)
    keywords = sorted((function.__kwdefaults__ or {}).items())
    return closed, function.__defaults__ or (), tuple(value for pair in keywords for value in pair)


def _is_same(one: Any, other: Any) -> bool:
    if one is other or _does_the_same(one, other):
        return True
    return type(one) is type(other) and isinstance(one, int | float | str) and one == other


def recognize(visible: torch.Tensor, q_len: int, kv_len: int) -> tuple[Mask | None, tuple[int, ...] | None]:
    """Return the mask of a boolean tensor (batch or 1, heads or 1, q_len or 1, kv_len), and kv_lens where it pads.

    (None, None) where every key is visible. Each answer has been compared with the whole tensor.
    """
    visible = visible.expand(-1, -1, q_len, kv_len)
    if bool(visible.all()):
        return None, None
    first = visible[0, 0]
    if bool((visible == first).all()):
        mask = _structure(first, q_len, kv_len)
        if mask is not None:
            return mask, None
    return _padded(visible, q_len, kv_len) or (BooleanMask(StoredMask(visible.clone())), None)


def _structure(visible: torch.Tensor, q_len: int, kv_len: int) -> Mask | None:
    """Return what a mask (q_len, kv_len) is that depends on positions only."""
    for candidate in (Causal(), Causal(bottom_right=True)):
        if _is(visible, candidate):
            return candidate
    if not bool(visible.any(-1).all()):
        return None
    return _window(visible, q_len, kv_len) or (_documents(visible) if q_len == kv_len else None)


def _window(visible: torch.Tensor, q_len: int, kv_len: int) -> Window | None:
    import torch

    first = visible.int().argmax(-1)
    last = kv_len - 1 - visible.flip(-1).int().argmax(-1)
    position = torch.arange(q_len, device=visible.device) + kv_len - q_len
    to_the_left, to_the_right = int((position - first).max()), int((last - position).max())
    if to_the_left < 0 or to_the_right < 0:
        return None
    # a side that ends at the border in every row may be open or not: open says it without a number
    left = None if bool((first == 0).all()) else to_the_left
    right = None if bool((last == kv_len - 1).all()) else to_the_right
    found = Window(left, right)
    return found if _is(visible, found) else None


def _documents(visible: torch.Tensor) -> Document | None:
    starts: Any = visible.int().argmax(-1)
    lengths = starts.unique_consecutive(return_counts=True)[1].tolist()
    if len(lengths) > _MOST_DOCUMENTS:
        return None
    for causal in (True, False):
        found = Document(tuple(lengths), causal=causal)
        if _is(visible, found):
            return found
    return None


def _padded(visible: torch.Tensor, q_len: int, kv_len: int) -> tuple[Mask | None, tuple[int, ...]] | None:
    """Return the mask and the lengths of keys that are padded at the end, None where that is not what it is."""
    import torch

    if not bool((visible == visible[:, :1]).all()):
        return None
    seen = visible[:, 0].any(1)  # (batch or 1, kv_len)
    lengths = kv_len - seen.flip(-1).int().argmax(-1)
    lengths = torch.where(seen.any(-1), lengths, 0)
    inside = torch.arange(kv_len, device=visible.device) < lengths[:, None]
    found = tuple(lengths.tolist())
    if not max(found):
        return None
    for mask in (None, Causal()):
        whole = inside[:, None, None, :] if mask is None else inside[:, None, None, :] & _dense(mask, q_len, kv_len, visible)
        if bool((visible == whole).all()):
            return mask, found
    return None


def _is(visible: torch.Tensor, mask: Mask) -> bool:
    q_len, kv_len = visible.shape
    return bool((visible == _dense(mask, q_len, kv_len, visible)).all())


def _dense(mask: Mask, q_len: int, kv_len: int, like: torch.Tensor) -> torch.Tensor:
    import torch

    q, kv = torch.arange(q_len, device=like.device)[:, None], torch.arange(kv_len, device=like.device)
    zero = q.new_zeros(())
    return bind(mask, 1, 1, q_len, kv_len, kv_len, like.device)(zero, zero, q, kv).expand(q_len, kv_len)


def split_additive(mask: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return an additive mask as (visible, bias): what it hides, and what it adds elsewhere; None where it does neither.

    A number near the dtype's lowest hides, unless it hides a whole row: there all keys count alike, which only the sum says.
    """
    import torch

    hidden = mask <= torch.finfo(mask.dtype).min / 2
    is_whole_row = bool((hidden.all(-1) & mask.isfinite().all(-1)).any())
    if is_whole_row:
        return None, mask
    bias = mask.masked_fill(hidden, 0)
    has_bias = mask.requires_grad or bool(bias.any())
    return (~hidden if bool(hidden.any()) else None), (bias if has_bias else None)
