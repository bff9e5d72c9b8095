"""Functions for workloads that are made up: a mask_mod, the factory of a boolean mask, and a score_mod."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def prefix_of_four(_b: object, _h: object, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """A mask_mod: four keys that all see, causal after them."""
    return (kv_idx <= q_idx) | (kv_idx < 4)


def blocks_by_head(batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """A factory of a boolean mask: blocks on the diagonal, larger for each head; rows beyond the keys see none."""
    import torch

    size = 8 * (1 + torch.arange(heads, device=device)[:, None, None])
    rows, keys = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)[None, :]
    return (rows // size == keys // size)[None]


def distance(score: torch.Tensor, _b: object, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """A score_mod: less for keys that are further away, by head."""
    return score - (q_idx - kv_idx).abs() / (16 * (h + 1))
