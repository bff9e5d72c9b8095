"""Keys and values as a kernel is given them: pools in the layout of `Pages`, padding on the left, a cached prefix.

Everywhere else they lie in one way: pools as (pages, size, kv_heads, head_dim), padding on the right, all keys together.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_attn.workloads.dtypes import beside
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload, sequence_lengths


def handed_over(w: Workload, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v in memory of their own, as the workload says that a kernel is given them."""
    if w.pad == "left":
        return with_keys_moved(w, k, 2), with_keys_moved(w, v, 2)
    if w.kv_pages is None:
        return k.clone(), v.clone()
    if w.kv_pages.layout != "NHD":
        k, v = (pool.transpose(1, 2) if w.kv_pages.layout == "HND" else pool.squeeze(1) for pool in (k, v))
    if w.kv_pages.fused:
        whole = torch.stack((k, v), 1)
        whole = _middle_layer(whole) if w.kv_pages.sliced else whole
        return whole[:, 0], whole[:, 1]
    if w.kv_pages.sliced:
        return _middle_layer(k), _middle_layer(v)
    return k.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)


def with_keys_moved(w: Workload, tensor: Tensor, axis: int, way: int = 1) -> Tensor:
    """Return a tensor (batch, ...) whose keys, along `axis`, lie behind their padding where the workload pads on the left.

    way: -1 puts them back.
    """
    if w.pad != "left":
        return tensor
    beyond = torch.tensor([w.kv_len - length for length in w.kv_lens or ()], device=tensor.device)
    at = (torch.arange(w.kv_len, device=tensor.device) - way * beyond[:, None]) % w.kv_len
    shape = [w.batch, *(1 for _ in tensor.shape[1:])]
    shape[axis] = w.kv_len
    return tensor.gather(axis, at.view(shape).expand(tensor.shape))


def canonical(w: Workload, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return what was handed over as it lies everywhere else; pools as views."""
    if w.kv_pages is not None and w.kv_pages.layout != "NHD":
        return (k.transpose(1, 2), v.transpose(1, 2)) if w.kv_pages.layout == "HND" else (k.unsqueeze(1), v.unsqueeze(1))
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
    spans = spans_of(tensors)
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


def spans_of(tensors: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
    """Return for each memory that tensors lie in, by its address, their first element and one past their last."""
    spans: dict[int, tuple[int, int]] = {}
    for t in tensors:
        memory, start = t.untyped_storage().data_ptr(), int(t.storage_offset())
        stop = start + 1 + int(sum((n - 1) * stride for n, stride in zip(t.size(), t.stride(), strict=True)))
        first, last = spans.get(memory, (start, stop))
        spans[memory] = min(start, first), max(stop, last)
    return spans


def _middle_layer(pool: Tensor) -> Tensor:
    """Return the pool as a slice of one in which the layers before and after it share its pages."""
    return torch.stack((beside(pool, 1), pool, beside(pool, -1)), 1)[:, 1]


# -- a cached prefix beside new tokens: a cache that holds the prefix alone, and what a kernel has written into it ------------

# The rest of a pool is NaN, as pages never written may be; the rest of a dense cache is large, but finite: kernels that read
# it may multiply it by a probability of 0, which NaN does not survive.

#: what a dense cache holds beyond a prefix; its products with q do not overflow float16
_LARGE = 100.0
#: rows that a dense cache has beyond the longest sequence: caches are as long as a sequence may become
_SPARE = 5


@dataclass(frozen=True)
class SplitCache:
    """Keys and values of one call, as a cache that holds the prefix, and new ones beside it; all in memory of their own.

    k_new, v_new: those of the queries, in the layout of q: (batch, kv_heads, new, dim), "bshd", or "thd" one after the other.
    k_cache, v_cache: the pool, as `Pages` says it lies; without pages (batch, kv_heads, capacity, dim), with rows first,
    (batch, capacity, kv_heads, dim), for "bshd" and "thd". cache_seqlens: keys in the cache, (batch,) int32.
    slot_mapping: where each new key belongs, (new keys,) int64, as page * size + row, or batch entry * capacity + row.
    """

    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    slot_mapping: Tensor


class Slots(NamedTuple):
    """All keys of a workload, sequence by sequence: which they are, and where; (keys,) each.

    batch, position: of which sequence, and at which place in it. is_new: whether they are the queries' own. source: their row
    in what a kernel is given, slot: their row in the cache, both counted over the first two dimensions.
    """

    batch: Tensor
    position: Tensor
    is_new: Tensor
    source: Tensor
    slot: Tensor


@dataclass(frozen=True)
class WatchedCache:
    """A cache that was handed out, and what it must hold in the end.

    before, after: keys and values by slot, (slots, kv_heads, dim), as handed out and as they must become. appends: whether new
    keys are among the latter.
    """

    workload: Workload
    layout: str
    split: SplitCache
    slots: Slots
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    appends: bool

    def now(self) -> tuple[Tensor, Tensor]:
        """Return keys and values by slot as they are now."""
        k, v = _by_row(self.workload, "bshd" if self.layout == "thd" else self.layout, self.split.k_cache, self.split.v_cache)
        return k, v


_WATCHED: ContextVar[list[WatchedCache] | None] = ContextVar("pytest_attn_caches", default=None)


@contextmanager
def watching_caches() -> Iterator[list[WatchedCache]]:
    """Collect the caches that are handed out within."""
    watched: list[WatchedCache] = []
    token = _WATCHED.set(watched)
    try:
        yield watched
    finally:
        _WATCHED.reset(token)


def split_cache(inputs: Inputs, k: Tensor, v: Tensor, layout: str = "bhsd", appends: bool = True) -> SplitCache:
    """Split k and v, as a kernel is given them, into a new cache with the prefix, and the new keys and values.

    Args:
        inputs: whose workload has `cached`; its own k and v are not read.
        k: keys as a kernel is given them, (batch, kv_heads, kv_len, head_dim) in "bhsd".
        v: values, laid out as k.
        layout: "bhsd", "bshd" or "thd", as q is.
        appends: whether the kernel writes the new keys and values into the cache.

    Returns:
        The cache, the new keys and values, and where these belong.

    Raises:
        ValueError: the workload has no `cached`.
    """
    w = inputs.workload
    if w.cached is None:
        said = max(w.kv_len - w.q_len, 1)
        raise ValueError(f"{w.id}: split_cache needs a workload that says how many keys are cached, e.g. cached={said}")
    slots = slots_of(inputs)
    is_new = slots.is_new
    rows = _by_row(w, layout, k, v)
    before = tuple(_prefix_alone(w, slots, given) for given in rows)
    new = tuple(given[slots.source[is_new]] for given in rows)
    k_new, v_new = (_new_in_layout(w, layout, own) for own in new)
    k_cache, v_cache = _cache_in_layout(w, layout, before[0], before[1])
    lengths = torch.tensor(w.cached, dtype=torch.int32, device=k.device)
    split = SplitCache(k_new, v_new, k_cache, v_cache, lengths, slots.slot[is_new])
    watched = _WATCHED.get()
    if watched is not None:
        after = tuple(cache.clone() for cache in before)
        for cache, own in zip(after, new, strict=True):
            if appends:
                cache[slots.slot[is_new]] = own
        watched.append(WatchedCache(w, layout, split, slots, (before[0], before[1]), (after[0], after[1]), appends))
    return split


def appended(inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Split k and v, write the new ones into the cache, and return what it then holds as they lie everywhere else.

    What a backend of this package does where a workload has `cached`; others come back as they are.
    """
    w = inputs.workload
    if w.cached is None:
        return canonical(w, k, v)
    layout = "thd" if w.is_packed else "bhsd"
    split, slots = split_cache(inputs, k, v, layout), slots_of(inputs)
    for given, cache in zip((k, v), (split.k_cache, split.v_cache), strict=True):
        new = _by_row(w, layout, given, given)[0][slots.source[slots.is_new]]
        pool = canonical(w, cache, cache)[0] if w.kv_pages else cache.transpose(1, 2) if layout == "bhsd" else cache
        at = split.slot_mapping
        pool[at // pool.shape[1], at % pool.shape[1]] = new
    if w.kv_pages is not None:
        return canonical(w, split.k_cache, split.v_cache)
    if not w.is_packed:
        return canonical(w, split.k_cache[:, :, : w.kv_len], split.v_cache[:, :, : w.kv_len])
    k, v = (torch.cat([rows[:n] for rows, n in zip(t, w.kv_lens or (), strict=True)]) for t in (split.k_cache, split.v_cache))
    return k, v


def slots_of(inputs: Inputs) -> Slots:
    """Say of every key of a workload with `cached` where it is."""
    w, device = inputs.workload, inputs.device
    pairs = sequence_lengths(w)
    kv_lens = torch.tensor([kv_len for _, kv_len in pairs], device=device)
    batch = torch.repeat_interleave(torch.arange(w.batch, device=device), kv_lens)
    count = torch.arange(len(batch), device=device)
    position = count - (kv_lens.cumsum(0) - kv_lens)[batch]
    is_new = position >= torch.tensor(w.cached, device=device)[batch]
    if w.kv_pages is None:
        place = position + (w.kv_len - kv_lens)[batch] if w.pad == "left" else position
        source = count if w.is_packed else batch * w.kv_len + place
        return Slots(batch, position, is_new, source, batch * capacity_of(w) + place)
    size = w.kv_pages.size
    assert inputs.page_table is not None
    slot = inputs.page_table.long()[batch, position // size] * size + position % size
    return Slots(batch, position, is_new, slot, slot)


def capacity_of(w: Workload) -> int:
    """Return how many rows a dense cache has for each sequence."""
    return w.kv_len + _SPARE


def _by_row(w: Workload, layout: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """View keys and values, of a kernel's arguments or of a cache, as (rows, kv_heads, dim)."""
    if w.kv_pages is not None:
        k, v = canonical(w, k, v)
    elif layout == "bhsd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return (k, v) if k.dim() == 3 else (k.flatten(0, 1), v.flatten(0, 1))


def _prefix_alone(w: Workload, slots: Slots, rows: Tensor) -> Tensor:
    """Return a cache by slot, (slots, kv_heads, dim), that holds the prefix of each sequence and nothing else."""
    count, rest = (len(rows), math.nan) if w.kv_pages is not None else (w.batch * capacity_of(w), _LARGE)
    rest = rest if rows.is_floating_point() else _LARGE
    cache = rows.new_full((count, *rows.shape[1:]), rest)
    is_old = ~slots.is_new
    cache[slots.slot[is_old]] = rows[slots.source[is_old]]
    return cache


def _new_in_layout(w: Workload, layout: str, rows: Tensor) -> Tensor:
    if w.is_packed:
        return rows
    dense = rows.view(w.batch, w.q_len, *rows.shape[1:])
    return dense if layout == "bshd" else dense.transpose(1, 2).contiguous()


def _cache_in_layout(w: Workload, layout: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return caches by slot in memory of their own, as a kernel is given them."""
    if w.kv_pages is not None:
        k, v = (cache.view(-1, w.kv_pages.size, *cache.shape[1:]) for cache in (k, v))
        return handed_over(w, k, v)
    k, v = (cache.view(w.batch, -1, *cache.shape[1:]) for cache in (k, v))
    if layout == "bhsd":
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    return k.clone(), v.clone()
