"""Memory as a kernel sees it that computes its own offsets: reading a tensor with strides that are not its own."""

from __future__ import annotations

import torch
from torch import Tensor


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def memory_of(tensor: Tensor) -> Tensor:
    """Return all the memory that a tensor is a part of, as a flat tensor of its dtype."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)


def offsets_of(shape: tuple[int, ...], strides: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the offset of every element, int64, from the first one's."""
    offsets = torch.zeros((), dtype=torch.int64, device=like.device)
    for size, stride in zip(shape, strides, strict=True):
        offsets = offsets[..., None] + torch.arange(size, device=like.device) * stride
    return offsets


def read_with_strides(
    tensor: Tensor, strides: tuple[int, ...], shape: tuple[int, ...] | None = None, start: int | None = None
) -> Tensor:
    """Read a tensor with other strides; offsets past the end of its memory wrap round, where a GPU would read anything.

    shape, start: another shape, and another first offset than the tensor's own.
    """
    memory = memory_of(tensor)
    first = tensor.storage_offset() if start is None else start
    return memory[(first + offsets_of(shape or tensor.shape, strides, tensor)) % len(memory)]


def read_wrapped(tensor: Tensor, reach: int) -> Tensor:
    """Read a tensor with offsets that wrap round after `reach` elements."""
    return memory_of(tensor)[tensor.storage_offset() + offsets_of(tensor.shape, tensor.stride(), tensor) % reach]


def written_with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return what a contiguous tensor holds after `tensor` was written into its memory with other strides."""
    memory = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    memory.view(-1)[offsets_of(tensor.shape, strides, tensor).flatten() % tensor.numel()] = tensor.flatten()
    return memory
