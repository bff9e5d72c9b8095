"""How keys and values lie when a kernel is handed them: pools in the layout of `Pages`, padding on the left.

Everywhere else they lie in one way: pools as (pages, size, kv_heads, head_dim), padding on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_attn.workloads.arithmetic import beside
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor


def handed_over(w: Workload, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v in memory of their own, as the workload says that a kernel is given them."""
    if w.kv_pages is not None:
        return _arranged(w.kv_pages, k, v)
    if w.pad == "left":
        return with_keys_moved(w, k, 2), with_keys_moved(w, v, 2)
    return k.clone(), v.clone()


def with_keys_moved(w: Workload, tensor: Tensor, axis: int, way: int = 1) -> Tensor:
    """Return a tensor (batch, ...) whose keys, along `axis`, lie behind their padding where the workload pads on the left.

    way: -1 puts them back.
    """
    import torch

    if w.pad != "left":
        return tensor
    beyond = torch.tensor([w.kv_len - length for length in w.kv_lens or ()], device=tensor.device)
    at = (torch.arange(w.kv_len, device=tensor.device) - way * beyond[:, None]) % w.kv_len
    shape = [w.batch, *(1 for _ in tensor.shape[1:])]
    shape[axis] = w.kv_len
    return tensor.gather(axis, at.view(shape).expand(tensor.shape))


def canonical(w: Workload, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return what was handed over as it lies everywhere else; pools as views."""
    if w.kv_pages is not None and w.kv_pages.layout == "HND":
        return k.transpose(1, 2), v.transpose(1, 2)
    return with_keys_moved(w, k, 2, -1), with_keys_moved(w, v, 2, -1)


def fused_pool(k: Tensor, v: Tensor) -> Tensor:
    """Return the one tensor (pages, 2, ...) that k and v are views of, without a copy. Raises ValueError otherwise."""
    apart = v.storage_offset() - k.storage_offset()
    is_one = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() and k.stride() == v.stride()
    if not is_one or k.shape != v.shape or not 0 < apart < k.stride(0):
        raise ValueError(
            "k and v are not views of one pool: attn.fused(k, v) takes those that the callable is given, of a workload with"
            " kv_pages=Pages(..., fused=True)"
        )
    return k.as_strided((len(k), 2, *k.shape[1:]), (k.stride(0), apart, *k.stride()[1:]))


def copies_of(tensors: Sequence[Tensor], skip: int = 0) -> list[Tensor]:
    """Copy tensors with their strides, `skip` bytes into new allocations; what shares memory does so again."""
    import torch

    spans: dict[int, tuple[int, int]] = {}
    for t in tensors:
        memory, start = t.untyped_storage().data_ptr(), int(t.storage_offset())
        stop = start + 1 + int(sum((n - 1) * stride for n, stride in zip(t.size(), t.stride(), strict=True)))
        first, last = spans.get(memory, (start, stop))
        spans[memory] = min(start, first), max(stop, last)
    rooms: dict[int, Tensor] = {}
    copies = []
    for t in tensors:
        memory = t.untyped_storage().data_ptr()
        (start, stop), before = spans[memory], skip // t.element_size()
        if memory not in rooms:
            rooms[memory] = torch.empty(stop - start + before, dtype=t.dtype, device=t.device)
        copy = rooms[memory].as_strided(t.size(), t.stride(), before + t.storage_offset() - start)
        copies.append(copy.copy_(t.detach()))
    return copies


def _arranged(pages: Pages, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    if pages.layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if pages.fused:
        whole = torch.stack((k, v), 1)
        whole = _middle_layer(whole) if pages.sliced else whole
        return whole[:, 0], whole[:, 1]
    if pages.sliced:
        return _middle_layer(k), _middle_layer(v)
    return k.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)


def _middle_layer(pool: Tensor) -> Tensor:
    """Return the pool as a slice of one in which the layers before and after it share its pages."""
    import torch

    return torch.stack((beside(pool, 1), pool, beside(pool, -1)), 1)[:, 1]
