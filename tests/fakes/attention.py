"""Attention for fakes: float32 scores, P and output rounded to the dtype, as FlashAttention does; bshd layout."""

import math

import torch


def attention(q, k, v, scale=None, causal=None, window=(-1, -1), softcap=0.0, alibi=None, bias=None, visible=None, sink=None):
    """Return (out, lse) for (batch, rows, heads, dim); causal is None, "top-left" or "bottom-right".

    window is aligned bottom-right; lse is (batch, heads, rows), natural. Rows that see nothing give zeros.
    """
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    qf, kf, vf = (t.transpose(1, 2).float() for t in (q, k, v))
    kf, vf = kf.repeat_interleave(group, 1), vf.repeat_interleave(group, 1)
    scores = qf @ kf.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None]
    last = i + keys - rows
    if alibi is not None:
        scores = scores - alibi.view(1, -1, 1, 1) * (last - j).abs()
    if bias is not None:
        scores = scores + bias.float()
    seen = torch.ones(rows, keys, dtype=torch.bool) if visible is None else visible
    if causal:
        seen = seen & (j <= (i if causal == "top-left" else last))
    left, right = window
    if left is not None and left >= 0:
        seen = seen & (j >= last - left)
    if right is not None and right >= 0:
        seen = seen & (j <= last + right)
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()[..., :keys]
    p = p + (p.to(v.dtype).float() - p).detach()  # rounded, while its gradient stays float32
    out = (p @ vf).to(v.dtype)
    return out.transpose(1, 2), lse


def packed(q, k, v, cu_q, cu_k, **options):
    """Return (out, lse) for sequences end to end, (tokens, heads, dim); lse is (heads, tokens)."""
    outs, lses = [], []
    for b in range(len(cu_q) - 1):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        out, lse = attention(q[None, rows], k[None, keys], v[None, keys], **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1)


def paged(q, pool_k, pool_v, table, lens, **options):
    """Return (out, lse) for queries (batch, rows, heads, dim) over pages (pages, page size, heads, dim)."""
    outs, lses = [], []
    for b, length in enumerate(lens.tolist()):
        k, v = (pool[table[b].long()].flatten(0, 1)[:length] for pool in (pool_k, pool_v))
        out, lse = attention(q[b : b + 1], k[None], v[None], **options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
