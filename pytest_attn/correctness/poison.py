"""Tensors filled with what must not be read: a NaN that no arithmetic makes, so that what is left of it was not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: bits of quiet NaNs, by bytes per element and dtype
_BITS = {"bfloat16": 0x7FE5, "float16": 0x7E65, "float32": 0x7FE5A5A5}


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor full of NaN, of the largest number of an integer dtype, or of True."""
    import torch

    tensor = torch.empty(shape, dtype=dtype, device=device)
    bits = _BITS.get(_name(dtype))
    if bits is not None:
        tensor.view(_whole(tensor)).fill_(bits)
    elif dtype.is_floating_point or dtype.is_complex:
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)
    return tensor


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor of a workload's dtype still holds what `poisoned` put there."""
    poison: torch.Tensor = tensor.view(_whole(tensor)) == _BITS[_name(tensor.dtype)]
    return poison


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _whole(tensor: torch.Tensor) -> torch.dtype:
    """Return the integer dtype of as many bytes per element."""
    import torch

    return torch.int16 if tensor.element_size() == 2 else torch.int32
