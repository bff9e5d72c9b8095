"""The functions of flash_attn.flash_attn_interface that rings call for each chunk, and the one that Ulysses calls."""

import math
import os

import torch

FAULT = os.environ.get("FAULTY_FLASH", "")


def _scores(q, k, scale, causal, window, softcap):
    """Return scores and their slope, (batch, heads, rows, keys), float32, masked."""
    rows, keys = q.shape[1], k.shape[1]
    qf, kf = q.transpose(1, 2).float(), k.transpose(1, 2).float().repeat_interleave(q.shape[2] // k.shape[2], 1)
    scores, slope = qf @ kf.transpose(-1, -2) * scale, 1.0
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = capped * softcap, 1 - capped.square()
    last, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        seen &= key <= last
    if window[0] >= 0:
        seen &= key >= last - window[0]
    if window[1] >= 0:
        seen &= key <= last + window[1]
    return scores.masked_fill(~seen, -math.inf), slope


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    """Return out, lse (batch, heads, rows) in float32, and what nobody reads."""
    assert not dropout_p
    assert alibi_slopes is None
    scores, _ = _scores(q, k, softmax_scale, causal, (window_size_left, window_size_right), softcap)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp().to(v.dtype).float()
    out = p @ v.transpose(1, 2).float().repeat_interleave(q.shape[2] // k.shape[2], 1)
    if FAULT == "lse":
        lse = lse.bfloat16().float()
    return out.transpose(1, 2).to(q.dtype), lse, None, None


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    """Write dq, dk and dv; each query head's part of dk and dv is rounded before they are added up."""
    group = q.shape[2] // k.shape[2]
    scores, slope = _scores(q, k, softmax_scale, causal, (window_size_left, window_size_right), softcap)
    p = (scores - softmax_lse[..., None]).exp()
    dof, vf, kf = dout.transpose(1, 2).float(), v.transpose(1, 2).float(), k.transpose(1, 2).float()
    delta = (dof * out.transpose(1, 2).float()).sum(-1, keepdim=True)
    ds = p * (dof @ vf.repeat_interleave(group, 1).transpose(-1, -2) - delta) * slope
    ds = ds.to(q.dtype).float()
    dq.copy_((ds @ kf.repeat_interleave(group, 1) * softmax_scale).transpose(1, 2))
    keys = (ds.transpose(-1, -2) @ q.transpose(1, 2).float() * softmax_scale).to(q.dtype).float()
    values = (p.to(q.dtype).float().transpose(-1, -2) @ dof).to(q.dtype).float()
    if FAULT == "dk":
        keys[:, :, -1] = 0
    for whole, summed in ((dk, keys), (dv, values)):
        whole.copy_(summed.unflatten(1, (k.shape[2], group)).sum(2).transpose(1, 2))


def _parts(tensors, ends):
    """Yield the sequences of packed tensors as batches of one."""
    for number in range(len(ends[0]) - 1):
        yield [t[None, int(end[number]) : int(end[number + 1])] for t, end in zip(tensors, ends, strict=True)]


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    """Return out, lse (heads, tokens) in float32, and what nobody reads."""
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    options = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
    ends = cu_seqlens_q, cu_seqlens_k, cu_seqlens_k
    found = [_flash_attn_forward(*part, *options)[:2] for part in _parts((q, k, v), ends)]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], -1), None, None


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    """Write dq, dk and dv of each sequence."""
    rows, keys = cu_seqlens_q, cu_seqlens_k
    tensors = dout, q, k, v, out, softmax_lse.transpose(0, 1), dq, dk, dv
    options = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic
    for *given, lse, dq_part, dk_part, dv_part in _parts(tensors, (rows, rows, keys, keys, rows, rows, rows, keys, keys)):
        _flash_attn_backward(*given, lse.transpose(1, 2), dq_part, dk_part, dv_part, *options)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, causal, window, softcap):
        out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, causal, *window, softcap, None, False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = scale, causal, *window, softcap
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        found = [torch.empty_like(t) for t in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *found, 0.0, *ctx.options, None, False)
        return *found, None, None, None, None


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Return out."""
    return _Dense.apply(q, k, v, softmax_scale or q.shape[-1] ** -0.5, causal, window_size, softcap)
