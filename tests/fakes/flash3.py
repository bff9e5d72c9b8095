"""flash_attn_3.flash_attn_interface of flash-attention 3's main branch, in signature and meaning."""

import torch

from fakes.attention import attention, packed, paged

LACKING = ()  # what this build was made without


def _options(softmax_scale, causal, window_size, softcap):
    # FlashAttention aligns causal masks and windows to the last key
    return {"scale": softmax_scale, "causal": "bottom-right" if causal else None, "window": window_size, "softcap": softcap}


def _check(q, v, window_size, softcap):
    if q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    wide = q.shape[-1] <= 64 and v.shape[-1] <= 512
    if q.shape[-1] != v.shape[-1] and not (wide or (128 < q.shape[-1] <= 192 and 96 < v.shape[-1] <= 128)):
        raise RuntimeError(
            "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V headdim in (96, 128], "
            "or (Q/K <= 64 and V <= 512)."
        )
    if tuple(window_size) != (-1, -1) and "local attention" in LACKING:
        raise RuntimeError("This flash attention build does not support local attention.\nException raised from mha_fwd")
    if softcap and "tanh softcapping" in LACKING:
        raise RuntimeError("This flash attention build does not support tanh softcapping.")


def _values(tensors, descales):
    """fp8 tensors with descales (batch, kv_heads), multiplied out exactly; others as they are. The result is bfloat16."""
    if tensors[0].dtype != torch.float8_e4m3fn:
        return tensors
    kv_heads = tensors[1].shape[2]
    values = []
    for tensor, descale in zip(tensors, descales, strict=True):
        if descale is not None and (descale.shape != (len(tensor), kv_heads) or descale.dtype != torch.float32):
            raise RuntimeError("descale must be float32 of shape (batch_size, num_heads_k)")
        of_heads = torch.ones(len(tensor), kv_heads) if descale is None else descale
        values.append(tensor.float() * of_heads.repeat_interleave(tensor.shape[2] // kv_heads, 1)[:, None, :, None])
    return [value.bfloat16() for value in values]


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    _check(q, v, window_size, softcap)
    q, k, v = _values((q, k, v), (q_descale, k_descale, v_descale))
    out, lse = attention(q, k, v, **_options(softmax_scale, causal, window_size, softcap))
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    _check(q, v, window_size, softcap)
    if "varlen" in LACKING:
        raise RuntimeError("This flash attention build does not support varlen.")
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **_options(softmax_scale, causal, window_size, softcap))
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    _check(q, v_cache, window_size, softcap)
    if "paged KV" in LACKING:
        raise RuntimeError("This flash attention build does not support paged KV.")
    options = _options(softmax_scale, causal, window_size, softcap)
    out, lse = paged(q, k_cache, v_cache, page_table, cache_seqlens, **options)
    return (out, lse) if return_softmax_lse else out
