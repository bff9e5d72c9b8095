"""Small models, each of which asks attention for something else, and the steps that run them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

DIM, HEADS, TOKENS = 64, 4, 45
#: by how much the projections of q and k are larger than torch makes them: else all keys count alike
SHARPER = 6


class Attention(nn.Module):
    """Projections around an attention function of (q, k, v), which is handed to it."""

    def __init__(self, attend, heads=HEADS, kv_heads=HEADS, dim=DIM):
        super().__init__()
        head_dim = dim // heads
        self.q, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k, self.v = (nn.Linear(dim, kv_heads * head_dim) for _ in range(2))
        self.heads, self.kv_heads, self.attend = heads, kv_heads, attend
        with torch.no_grad():
            self.q.weight *= SHARPER
            self.k.weight *= SHARPER

    def forward(self, x, context=None):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            p(x if context is None else context).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for p in (self.k, self.v)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Of(nn.Module):
    """A module of parts, by name, that computes what a function of it and of what it is given does."""

    def __init__(self, compute, **parts):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **options):
        return self.compute(self, *args, **options)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(DIM), attention, nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + F.gelu(self.mlp(x))


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(DIM, 7)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Case(NamedTuple):
    """A model and its step."""

    model: nn.Module
    step: object


def layers_of(*attends, **options):
    """Return a model of layers, each around an attention function, or of an attention as it is."""
    torch.manual_seed(0)
    attentions = (one if isinstance(one, nn.Module) else Attention(one, **options) for one in attends)
    return Model(*map(Block, list(attentions)))


def stack(attend, layers=2, **options):
    """Return a model of some layers around one attention function."""
    return layers_of(*[attend] * layers, **options)


def case_of(model, dtype=torch.float32, run=None):
    """Return a model in a dtype with a training step on data that is always the same."""
    model = model.to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS, DIM, generator=generator).to(dtype)
    labels = torch.randint(7, (2 * TOKENS,), generator=generator)

    def step():
        logits = model(x) if run is None else run(model, x)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels)

    return Case(model, step)


def full(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _ahead(q, k):
    at, seen = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return at - seen


def window(q, k, v):
    ahead = _ahead(q, k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(ahead >= 0) & (ahead < 8))


def _documents(q, k, v):
    ids = torch.arange(TOKENS) // 16
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ids[:, None] == ids)


def _padded(q, k, v):
    lengths = torch.tensor([TOKENS, 30])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(torch.arange(TOKENS) < lengths[:, None])[:, None, None])


def _biased(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(-_ahead(q, k).abs() / 16).to(q.dtype)[None, None])


def _scaled(q, k, v):
    return sdpa(q, k, v[..., :8], scale=0.1).repeat(1, 1, 1, 2)  # a value dimension of its own


def _folded(q, k, v):
    three = (t.flatten(0, 1) for t in (q, k, v))
    return sdpa(*three).view_as(q)


def _shifted_windows(q, k, v):
    parts = (t.unflatten(2, (5, 9)).permute(0, 2, 1, 3, 4)[:, None] for t in (q, k, v))
    return sdpa(*parts)[:, 0].permute(0, 2, 1, 3, 4).flatten(2, 3)


def _flex(q, k, v):
    seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cpu")
    return flex_attention(q, k, v, block_mask=seen, score_mod=lambda score, b, h, i, j: score + 0.01 * (j - i))


def _encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, DIM, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(DIM, 7))


def _checkpointed(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return model.head(x)


def _autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x.float())


def _cross_case(dtype):
    torch.manual_seed(0)
    model = Of(lambda own, x: own.attn(x[:, :20], x)[..., :7], attn=Attention(full)).to(dtype)
    x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    return Case(model, lambda: model(x).float().square().mean())


def uniform_case(dtype, seed=0):
    """Return a model as torch initializes it: its attention is almost uniform, so that the rows of out are rounded alike."""
    torch.manual_seed(seed)
    first = Attention(full), Attention(full)
    with torch.no_grad():
        for attention in first:
            attention.q.weight /= SHARPER
            attention.k.weight /= SHARPER
    model = nn.Sequential(*first, nn.TransformerEncoderLayer(DIM, HEADS, batch_first=True, dropout=0.0)).to(dtype)
    x = torch.randn(2, 50, DIM, dtype=dtype)
    return Case(model, lambda: model(x).float().square().mean())


#: by name: a function of a dtype that makes a case, each with a backward pass
HONEST = {
    "full": lambda dtype: case_of(stack(full), dtype),
    "uniform": lambda dtype: uniform_case(dtype),
    "causal": lambda dtype: case_of(stack(causal), dtype),
    "grouped": lambda dtype: case_of(stack(_grouped, kv_heads=2), dtype),
    "window": lambda dtype: case_of(stack(window), dtype),
    "documents": lambda dtype: case_of(stack(_documents), dtype),
    "padded": lambda dtype: case_of(stack(_padded), dtype),
    "biased": lambda dtype: case_of(stack(_biased), dtype),
    "scaled": lambda dtype: case_of(stack(_scaled), dtype),
    "folded": lambda dtype: case_of(stack(_folded), dtype),
    "shifted-windows": lambda dtype: case_of(stack(_shifted_windows), dtype),
    "cross": _cross_case,
    "encoder": lambda dtype: case_of(_encoder(), dtype),
    "checkpointed": lambda dtype: case_of(stack(causal), dtype, _checkpointed),
}


def autocast_case():
    """Return a float32 model that runs under autocast."""
    return case_of(stack(causal), torch.float32, _autocast)


def flex_case(dtype=torch.float32):
    """Return a model of flex_attention, which has no backward pass on a CPU."""
    model = stack(_flex).to(dtype).requires_grad_(False)
    x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    return Case(model, lambda: model(x))
