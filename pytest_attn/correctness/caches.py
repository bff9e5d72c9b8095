"""What a kernel has made of the cache that it was handed: new keys at their slots, bit for bit, and nothing else changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_attn.workloads.kv_cache import WatchedCache
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor


def fault_of_caches(w: Workload, watched: Sequence[WatchedCache]) -> str | None:
    """Say what is wrong with the cache that was handed out last, None where it is right. Other workloads need none."""
    if w.cached is None:
        return None
    if not watched:
        return (
            "the callable was given a cached prefix and new keys in one, and did not take them apart:"
            " say cache = attn.split_cache(k, v) in it, and hand its tensors to the kernel"
        )
    last = watched[-1]
    for name, before, after, now in zip(("k", "v"), last.before, last.after, last.now(), strict=True):
        if fault := _fault_of(name, last, before, after, now):
            return fault
    return None


def _fault_of(name: str, cache: WatchedCache, before: Tensor, after: Tensor, now: Tensor) -> str | None:
    is_wrong = ~_same_rows(now, after)
    if not bool(is_wrong.any()):
        return None
    new = cache.slots.slot[cache.slots.is_new]
    others = is_wrong.clone()
    others[new] = False
    if bool(others.any()):
        return _fault_elsewhere(name, cache, others, now, after[new])
    if not cache.appends:
        return f"the callable wrote new keys into {name}_cache, though the test said attn.split_cache(..., appends=False)"
    unwritten = int(_same_rows(now[new], before[new]).sum())
    if unwritten == len(new):
        return (
            f"the callable wrote none of the {len(new)} new keys into {name}_cache; for a kernel that leaves that to others,"
            " say attn.split_cache(k, v, appends=False)"
        )
    first = int(is_wrong[new].nonzero()[0])
    held = "what it held before" if bool(_same_rows(now[new], before[new])[first]) else "something else"
    if found := _same_rows(after[new], now[new][first]).nonzero().flatten().tolist():
        held = f"that of the new key {_key(cache, int(new[found[0]]))}"
    wrong = int(is_wrong[new].sum())
    return (
        f"slot {int(new[first])} of {name}_cache, where the new key {_key(cache, int(new[first]))} belongs, holds {held};"
        f" {wrong} of {len(new)} new keys are not as they were given"
    )


def _fault_elsewhere(name: str, cache: WatchedCache, others: Tensor, now: Tensor, new: Tensor) -> str:
    """Say of the first slot that was to stay as it is what it holds."""
    slot, count = int(others.nonzero()[0]), int(others.sum())
    held = "what it holds now is none of the new keys"
    if found := _same_rows(new, now[slot]).nonzero().flatten().tolist():
        held = f"it holds the new key {_key(cache, int(cache.slots.slot[cache.slots.is_new][found[0]]))}"
    return (
        f"the callable wrote to slot {slot} of {name}_cache, which is not one of the new keys' ({_key(cache, slot)}): {held};"
        f" {count} such {'slot has' if count == 1 else 'slots have'} changed"
    )


def _key(cache: WatchedCache, slot: int) -> str:
    """Name the key that a slot belongs to."""
    at = (cache.slots.slot == slot).nonzero().flatten().tolist()
    if not at:
        return "of no sequence"
    return f"{int(cache.slots.position[at[0]])} of batch entry {int(cache.slots.batch[at[0]])}"


def _same_rows(one: Tensor, other: Tensor) -> Tensor:
    """Return which rows of (rows, kv_heads, dim) are equal, NaN where NaN is."""
    return ((one == other) | (one.isnan() & other.isnan())).flatten(1).all(1)
