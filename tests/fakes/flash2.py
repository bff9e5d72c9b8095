"""flash_attn.flash_attn_interface of flash-attn 2.8.3, in signature and meaning."""

import torch

from fakes.attention import attention, packed, paged


def _options(softmax_scale, causal, window_size, softcap, alibi_slopes):
    # FlashAttention aligns causal masks and windows to the last key
    return {
        "scale": softmax_scale,
        "causal": "bottom-right" if causal else None,
        "window": window_size,
        "softcap": softcap,
        "alibi": alibi_slopes,
    }


def _check(q):
    if q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")


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
    _check(q)
    out, lse = attention(q, k, v, **_options(softmax_scale, causal, window_size, softcap, alibi_slopes))
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    _check(q)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is not None:
        if k.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        lengths = cu_seqlens_k.diff().tolist()
        k, v = (
            torch.cat([t[pages.long()].flatten(0, 1)[:n] for pages, n in zip(block_table, lengths, strict=True)])
            for t in (k, v)
        )
    out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    _check(q)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is not None:
        if k_cache.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        out, lse = paged(q, k_cache, v_cache, block_table, cache_seqlens, **options)
    else:
        if not isinstance(cache_seqlens, int):  # one per batch entry; alike here
            cache_seqlens = int(cache_seqlens.unique())
        if k is not None:  # appended in place
            k_cache[:, cache_seqlens : cache_seqlens + k.shape[1]] = k
            v_cache[:, cache_seqlens : cache_seqlens + v.shape[1]] = v
            cache_seqlens += k.shape[1]
        out, lse = attention(q, k_cache[:, :cache_seqlens], v_cache[:, :cache_seqlens], **options)
    return (out, lse) if return_softmax_lse else out
