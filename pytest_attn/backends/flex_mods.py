"""How a workload is said to flex_attention: its score_mod, its block mask, and sinks as one more key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import BooleanMask, MaskMod, MaskModMask, ScoreMod
from pytest_attn.workloads.visibility import bind
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: Rows and keys of one block of a block mask.
BLOCK = 128


def score_mod_of(inputs: Inputs) -> ScoreMod | None:
    """Chain softcap, bias, ALiBi and the workload's own score_mod, in the workload's order; None where there is none."""
    import torch

    w = inputs.workload
    sinks = inputs.sinks
    if w.softcap is None and inputs.bias is None and not w.alibi and w.score_mod is None and sinks is None:
        return None
    keys = inputs.k.shape[0] if w.is_packed else w.kv_len
    softcap, own, slopes = w.softcap, w.score_mod, inputs.alibi_slopes
    bias = None if inputs.bias is None else inputs.bias.expand(w.batch, w.heads, w.q_len, w.kv_len)
    kv_lens, offset = inputs.kv_lens, w.kv_len - w.q_len

    def score_mod(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        raw_kv = kv
        if sinks is not None:
            kv = torch.clamp(kv, max=keys - 1)
        if bias is not None and w.bias_before_softcap:
            score = score + bias[b, h, q, kv]
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if bias is not None and not w.bias_before_softcap:
            score = score + bias[b, h, q, kv]
        if slopes is not None:
            shift = offset if kv_lens is None else kv_lens[b] - w.q_len
            slope = slopes[b, h] if w.alibi == "batch" else slopes[h]
            score = score - slope * (q + shift - kv).abs()
        if own is not None:
            score = own(score, b, h, q, kv)
        return score if sinks is None else torch.where(raw_kv == keys, sinks[h].to(score.dtype), score)

    return score_mod


def block_mask_of(inputs: Inputs, block_rows: int) -> Any:
    """Return the block mask of what is visible, with blocks of so many rows; None where every key is."""
    from torch.nn.attention.flex_attention import create_block_mask

    w = inputs.workload
    mask_mod = _packed_mask(inputs) if w.is_packed else inputs.mask_mod()
    if mask_mod is None:
        return None
    keys = inputs.k.shape[0] if w.is_packed else w.kv_len
    if inputs.sinks is not None:
        mask_mod, keys = _showing_the_sink(mask_mod, keys), keys + 1
    per_batch = w.kv_lens is not None or not _is_structural(w)
    batch = w.batch if per_batch and not w.is_packed else None
    heads = None if _is_structural(w) else w.heads
    rows = inputs.q.shape[0] if w.is_packed else w.q_len
    return create_block_mask(mask_mod, batch, heads, rows, keys, device=str(inputs.device), BLOCK_SIZE=(block_rows, BLOCK))


def _showing_the_sink(mask_mod: MaskMod, keys: int) -> MaskMod:
    import torch

    def shown(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv == keys) | mask_mod(b, h, q, torch.clamp(kv, max=keys - 1))

    return shown


def _is_structural(w: Workload) -> bool:
    """Whether the mask depends on positions only, not on batch and head, so that one block mask serves all."""
    return not isinstance(w.mask, BooleanMask | MaskModMask)


def _packed_mask(inputs: Inputs) -> MaskMod:
    """Tokens see their own sequence only, and there what the mask shows, in positions of the sequence."""
    import torch

    w = inputs.workload
    assert inputs.cu_seqlens is not None
    assert inputs.cu_seqlens_kv is not None
    starts_q, starts_kv = inputs.cu_seqlens.long(), inputs.cu_seqlens_kv.long()
    lengths_q, lengths_kv = starts_q.diff(), starts_kv.diff()
    sequence_q = torch.repeat_interleave(lengths_q)
    sequence_kv = torch.repeat_interleave(lengths_kv)
    inner = None
    if w.plain_mask is not None:
        inner = bind(w.plain_mask, w.batch, w.heads, 0, 0, lengths_kv - lengths_q, inputs.device)

    def same_sequence(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        mine, theirs = sequence_q[q], sequence_kv[kv]
        visible: torch.Tensor = mine == theirs
        if inner is None:
            return visible
        return visible & inner(mine, h, q - starts_q[mine], kv - starts_kv[theirs])

    return same_sequence


def with_key_of_sink(tensor: torch.Tensor) -> torch.Tensor:
    """Append a key of zeros, whose score the score_mod replaces by the sink's logit and whose value adds nothing."""
    import torch.nn.functional as F

    return F.pad(tensor, (0, 0, 0, 1))
