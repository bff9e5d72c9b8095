"""Attention to a paged cache that ranks share (decode context parallel), for the tests, and faults planted in it.

Each rank attends to its own pages, by its page table; outs, rounded to the dtype as kernels leave them, are merged
by their lse. The faults are classes of vllm#41623, vllm#54300 and vllm#30894.
"""

import math

import torch
from rings import Kernel, grouped

from pytest_attn.guests.ranks.shards import RankCache


class PagedRing(Kernel):
    """One rank's part: all query rows, its own tokens. fault: what is wrong with it, "" for nothing.

    shares_heads: each rank returns its heads only, as after a reduce-scatter.
    """

    def __init__(self, exchange, problem, fault="", returns_lse=False, shares_heads=False):
        super().__init__(exchange, problem, fault, returns_lse)
        self.cache, self.shares_heads = RankCache(self.sharding, self.rank), shares_heads

    def __call__(self, q, k, v):
        if self.w.kv_pages.layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        rows = [t.transpose(0, 1)[None] for t in q.split(self.w.q_lens)] if self.w.is_packed else q.split(1)
        parts = [self.sequence(one, k, v, batch) for batch, one in enumerate(rows)]
        out, lse = (torch.cat(one, 2 if self.w.is_packed else 0) for one in zip(*parts, strict=True))
        out, lse = self.merged(self.exchange.all_gather(out), self.exchange.all_gather(lse))
        if self.shares_heads:
            heads = torch.arange(self.w.heads).tensor_split(self.ranks)[self.rank]
            out, lse = out[:, heads], lse[:, heads]
        if self.w.is_packed:
            out, lse = out[0].transpose(0, 1), lse[0]
        return (out.to(q.dtype), lse) if self.returns_lse else out.to(q.dtype)

    def pages(self, batch):
        """Return the slots of a sequence's tokens in the rank's pool, and their positions in the sequence."""
        size, length = self.w.kv_pages.size, int(self.cache.kv_lens[batch])
        at = torch.arange(length)
        if self.fault == "last page of rank 1 unread" and self.rank == 1:
            at = at[: max(math.ceil(length / size) - 1, 0) * size]
        if self.fault == "first page of rank 0 twice" and self.rank == 0:
            at = torch.cat([at, at[:size]])
        return self.cache.page_table[batch].long()[at // size] * size + at % size, self.keys(self.rank)[at]

    def sequence(self, q, k, v, batch):
        slots, positions = self.pages(batch)
        k, v = (t.reshape(-1, *t.shape[2:])[slots].transpose(0, 1)[None] for t in (k, v))
        s = q.float() @ grouped(k, self.w.heads).float().transpose(-1, -2) * self.w.softmax_scale
        if self.w.plain_mask is not None:  # causal, aligned with the last key
            last = self.w.kv_lens[batch] - q.shape[2] + torch.arange(q.shape[2])
            s = s.masked_fill(positions > last[:, None], -math.inf)
        lse = s.logsumexp(-1) if len(slots) else torch.full(s.shape[:-1], -math.inf)
        p = (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp().to(q.dtype)
        return (p.float() @ grouped(v, self.w.heads).float()).to(q.dtype), lse

    def merged(self, outs, lses):
        out, lse = torch.stack(outs).float(), torch.stack(lses)
        total = lse.logsumexp(0)
        weights = (lse - total.masked_fill(total == -math.inf, 0)).exp()
        if self.fault == "merged in base 2":
            weights = (lse * math.log(2)).softmax(0)
        if self.fault == "mean of ranks":
            weights = torch.full_like(lse, 1 / self.ranks)
        if self.fault == "rank 0 merges alone" and self.rank:
            return outs[self.rank].float(), total
        return (out * weights[..., None]).sum(0), total
