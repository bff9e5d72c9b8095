"""The functions of flash_attn.flash_attn_interface that rings call for each chunk, and the one that Ulysses calls."""

import math
import os

import torch
from fakes.attention import attention
from fakes.signatures import function

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


def _forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, **others):
    """Return out, lse (batch, heads, rows) in float32, and what nobody reads."""
    assert not dropout_p
    assert alibi_slopes is None
    window, causal = (window_size_left, window_size_right), "bottom-right" if causal else None
    out, lse = attention(q, k, v, scale=softmax_scale, causal=causal, window=window, softcap=softcap)
    return out, lse.bfloat16().float() if FAULT == "lse" else lse, None, None


def _backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size_left, window_size_right, softcap, **others
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


def _varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """Return out, lse (heads, tokens) in float32, and what nobody reads."""
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    parts = _parts((q, k, v), (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k))
    found = [_forward(*part, **options)[:2] for part in parts]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], -1), None, None


def _varlen_backward(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **given):
    """Write dq, dk and dv of each sequence."""
    of_rows, of_keys = ("dout", "q", "out", "softmax_lse", "dq"), ("k", "v", "dk", "dv")
    names = {**dict.fromkeys(of_rows, cu_seqlens_q), **dict.fromkeys(of_keys, cu_seqlens_k)}
    tensors = [given.pop(name) if name != "softmax_lse" else given.pop(name).transpose(0, 1) for name in names]
    for parts in _parts(tensors, tuple(names.values())):
        part = dict(zip(names, parts, strict=True))
        part["softmax_lse"] = part["softmax_lse"].transpose(1, 2)
        _backward(**part, **given)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options):
        out, lse, *_ = _forward(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        found = [torch.empty_like(t) for t in (q, k, v)]
        _backward(dout, q, k, v, out, lse, *found, **ctx.options)
        return *found, None


def _dense(q, k, v, softmax_scale, causal, window_size, softcap, **others):
    options = {"softmax_scale": softmax_scale or q.shape[-1] ** -0.5, "causal": causal, "softcap": softcap}
    options |= {"window_size_left": window_size[0], "window_size_right": window_size[1]}
    return _Dense.apply(q, k, v, {**options, "dropout_p": 0.0, "alibi_slopes": None})


_flash_attn_forward = function("flash2_kernels", "_flash_attn_forward", _forward)
_flash_attn_backward = function("flash2_kernels", "_flash_attn_backward", _backward)
_flash_attn_varlen_forward = function("flash2_kernels", "_flash_attn_varlen_forward", _varlen_forward)
_flash_attn_varlen_backward = function("flash2_kernels", "_flash_attn_varlen_backward", _varlen_backward)
flash_attn_func = function("flash2_kernels", "flash_attn_func", _dense)
