"""flash_attn.cute of flash-attn-4 4.0.0b36 on sm90, in signature and meaning."""

import torch

from fakes.attention import attention, packed, paged


def _options(softmax_scale, causal, window_size, softcap, learnable_sink):
    assert all(side is None or side >= 0 for side in window_size)  # an open side is None
    left, right = (-1 if side is None else side for side in window_size)
    # FlashAttention aligns causal masks and windows to the last key
    return {
        "scale": softmax_scale,
        "causal": "bottom-right" if causal else None,
        "window": (left, 0 if causal else right),
        "softcap": softcap,
        "sink": learnable_sink,
    }


def _check(q, v):
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    assert all(8 <= d <= 256 and d % 8 == 0 for d in (head_dim, head_dim_v)), (
        f"(head_dim, head_dim_v)=({head_dim}, {head_dim_v}) is not supported on SM90. "
        "head_dim and head_dim_v must be between 8 and 256 and divisible by 8."
    )
    assert v.dtype in [torch.float16, torch.bfloat16], "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2"


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    _check(q, v)
    out, lse = attention(q, k, v, **_options(softmax_scale, causal, window_size, softcap, learnable_sink))
    return out, lse if return_lse or q.requires_grad else None


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    _check(q, v)
    options = _options(softmax_scale, causal, window_size, softcap, learnable_sink)
    for lengths in (cu_seqlens_q, cu_seqlens_k, seqused_k, page_table):
        assert lengths is None or lengths.dtype == torch.int32
    if page_table is not None:
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        out, lse = paged(q, k, v, page_table, seqused_k, **options)
    else:
        out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return out, lse if return_lse or q.requires_grad else None
