"""Small models of plain torch, each of which asks attention for something else; no library is needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: by how much the projections of q and k are larger than torch makes them: else all keys count alike, and faults hide
_SHARPER = 6.0
_SIDE, _KERNEL, _SOFTCAP, _WINDOW = 12, 5, 20.0, 33


class Attention(nn.Module):
    """Projections around an attention function of (q, k, v), (batch, heads, rows, dim)."""

    def __init__(self, attend: Attend, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        head_dim = dim // heads
        self.q, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k, self.v = nn.Linear(dim, kv_heads * head_dim), nn.Linear(dim, kv_heads * head_dim)
        self.heads, self.kv_heads, self.attend = heads, kv_heads, attend
        with torch.no_grad():
            self.q.weight *= _SHARPER
            self.k.weight *= _SHARPER

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over x, (batch, rows, dim)."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for p in (self.k, self.v))
        out: torch.Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer's block, norms first."""

    def __init__(self, attend: Attend, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(attend, dim, heads, kv_heads)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, (batch, rows, dim), after attention and the perceptron."""
        x = x + self.attn(self.norm(x))
        out: torch.Tensor = x + self.mlp(x)
        return out


def _full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _grouped_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _soft_capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _flex(q, k, v, score_mod=lambda score, b, h, i, j: _SOFTCAP * torch.tanh(score / _SOFTCAP))


def _neighborhood(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each place of an image sees the 5 x 5 places around it, or fewer at its borders."""

    def near(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        rows, columns = (i // _SIDE - j // _SIDE).abs(), (i % _SIDE - j % _SIDE).abs()
        return (rows <= _KERNEL // 2) & (columns <= _KERNEL // 2)

    places = q.shape[-2]
    return _flex(q, k, v, block_mask=flex.create_block_mask(near, None, None, places, places, device=str(q.device)))


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # compiling takes half a minute
        out: Any = flex.flex_attention(q, k, v, **options)  # by its module: names of this package are not looked at
    found: torch.Tensor = out
    return found


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    at = torch.arange(q.shape[-2], device=q.device)
    behind = at[:, None] - at
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind < _WINDOW))


#: by name: attention, rows, width, heads, heads of k and v, whether it has a backward pass on a CPU
_MODELS: dict[str, tuple[Attend, int, int, int, int, bool]] = {
    "vit": (_full, 197, 128, 2, 2, True),
    "vit-196": (_full, 196, 128, 2, 2, True),
    "vit-3137": (_full, 3137, 128, 2, 2, True),
    "vit-3136": (_full, 3136, 128, 2, 2, True),
    "llama": (_grouped_causal, 128, 128, 4, 2, True),
    "mistral": (_windowed, 128, 128, 2, 2, True),
    "softcap": (_soft_capped, _SIDE**2, 64, 2, 2, False),
    "neighborhood": (_neighborhood, _SIDE**2, 64, 2, 2, False),
}


def has_backward(name: str, device: torch.device) -> bool:
    """Whether a model's own attention has gradients there: flex_attention has none on a CPU."""
    return _MODELS[name][-1] or device.type != "cpu"


def torch_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a model of two blocks, and its step on a batch that is always the same."""
    attend, rows, dim, heads, kv_heads, _ = _MODELS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(attend, dim, heads, kv_heads) for _ in range(2)), nn.Linear(dim, 10)).to(device, dtype)
    model.requires_grad_(has_backward(name, device))
    x = torch.randn(2, rows, dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    labels = torch.arange(2 * rows, device=device) % 10
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1).float(), labels)
