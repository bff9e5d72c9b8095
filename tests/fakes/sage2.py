"""sageattention 2.2, the functions that backends call: int8 q per 32 rows and k per 64, P and V in float16 or fp8.

Its kernels are CUDA; signatures and errors are those of its documentation, the quantization is of the same fineness.
"""

import torch

from fakes.signatures import function


def _fp16(q, k, v, tensor_layout, is_causal, sm_scale, pv_accum_dtype, return_lse, **others):
    if pv_accum_dtype not in ("fp32", "fp16", "fp16+fp32"):
        raise ValueError(f"Unsupported pv_accum_dtype: {pv_accum_dtype}")
    p, total = weights(q, k, tensor_layout, is_causal, sm_scale, return_lse)
    v = v.to(torch.float16).float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (p.to(torch.float16).float() @ v / total).to(q.dtype)


def _fp8(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, pv_accum_dtype="fp32+fp16", **others):
    if pv_accum_dtype not in ("fp32", "fp32+fp32", "fp32+fp16"):
        raise ValueError(f"Unsupported pv_accum_dtype: {pv_accum_dtype}")
    p, total = weights(q, k, tensor_layout, is_causal, sm_scale, return_lse)
    scale = v.float().abs().amax(2, keepdim=True).clamp(min=1e-6) / 448
    v = (in_fp8(v.float() / scale) * scale).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (in_fp8(p * 448) / 448 @ v / total).to(q.dtype)


def _fp8_sm90(pv_accum_dtype, **given):
    if pv_accum_dtype != "fp32+fp32":
        raise NotImplementedError("Please use pv_accum_dtype='fp32+fp32' for sm90.")
    return _fp8(pv_accum_dtype=pv_accum_dtype, **given)


def weights(q, k, tensor_layout, is_causal, sm_scale, return_lse):
    """Return exp(score - row's largest) and its sum over the keys."""
    assert tensor_layout == "HND", "the fake knows no other"
    assert not return_lse, "the fake knows no lse"
    assert q.dtype in (torch.float16, torch.bfloat16), "Input tensors must be in dtype of torch.float16 or torch.bfloat16"
    k = k - k.mean(dim=2, keepdim=True)
    k = in_int8(k, 64).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = in_int8(q, 32) @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return p, p.sum(-1, keepdim=True)


def in_int8(x, rows):
    blocks = torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[2] % rows)).unflatten(2, (-1, rows))
    scale = blocks.abs().amax((-2, -1), keepdim=True) / 127
    return ((blocks / scale).round() * scale).flatten(2, 3)[:, :, : x.shape[2]]


def in_fp8(x):
    return x.to(torch.float8_e4m3fn).float()


sageattn = function("sage2", "sageattn", _fp8)
sageattn_qk_int8_pv_fp16_cuda = function("sage2", "sageattn_qk_int8_pv_fp16_cuda", _fp16)
sageattn_qk_int8_pv_fp8_cuda = function("sage2", "sageattn_qk_int8_pv_fp8_cuda", _fp8)
sageattn_qk_int8_pv_fp8_cuda_sm90 = function("sage2", "sageattn_qk_int8_pv_fp8_cuda_sm90", _fp8_sm90)
