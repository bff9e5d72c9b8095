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


def _cached(b, q, k_cache, v_cache, k, v, cache_seqlens, options):
    """Attend for one batch entry; new keys are appended in place."""
    length = cache_seqlens if isinstance(cache_seqlens, int) else int(cache_seqlens[b])
    if k is not None:
        k_cache[b, length : length + k.shape[1]] = k[b]
        v_cache[b, length : length + v.shape[1]] = v[b]
        length += k.shape[1]
    one = slice(b, b + 1)
    return attention(q[one], k_cache[one, :length], v_cache[one, :length], **options)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(*qkv.unbind(2), *options)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, *kv.unbind(2), *options)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*qkv.unbind(1), *lengths, *options)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
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
):
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, *kv.unbind(1), *lengths, *options)


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
        found = [_cached(b, q, k_cache, v_cache, k, v, cache_seqlens, options) for b in range(len(q))]
        out, lse = (torch.cat(part) for part in zip(*found, strict=True))
    return (out, lse) if return_softmax_lse else out
