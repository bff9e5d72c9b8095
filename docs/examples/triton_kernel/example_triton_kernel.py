"""Attention forward in Triton, as in FlashAttention-2, and torch's where no Triton runs."""

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 32


def has_triton(device):
    """Whether the Triton kernel runs here: on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""
    return triton is not None and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


if triton is not None:

    @triton.jit
    def _forward(q, k, v, out, q_len, kv_len, scale, causal: tl.constexpr, dim: tl.constexpr, block: tl.constexpr):
        """One block of queries of one head, one pass over the keys; tensors are contiguous (heads, rows, dim)."""
        head = tl.program_id(1)
        rows = tl.program_id(0) * block + tl.arange(0, block)
        columns = tl.arange(0, dim)
        queries = tl.load(q + (head * q_len + rows[:, None]) * dim + columns[None, :], mask=rows[:, None] < q_len, other=0.0)
        largest = tl.full([block], float("-inf"), tl.float32)
        total = tl.zeros([block], tl.float32)
        sums = tl.zeros([block, dim], tl.float32)
        for start in range(0, kv_len, block):
            keys_at = start + tl.arange(0, block)
            at = (head * kv_len + keys_at[:, None]) * dim + columns[None, :]
            keys = tl.load(k + at, mask=keys_at[:, None] < kv_len, other=0.0)
            values = tl.load(v + at, mask=keys_at[:, None] < kv_len, other=0.0)
            seen = keys_at[None, :] < kv_len
            if causal:
                seen = seen & (keys_at[None, :] <= rows[:, None])
            scores = tl.where(seen, tl.dot(queries, tl.trans(keys)) * scale, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp(scores - new[:, None])
            decay = tl.exp(largest - new)
            total = total * decay + tl.sum(weights, 1)
            sums = sums * decay[:, None] + tl.dot(weights.to(values.dtype), values)
            largest = new
        at = out + (head * q_len + rows[:, None]) * dim + columns[None, :]
        tl.store(at, (sums / total[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < q_len)


def attention(q, k, v, causal=False):
    """Return softmax(q k^T / sqrt(dim)) v of tensors (batch, heads, rows, dim), dim a power of two from 16 on."""
    if k.shape[1] != q.shape[1]:
        raise NotImplementedError("no grouped heads")
    if not has_triton(q.device):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    batch, heads, q_len, dim = q.shape
    out = torch.empty_like(q)
    grid = (triton.cdiv(q_len, BLOCK), batch * heads)
    _forward[grid](q, k, v, out, q_len, k.shape[2], dim**-0.5, causal, dim, BLOCK)
    return out
