"""A model that is built as those of transformers are: it fetches its attention function, and its mask, from two interfaces."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from fakes import LIBRARIES, put, uninstall
from guests.models.zoo import DIM, HEADS, SHARPER, TOKENS, Model
from torch import nn

MASKS = """
import torch

class AttentionMaskInterface:
    _global_mapping = {}

def sdpa_mask(*, lengths, tokens, **kwargs):
    at = torch.arange(tokens)
    return (at[:, None] >= at) & (at < torch.tensor(lengths)[:, None])[:, None, None]

def eager_mask(**given):
    return torch.where(sdpa_mask(**given), 0.0, torch.finfo(torch.bfloat16).min)

AttentionMaskInterface._global_mapping |= {"sdpa": sdpa_mask, "eager": eager_mask}
"""
#: how many keys each sequence has
LENGTHS = (TOKENS, 30)


class Config:
    def __init__(self, implementation):
        self._attn_implementation_internal = implementation

    @property
    def _attn_implementation(self):
        return self._attn_implementation_internal


class Layer(nn.Module):
    """Projections, a rotation in float32 as by positions, and what the interface has. more: keywords of the call."""

    num_key_value_groups, is_causal = 2, True

    def __init__(self, config, more):
        super().__init__()
        self.config, self.more = config, more
        self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k, self.v = nn.Linear(DIM, DIM // 2), nn.Linear(DIM, DIM // 2)
        with torch.no_grad():
            self.q.weight *= SHARPER
            self.k.weight *= SHARPER

    def forward(self, x):
        modeling, masking = (importlib.import_module(f"transformers.{name}_utils") for name in ("modeling", "masking"))
        q, k, v = (p(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (t * torch.ones(TOKENS, 1, dtype=x.dtype) for t in (q, k))  # as cos and sin, which autocast leaves in float32
        name = self.config._attn_implementation
        mask = masking.AttentionMaskInterface._global_mapping.get(name)
        mask = mask and mask(lengths=LENGTHS, tokens=TOKENS)
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(x.dtype)
        attend = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(name, modeling.eager_attention_forward)
        out, weights = attend(self, q, k, v, mask, dropout=0.0, scaling=16**-0.5, **self.more)
        return self.out(out.flatten(2)), weights


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), attention

    def forward(self, x):
        out, self.attn.weights = self.attn(self.norm(x))
        return x + out


class Llama(Model):
    """Returns what a decoder returns: logits and, where they are there, the attention weights of its layers."""

    def __init__(self, implementation="sdpa", **more):
        torch.manual_seed(0)
        config = Config(implementation)
        super().__init__(*(Block(Layer(config, more)) for _ in range(2)))
        self.config = config

    def forward(self, x):
        logits = super().forward(x)
        return SimpleNamespace(logits=logits, attentions=[b.attn.weights for b in self.blocks if b.attn.weights is not None])


def tokens():
    return torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def modeling(monkeypatch, tmp_path):
    """Put the fake of transformers on the path, and return where its attention functions are."""
    put(monkeypatch, tmp_path, "transformers", **{"transformers/masking_utils.py": MASKS})
    yield importlib.import_module("transformers.modeling_utils")
    uninstall(LIBRARIES["transformers"][0])
