"""The two batch prefill wrappers of flashinfer 0.5.3, and its function of one sequence, in signature and meaning."""

import math

import torch

from fakes.attention import attention
from fakes.signatures import function


class _Wrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, *, backend="auto"):
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        assert float_workspace_buffer.dtype == torch.uint8
        self._backend, self._kv_layout = backend, kv_layout
        self._planned = False

    def _plan(self, ends_q, lens_kv, heads, dim, causal, sm_scale, window_left, soft_cap, mask, q_dtype, kv_dtype):
        assert ends_q.dtype == torch.int32
        if mask is not None:
            if self._backend == "fa3":
                raise RuntimeError("fa3 has no custom_mask")
            assert mask.dtype == torch.bool
            assert mask.numel() == int((ends_q.diff() * torch.tensor(lens_kv)).sum())
        self._planned, self._ends_q, self._lens_kv, self._mask = True, ends_q.tolist(), lens_kv, mask
        self._heads, self._dtypes = heads, (q_dtype, kv_dtype or q_dtype)
        self._options = {
            "scale": dim**-0.5 if sm_scale is None else sm_scale,
            "causal": "bottom-right" if causal and mask is None else None,  # causal is ignored where a mask is given
            "window": (window_left, -1),
            "softcap": soft_cap or 0.0,
        }

    def _check(self, q, k):
        assert self._planned
        for name, tensor, planned in (("q", q, self._dtypes[0]), ("k", k, self._dtypes[1])):
            if str(tensor.dtype).removeprefix("torch.") != str(planned).removeprefix("torch."):
                side = "q" if name == "q" else "kv"
                raise ValueError(
                    f"The dtype of {name} {tensor.dtype} does not match the {side}_data_type {planned} specified in plan"
                    " function."
                )
        assert (q.shape[1], k.shape[-2]) == self._heads

    def _sequences(self, q, keys_of, return_lse):
        found, at = [], 0
        for b, keys in enumerate(self._lens_kv):
            rows = q[None, self._ends_q[b] : self._ends_q[b + 1]]
            visible = None
            if self._mask is not None:
                entries = rows.shape[1] * keys
                visible = self._mask[at : at + entries].view(rows.shape[1], keys)
                at += entries
            k, v = keys_of(b)
            found.append(_returned(*attention(rows, k[None], v[None], visible=visible, **self._options), True))
        out, lse = (torch.cat(part) for part in zip(*found, strict=True))
        return (out, lse) if return_lse else out


def _plan_ragged(
    self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, custom_mask, causal, window_left,
    logits_soft_cap, sm_scale, q_data_type, kv_data_type, **others,
):  # fmt: skip
    if len(kv_indptr) != len(qo_indptr):
        raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
    assert kv_indptr.dtype == torch.int32
    self._ends_kv, heads = kv_indptr.tolist(), (num_qo_heads, num_kv_heads)
    of_scores, types = (window_left, logits_soft_cap, custom_mask), (q_data_type, kv_data_type)
    self._plan(qo_indptr, kv_indptr.diff().tolist(), heads, head_dim_qk, causal, sm_scale, *of_scores, *types)
    self._dims = head_dim_qk, head_dim_vo or head_dim_qk


def _plan_paged(
    self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
    page_size, custom_mask, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type, **others,
):  # fmt: skip
    for tensor in (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
        assert tensor.dtype == torch.int32
    lens = ((paged_kv_indptr.diff() - 1).clamp(min=0) * page_size + paged_kv_last_page_len).tolist()
    self._pages, self._starts = paged_kv_indices.long(), paged_kv_indptr.tolist()
    heads, of_scores = (num_qo_heads, num_kv_heads), (window_left, logits_soft_cap, custom_mask)
    self._plan(qo_indptr, lens, heads, head_dim_qk, causal, sm_scale, *of_scores, q_data_type, kv_data_type)


def _single(q, k, v, causal, kv_layout, sm_scale, window_left, logits_soft_cap, return_lse, **others):
    """Of one sequence, (rows, heads, dim); causal and window are aligned to the last key."""
    assert kv_layout == "NHD", "the fake knows no other"
    causal, window, softcap = "bottom-right" if causal else None, (window_left, -1), logits_soft_cap or 0.0
    out, lse = attention(q[None], k[None], v[None], scale=sm_scale, causal=causal, window=window, softcap=softcap)
    return _returned(out, lse, return_lse)


def _returned(out, lse, return_lse):
    return (out[0], lse[0].T / math.log(2)) if return_lse else out[0]


single_prefill_with_kv_cache = function("flashinfer", "single_prefill_with_kv_cache", _single)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    plan = function("flashinfer", "ragged plan", _plan_ragged)

    def run(self, q, k, v, *args, out=None, lse=None, return_lse=False, enable_pdl=None):
        self._check(q, k)
        assert (q.shape[-1], v.shape[-1]) == self._dims
        starts = self._ends_kv
        return self._sequences(q, lambda b: (k[starts[b] : starts[b + 1]], v[starts[b] : starts[b + 1]]), return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    plan = function("flashinfer", "paged plan", _plan_paged)

    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False, enable_pdl=None):
        k_cache, v_cache = paged_kv_cache
        if self._kv_layout == "HND":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        self._check(q, k_cache)

        def keys_of(b):
            used = self._pages[self._starts[b] : self._starts[b + 1]]
            return tuple(cache[used].flatten(0, 1)[: self._lens_kv[b]] for cache in (k_cache, v_cache))

        return self._sequences(q, keys_of, return_lse)
