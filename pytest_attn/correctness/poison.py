"""Tensors filled with what must not be read: a NaN that no arithmetic makes, so that what is left of it was not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.workloads.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

#: bits of quiet NaNs, by dtype
_BITS = {name: one.poison for name, one in DTYPES.items() if one.poison is not None}


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
