"""Products under GQA: query head h uses key head h // group, and keys are never repeated in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def per_key(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(n, heads, rows, d) x (n, kv_heads, keys, d) -> (n, heads, rows, keys)."""
    import torch

    n, heads, rows, dim = a.shape
    folded = a.reshape(n, b.shape[1], -1, dim)
    return torch.matmul(folded, b.transpose(-1, -2)).view(n, heads, rows, b.shape[2])


def over_keys(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(n, heads, rows, keys) x (n, kv_heads, keys, d) -> (n, heads, rows, d)."""
    import torch

    n, heads, rows, keys = a.shape
    folded = a.reshape(n, b.shape[1], heads // b.shape[1] * rows, keys)  # keys may be none
    return torch.matmul(folded, b).view(n, heads, rows, b.shape[3])


def over_rows(a: torch.Tensor, b: torch.Tensor, heads: int) -> torch.Tensor:
    """(n, query heads, rows, keys)^T x (n, query heads, rows, d) -> (n, heads, keys, d), each summed over its query heads."""
    import torch

    n, query_heads, rows, keys = a.shape
    folded = a.reshape(n, heads, query_heads // heads * rows, keys)
    return torch.matmul(folded.transpose(-1, -2), b.reshape(n, heads, -1, b.shape[3]))


def over_group(x: torch.Tensor, group: int) -> torch.Tensor:
    """(n, heads, keys, d) -> (n, heads // group, keys, d), summed over the query heads of each key head."""
    n, heads, keys, dim = x.shape
    return x.view(n, heads // group, group, keys, dim).sum(2)
