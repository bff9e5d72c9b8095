"""sageattention 1.0.6 (core.py and the kernels it calls), block by block; Triton's masked loads give zeros.

Left out: `assert q.is_cuda`. Division is a product with the reciprocal, as div.full.f32 may do it, so that ties fall either
way.
"""

import torch

from fakes.signatures import row

BLOCK_M, BLOCK_N = 128, 64


@row("sage1", "sageattn")
def sageattn(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, kwargs=None):
    dtype = q.dtype
    assert dtype in [torch.float16, torch.bfloat16, torch.float32], (
        "Input tensors must be in dtype of torch.float16, torch.bfloat16, or torch.float32."
    )
    assert q.device == k.device == v.device, "All tensors must be on the same device."
    assert q.dtype == k.dtype == v.dtype, "All tensors must have the same dtype."
    headdim = q.size(-1)
    assert headdim in [64, 96, 128], "headdim should be in [64, 96, 128]."
    assert all(t.stride(-1) == 1 for t in (q, k, v)), "Last dim of qkv must be contiguous."
    assert tensor_layout == "HND", "the fake knows no other"
    if is_causal:
        assert q.shape[2] == k.shape[2], "qo_len and kv_len must be equal for causal attention"
    if smooth_k:
        k -= k.mean(dim=2, keepdim=True)
    sm_scale = headdim**-0.5 if sm_scale is None else sm_scale
    q_int8, q_scale = per_block_int8(q, BLOCK_M, sm_scale * 1.44269504)
    k_int8, k_scale = per_block_int8(k, BLOCK_N, 1.0)
    group = q.shape[1] // k.shape[1]
    k_int8, k_scale, v = (t.repeat_interleave(group, 1) for t in (k_int8, k_scale, v.to(torch.float16)))
    return attention(q_int8, q_scale, k_int8, k_scale, v, is_causal)[:, :, : q.shape[2]].to(dtype)


def padded(x, block):
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))


def per_block_int8(x, block, sm_scale):
    """Return int8 values, padded to whole blocks, and a scale for each row."""
    x = padded(x.float() * sm_scale, block).unflatten(2, (-1, block))
    scale = x.abs().amax((-2, -1), keepdim=True) / 127.0
    x_int8 = x * (1 / scale)
    x_int8 = x_int8 + 0.5 * torch.where(x_int8 >= 0, 1, -1)
    return x_int8.to(torch.int8).flatten(2, 3), scale.expand(-1, -1, -1, block, 1).flatten(2, 3)


def attention(q_int8, q_scale, k_int8, k_scale, v, is_causal):
    v = padded(v, BLOCK_N)
    rows = torch.arange(q_int8.shape[2])
    m = torch.full((*q_int8.shape[:3], 1), -float("inf"))
    total = torch.ones_like(m)
    acc = torch.zeros(*q_int8.shape[:3], v.shape[-1])
    for start in range(0, k_int8.shape[2], BLOCK_N):
        block = slice(start, start + BLOCK_N)
        keys = k_int8[:, :, block].float().transpose(-1, -2)
        qk = q_int8.float() @ keys * q_scale * k_scale[:, :, start, None]
        if is_causal:
            qk = qk + torch.where(rows[:, None] >= torch.arange(start, start + BLOCK_N), 0, -1.0e6)
        top = torch.maximum(m, qk.amax(-1, keepdim=True))
        p = torch.exp2(qk - top)
        total = total * torch.exp2(m - top) + p.sum(-1, keepdim=True)
        acc = acc * torch.exp2(m - top) + half_product(p.to(torch.float16), v[:, :, block])
        m = top
    return acc / total


def half_product(p, v):
    """Sum in float16, 16 keys at a time."""
    acc = torch.zeros(*p.shape[:3], v.shape[-1])
    for start in range(0, BLOCK_N, 16):
        acc = (acc + p[..., start : start + 16].float() @ v[:, :, start : start + 16].float()).to(torch.float16).float()
    return acc
