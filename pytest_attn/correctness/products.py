"""Products under GQA: query head h uses key head h // group, and keys are never repeated in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: keys of one head from which a sum over them is split, and how many each part has
_MANY_KEYS, _PART = 1 << 15, 1 << 12


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
    if n * b.shape[1] == 1 and keys >= _MANY_KEYS:
        return _in_parts(folded[0, 0], b[0, 0]).view(n, heads, rows, b.shape[3])
    return torch.matmul(folded, b).view(n, heads, rows, b.shape[3])


def _in_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(rows, keys) x (keys, d) -> (rows, d): the sums over parts of many keys side by side, as few rows occupy no GPU."""
    import torch

    rows, keys = a.shape
    parts = keys // _PART
    whole = parts * _PART
    of_parts = a[:, :whole].view(rows, parts, _PART).transpose(0, 1)
    total = torch.bmm(of_parts, b[:whole].view(parts, _PART, -1)).sum(0)
    return total.addmm_(a[:, whole:], b[whole:]) if whole < keys else total


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
