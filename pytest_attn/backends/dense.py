"""Masks written out as tensors, for backends that take no other; and such tensors read back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Mask, Sequences
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


def is_plain_causal(w: Workload) -> bool:
    """Return whether a flag is_causal (top-left aligned) says all that the mask says."""
    if w.plain_mask is None or not w.plain_mask.is_causal or w.kv_lens is not None or w.bias or w.alibi:
        return False
    return w.band is not None and (w.band.top_left or w.q_len == w.kv_len)


def needs_dense_mask(w: Workload) -> bool:
    """Return whether the workload needs an attn_mask tensor."""
    return bool(w.bias or w.alibi or w.kv_lens is not None or (w.mask is not None and not is_plain_causal(w)))


def index_tensors(w: Workload, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return b, h, q_idx and kv_idx, each along its own of four dimensions."""
    return Sequences(w.batch, w.heads, w.q_len, w.kv_len, device).indices()


def dense(mask: Mask, shape: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    """Return a mask as a boolean tensor, (1, 1, q_len, kv_len) or with more dimensions where it varies over them."""
    over = Sequences(*shape, device)
    return mask.bind(over)(*over.indices()).expand(-1, -1, over.q_len, over.kv_len)


def boolean_mask(inputs: Inputs) -> torch.Tensor | None:
    """Return the mask as a boolean tensor, True = visible, broadcastable to (batch, heads, q_len, kv_len); None for all."""
    mask_mod = inputs.mask_mod()
    return None if mask_mod is None else mask_mod(*index_tensors(inputs.workload, inputs.device))


def alibi_bias(inputs: Inputs) -> torch.Tensor:
    """Return ALiBi's penalty, float32, (1, heads, q_len, kv_len); with a batch dimension where keys or slopes differ in it."""
    w = inputs.workload
    assert inputs.alibi_slopes is not None
    b, h, q, kv = index_tensors(w, inputs.device)
    kv_len = inputs.kv_lens[b] if inputs.kv_lens is not None else w.kv_len
    slopes = inputs.alibi_slopes[b, h] if w.alibi == "batch" else inputs.alibi_slopes[h]
    return -slopes * (q + kv_len - w.q_len - kv).abs()


def additive_or_boolean_mask(inputs: Inputs) -> torch.Tensor | None:
    """Return what SDPA takes as attn_mask: boolean, or additive in q's dtype where the workload has a bias or ALiBi."""
    visible = boolean_mask(inputs)
    bias = inputs.bias
    if inputs.workload.alibi:
        alibi = alibi_bias(inputs)
        bias = alibi if bias is None else bias + alibi
    if bias is None:
        return visible
    bias = bias.to(inputs.dout.dtype)
    return bias if visible is None else bias.masked_fill(~visible, -math.inf)
