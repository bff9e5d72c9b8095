"""The beginning of a module with a layer of attention, as a test of models writes it."""

LAYER = """
import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q * 4, k, v, is_causal=True).transpose(1, 2).flatten(2)
"""
