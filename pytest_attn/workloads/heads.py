"""Which key head a query head uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: query head h uses key head h // group, as most models have it, or h % kv_heads
HEAD_GROUPS = ("contiguous", "interleaved")


def key_heads(w: Any) -> list[int]:
    """Return the key head of every query head of a Workload."""
    if w.head_groups == "interleaved":
        return [h % w.kv_heads for h in range(w.heads)]
    return [h // w.group for h in range(w.heads)]


def grouped_order(w: Any) -> list[int]:
    """Return the query heads in an order in which those of one key head follow each other."""
    of_key = key_heads(w)
    return sorted(range(w.heads), key=lambda h: of_key[h])


def is_interleaved(w: Any) -> bool:
    """Whether query heads of one key head are not next to each other."""
    return bool(w.head_groups == "interleaved" and 1 < w.kv_heads < w.heads)


def grouped(tensor: torch.Tensor, w: Any, dim: int = 1) -> torch.Tensor:
    """Return a tensor of query heads with those of one key head next to each other."""
    return tensor[(slice(None),) * dim + (grouped_order(w),)] if is_interleaved(w) else tensor


def ungrouped(tensor: torch.Tensor, w: Any, dim: int = 1) -> torch.Tensor:
    """Undo `grouped`."""
    if not is_interleaved(w):
        return tensor
    order = grouped_order(w)
    return tensor[(slice(None),) * dim + (sorted(range(w.heads), key=lambda at: order[at]),)]


def repeated(tensor: torch.Tensor, w: Any, dim: int = 1) -> torch.Tensor:
    """Return k or v with a key head of its own for every query head."""
    return tensor[(slice(None),) * dim + (key_heads(w),)] if w.group > 1 else tensor
