"""flash-attn 2.8.3, flash-attn 3 of the main branch and before, and flash-attn-4 4.0.0b36 on sm90, in signature and meaning.

One implementation stands behind all of them; `fakes.source` appends which one a module is: publish("flash2").
"""

from functools import partial

import torch

from fakes.attention import attention, packed, paged
from fakes.signatures import SIGNATURES, function

#: what this build of flash-attn 3 was made without
LACKING = ()


def _options(softmax_scale, causal, window_size, softcap, alibi_slopes=None, learnable_sink=None, **rest):
    # FlashAttention aligns causal masks and windows to the last key
    return {
        "scale": softmax_scale,
        "causal": "bottom-right" if causal else None,
        "window": window_size,
        "softcap": softcap,
        "alibi": alibi_slopes,
        "sink": learnable_sink,
    }


class Flash2:
    """What is version 2's own: what it refuses, makes of q, k and v, and returns."""

    def check(self, q, v, window_size, softcap, **given):
        if q.shape[-1] > 256:
            raise RuntimeError("FlashAttention forward only supports head dimension at most 256")

    def options(self, **given):
        return _options(**given)

    def values(self, tensors, **given):
        return tensors

    def page_of(self, cache):
        if cache.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")

    def returned(self, q, out, lse, return_attn_probs=False, **given):
        return (out, lse, None) if return_attn_probs else out


class Flash3(Flash2):
    def check(self, q, v, window_size, softcap, **given):
        super().check(q, v, window_size, softcap)
        wide = q.shape[-1] <= 64 and v.shape[-1] <= 512
        if q.shape[-1] != v.shape[-1] and not (wide or (128 < q.shape[-1] <= 192 and 96 < v.shape[-1] <= 128)):
            raise RuntimeError(
                "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V headdim in (96, 128],"
                " or (Q/K <= 64 and V <= 512)."
            )
        if tuple(window_size) != (-1, -1) and "local attention" in LACKING:
            raise RuntimeError("This flash attention build does not support local attention.\nException raised from mha_fwd")
        if softcap and "tanh softcapping" in LACKING:
            raise RuntimeError("This flash attention build does not support tanh softcapping.")
        if "cu_seqlens_k" in given and "varlen" in LACKING:
            raise RuntimeError("This flash attention build does not support varlen.")
        if "k_cache" in given and "paged KV" in LACKING:
            raise RuntimeError("This flash attention build does not support paged KV.")

    def values(self, tensors, q_descale=None, k_descale=None, v_descale=None, **given):
        return _multiplied(tensors, (q_descale, k_descale, v_descale))

    def page_of(self, cache):
        pass

    def returned(self, q, out, lse, return_attn_probs=False, **given):
        return (out, lse) if return_attn_probs else out


class Flash3Old(Flash3):
    def returned(self, q, out, lse, **given):
        return out, lse


class Flash4(Flash2):
    def check(self, q, v, window_size, softcap, **given):
        head_dim, head_dim_v = q.shape[-1], v.shape[-1]
        assert all(8 <= d <= 256 and d % 8 == 0 for d in (head_dim, head_dim_v)), (
            f"(head_dim, head_dim_v)=({head_dim}, {head_dim_v}) is not supported on SM90. "
            "head_dim and head_dim_v must be between 8 and 256 and divisible by 8."
        )
        assert v.dtype in [torch.float16, torch.bfloat16], "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2"
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table"):
            assert given.get(name) is None or given[name].dtype == torch.int32
        if given.get("page_table") is not None:
            assert given["cu_seqlens_k"] is None, "page_table is not supported with cu_seqlens_k"

    def options(self, window_size, causal, **given):
        assert all(side is None or side >= 0 for side in window_size)  # an open side is None
        left, right = (-1 if side is None else side for side in window_size)
        return _options(window_size=(left, 0 if causal else right), causal=causal, **given)

    def returned(self, q, out, lse, return_lse=False, **given):
        return out, lse if return_lse or q.requires_grad else None


class Hub(Flash2):
    def returned(self, q, out, lse, **given):
        return out, lse


def _multiplied(tensors, descales):
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


def dense(version, q, k, v, **given):
    version.check(q, v, **given)
    tensors = version.values((q, k, v), **given)
    return version.returned(q, *attention(*tensors, **version.options(**given)), **given)


def varlen(version, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **given):
    version.check(q, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **given)
    options = version.options(**given)
    for ends, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert longest is None or int(ends.diff().max()) <= longest
    if given.get("page_table") is not None:
        return version.returned(q, *paged(q, k, v, given["page_table"], given["seqused_k"], **options), **given)
    if given.get("block_table") is not None:
        version.page_of(k)
        pages = [(row.long(), int(n)) for row, n in zip(given["block_table"], cu_seqlens_k.diff(), strict=True)]
        k, v = (torch.cat([t[row].flatten(0, 1)[:n] for row, n in pages]) for t in (k, v))
    return version.returned(q, *packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options), **given)


def qkvpacked(version, qkv, **given):
    return dense(version, *qkv.unbind(2), **given)


def kvpacked(version, q, kv, **given):
    return dense(version, q, *kv.unbind(2), **given)


def varlen_qkvpacked(version, qkv, cu_seqlens, max_seqlen, **given):
    return varlen(version, *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **given)


def varlen_kvpacked(version, q, kv, **given):
    k, v = kv.unbind(1)
    return varlen(version, q, k, v, **given)


def with_kvcache(version, q, k_cache, v_cache, k, v, cache_seqlens, **given):
    version.check(q, v_cache, k_cache=k_cache, **given)
    options, table = version.options(**given), given.get("block_table", given.get("page_table"))
    if table is not None:
        version.page_of(k_cache)
        out, lse = paged(q, k_cache, v_cache, table, cache_seqlens, **options)
    else:
        found = [_cached(b, q, k_cache, v_cache, k, v, cache_seqlens, options) for b in range(len(q))]
        out, lse = (torch.cat(part) for part in zip(*found, strict=True))
    return (out, lse) if given["return_softmax_lse"] else out


def _cached(b, q, k_cache, v_cache, k, v, cache_seqlens, options):
    """Attend for one batch entry; new keys are appended in place."""
    length = cache_seqlens if isinstance(cache_seqlens, int) else int(cache_seqlens[b])
    if k is not None:
        k_cache[b, length : length + k.shape[1]] = k[b]
        v_cache[b, length : length + v.shape[1]] = v[b]
        length += k.shape[1]
    one = slice(b, b + 1)
    return attention(q[one], k_cache[one, :length], v_cache[one, :length], **options)


VERSIONS = {"flash2": Flash2, "flash3": Flash3, "flash3_old": Flash3Old, "flash4": Flash4, "hub": Hub}


def publish(name):
    """Have this module be one of the libraries: its functions by their names there, and no others to export."""
    version, module = VERSIONS[name](), globals()
    for one in SIGNATURES[name]:
        shared = module[one.removeprefix("flash_attn_").removesuffix("func").rstrip("_") or "dense"]
        module[one] = function(name, one, partial(shared, version))
    module["__all__"] = list(SIGNATURES[name])
