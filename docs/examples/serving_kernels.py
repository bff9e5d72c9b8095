"""Stand-ins for serving kernels, as vLLM, FlashInfer and SGLang call theirs."""

import torch


def attend(q, k, v):
    """One sequence, (rows, heads, dim), causal up to its last key."""
    group, later = q.shape[1] // k.shape[1], torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    q, k, v = q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def paged(q, k_pages, v_pages, cu_seqlens, kv_lens, page_table):
    """As in vLLM: queries (tokens, heads, dim), pages (pages, size, kv_heads, dim)."""
    out = torch.empty_like(q)
    for b, keys in enumerate(kv_lens.tolist()):
        k, v = (pages[page_table[b].long()].flatten(0, 1)[:keys] for pages in (k_pages, v_pages))
        rows = slice(cu_seqlens[b], cu_seqlens[b + 1])
        out[rows] = attend(q[rows], k, v)
    return out


def hnd_pages(q, kv_pages, qo_indptr, kv_indptr, kv_indices, kv_last_page_len):
    """As in FlashInfer: pages (pages, 2, kv_heads, size, dim), their numbers in one list."""
    out, size = torch.empty_like(q), kv_pages.shape[3]
    for b, last in enumerate(kv_last_page_len.tolist()):
        pages = kv_pages[kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()].transpose(2, 3)
        keys = (len(pages) - 1) * size + last
        rows = slice(qo_indptr[b], qo_indptr[b + 1])
        out[rows] = attend(q[rows], pages[:, 0].flatten(0, 1)[:keys], pages[:, 1].flatten(0, 1)[:keys])
    return out


def token_slots(q, k_buffer, v_buffer, kv_indptr, kv_indices):
    """As in SGLang, decoding: queries (batch, heads, dim), buffers (slots, kv_heads, dim)."""
    out = torch.empty_like(q)
    for b in range(len(q)):
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        out[b] = attend(q[b][None], k_buffer[slots], v_buffer[slots])[0]
    return out


def append(q, k, v, k_pages, v_pages, cu_seqlens, page_table, cache_seqlens, slot_mapping):
    """A chunk of a prefill: write its keys into the pages, then attend to these and to all before."""
    size = k_pages.shape[1]
    k_pages[slot_mapping // size, slot_mapping % size] = k
    v_pages[slot_mapping // size, slot_mapping % size] = v
    return paged(q, k_pages, v_pages, cu_seqlens, cache_seqlens + cu_seqlens.diff(), page_table)
