"""The kernel that a change must not make slower; a stand-in for yours."""

import torch


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(dim)) v of tensors (batch, heads, rows, dim)."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
