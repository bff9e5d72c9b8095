"""Arithmetic on tensors of any dtype: torch has none on float8, and int8 has no NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def is_quantized(tensor: Tensor) -> bool:
    """Whether elements have a byte: fp8 or int8."""
    return tensor.element_size() == 1


def times(tensor: Tensor, factor: float) -> Tensor:
    """Return the tensor times a factor whose products it can hold, in its dtype."""
    return (tensor.float() * factor).to(tensor.dtype) if is_quantized(tensor) else tensor * factor


def mirrored(tensor: Tensor) -> Tensor:
    """Return the tensor with the elements of its last dimension in reverse."""
    return tensor.flip(-1) if not is_quantized(tensor) else _bytes(tensor).flip(-1).view(tensor.dtype)


def beside(tensor: Tensor, step: int) -> Tensor:
    """Return other values of the same dtype: one more or less; of quantized tensors those of other elements."""
    return mirrored(tensor) if is_quantized(tensor) else tensor + step


def negate(tensor: Tensor) -> None:
    """Negate a tensor in place."""
    if is_quantized(tensor):
        tensor.copy_(times(tensor, -1))
    else:
        tensor.neg_()


def filled(tensor: Tensor, where: Tensor, value: float) -> Tensor:
    """Return a copy with a value wherever `where`, boolean and broadcastable, is True."""
    import torch

    if not is_quantized(tensor):
        return tensor.masked_fill(where, value)
    return exchanged(tensor, where, torch.full_like(tensor, value))


def exchanged(tensor: Tensor, where: Tensor, other: Tensor) -> Tensor:
    """Return a copy with the elements of another tensor wherever `where`, boolean and broadcastable, is True."""
    if not is_quantized(tensor):
        return other.where(where, tensor)
    return _bytes(other).where(where, _bytes(tensor)).view(tensor.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the same memory as bytes: torch 2.6 neither selects nor reorders elements of fp8 on a CPU."""
    import torch

    return tensor.view(torch.uint8)


def poison_of(tensor: Tensor) -> float:
    """Return NaN, or the largest number of a dtype that has no NaN."""
    return math.nan if tensor.is_floating_point() else 127.0


def is_poison(tensor: Tensor) -> Tensor:
    """Return where a tensor still holds `poison_of` it, boolean."""
    return tensor.isnan() if tensor.is_floating_point() else tensor == 127
