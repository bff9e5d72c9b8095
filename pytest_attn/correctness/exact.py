"""The forward arithmetic of exact attention in float64: scores, their modifications, the softmax."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_attn.correctness.blocks import Chunk
from pytest_attn.correctness.products import per_key
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


def scaled_scores(chunk: Chunk) -> torch.Tensor:
    """Return scale * q . k, (n, heads, rows, keys)."""
    return per_key(chunk.q * chunk.block.workload.softmax_scale, chunk.k)


def modify(scores: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply softcap, bias, ALiBi, score_mod and the mask, in this order unless the bias is first, in place where that can be.

    Returns the final scores, and their derivative by the scaled scores, both (n, heads, rows, keys); None where it is 1.
    """
    segment, slope = chunk.block.segment, None
    w, inputs = segment.workload, segment.inputs
    scores = before_softcap(scores, chunk)
    if w.softcap is not None:
        scores = scores.div_(w.softcap).tanh_()
        slope = 1 - scores.square()
        scores = scores.mul_(w.softcap)
    if inputs.bias is not None and w.bias is not None and not w.bias_before_softcap:
        scores = scores + _bias(inputs.bias, chunk)
    if inputs.alibi_slopes is not None and w.alibi:
        scores = scores - _alibi(inputs.alibi_slopes, chunk)
    if w.score_mod is not None:
        scores, slope_of_mod = _score_mod(scores, chunk)
        slope = slope_of_mod if slope is None else slope * slope_of_mod
    if segment.mask_mod is not None:
        visible = segment.mask_mod(*chunk.indices)
        _require_boolean(visible, w)
        scores = scores.masked_fill_(~visible, -math.inf)
    return scores, slope


def kept_share(chunk: Chunk) -> torch.Tensor | None:
    """Return what dropout multiplies each probability by: 0, or 1 / (1 - dropout), (n, heads, rows, keys); None without it."""
    block, w = chunk.block, chunk.block.workload
    keep = block.segment.inputs.keep
    if keep is None or not w.dropout:
        return None
    kept = keep.to(chunk.q.device)[block.batches, block.head_index.flatten()][:, :, chunk.rows][..., chunk.keys]
    return kept.double() / (1 - w.dropout)


def before_softcap(scores: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return scaled scores (n, heads, rows, keys) with the bias where it comes before the softcap, else as they are."""
    bias = chunk.block.segment.inputs.bias
    if bias is None or not chunk.block.workload.bias_before_softcap:
        return scores
    return scores + _bias(bias, chunk)


def softmax(scores: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P (n, heads, rows, keys), in place of the scores, and the natural log-sum-exp (n, heads, rows).

    A row that sees nothing has P = 0 and lse = -inf.
    """
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    sinks = sinks_of(chunk)
    if sinks is not None:
        top = top.maximum(sinks)
    top = top.masked_fill_(top == -math.inf, 0.0)
    p = scores.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    lse = (total.log() + top).squeeze(-1)
    return p.div_(total.masked_fill(total == 0, 1.0)), lse


def _bias(bias: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return the chunk's part of the bias, (n, heads, rows, keys)."""
    block, w = chunk.block, chunk.block.workload
    everywhere = bias.to(chunk.q.device).expand(w.batch, w.heads, w.q_len, w.kv_len)
    return everywhere[block.batches, block.head_index.flatten()][:, :, chunk.rows][..., chunk.keys].double()


def _alibi(slopes: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return slope_h |i + kv_len - q_len - j|, (n or 1, heads, rows, keys)."""
    return slopes_of(slopes.to(chunk.q.device).double(), *chunk.indices[:2]) * distances_of(chunk)


def slopes_of(slopes: torch.Tensor, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Return the slopes of heads h, of batch entries b where these have their own."""
    return slopes[h] if slopes.dim() == 1 else slopes[b, h]


def distances_of(chunk: Chunk) -> torch.Tensor:
    """Return |i + kv_len - q_len - j|, (n or 1, 1, rows, keys), with each batch entry's own kv_len."""
    block = chunk.block
    q_len, kv_len = block.segment.lengths
    lens = block.segment.inputs.kv_lens
    kv_lens = kv_len if lens is None else lens.to(chunk.rows.device)[block.batch_index]
    return (chunk.query_index + kv_lens - q_len - chunk.key_index).abs()


def _score_mod(scores: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what score_mod makes of the scores, and its derivative, both (n, heads, rows, keys)."""
    import torch

    w = chunk.block.workload
    assert w.score_mod is not None
    with torch.enable_grad():
        leaf = scores.detach().requires_grad_()
        modified = w.score_mod(leaf, *chunk.indices)
        if not isinstance(modified, torch.Tensor):
            raise ValueError(f"{w.id}: score_mod must return a tensor, it returned {describe(modified)}")
        modified = (modified.double() + 0 * leaf).expand(scores.shape)  # so that one without the score has slope 0
        (slope,) = torch.autograd.grad(modified.sum(), leaf)
    return modified.detach().clone(), slope


def _require_boolean(visible: object, w: Workload) -> None:
    import torch

    if not isinstance(visible, torch.Tensor) or visible.dtype != torch.bool:
        raise ValueError(f"{w.id}: mask must return a boolean tensor, it returned {describe(visible)}")


def sinks_of(chunk: Chunk) -> torch.Tensor | None:
    """Return the sinks' logits, (1, heads, 1, 1)."""
    sinks = chunk.block.segment.inputs.sinks
    if sinks is None or not chunk.block.workload.sinks:
        return None
    return sinks.to(chunk.rows.device).double()[chunk.block.head_index]
