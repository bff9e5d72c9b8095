"""Attention over ranks, written for the tests: a ring, an all-gather and Ulysses' all-to-all, and faults planted in them.

Chunks are rounded to the dtype as kernels leave them, and merged in float32. The faults are those that were found in the
wild: diffusers#14265, TE#1557, pytorch#141429, attention-gym#200, slime#1871, vllm-omni#5716, TE#1930 and others.
"""

import math
from dataclasses import dataclass

import torch

from pytest_attn.backends.dense import boolean_mask
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.masks import Sequences
from pytest_attn.workloads.workload import sequence_lengths


@dataclass
class Problem:
    """What each rank knows: the workload, who has which rows and keys, and what a row sees (batch or 1, heads or 1, q, kv)."""

    sharding: Sharding
    mask: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, sharding):
        w = sharding.workload
        if not w.is_packed:
            inputs = draw_inputs(w)
            mask = boolean_mask(inputs)
            mask = torch.ones(1, 1, w.q_len, w.kv_len, dtype=torch.bool) if mask is None else mask
            return cls(sharding, mask.expand(-1, -1, w.q_len, w.kv_len), inputs.bias)
        blocks = []
        for q_len, kv_len in sequence_lengths(w):
            seen = torch.ones(q_len, kv_len, dtype=torch.bool)
            if w.plain_mask:
                zero = torch.zeros(1, 1, dtype=torch.int64)
                mod = w.plain_mask.bind(Sequences(1, w.heads, q_len, kv_len, torch.device("cpu")))
                seen = mod(zero, zero, torch.arange(q_len)[:, None], torch.arange(kv_len)[None]).expand(q_len, kv_len)
            blocks.append(seen)
        return cls(sharding, torch.block_diag(*blocks).bool()[None, None], None)


def scores_of(q, k, w, bias):
    """Return the scores in float32, and their slope."""
    raw = q.float() @ k.float().transpose(-1, -2) * w.softmax_scale
    slope = 1.0
    if w.softcap is not None:
        capped = torch.tanh(raw / w.softcap)
        raw, slope = capped * w.softcap, 1 - capped.square()
    return (raw if bias is None else raw + bias.float()), slope


def grouped(t, heads):
    return t.repeat_interleave(heads // t.shape[1], 1)


def summed(t, w):
    """Return the gradient of grouped key heads."""
    return t.unflatten(1, (w.kv_heads, -1)).sum(2)


class Kernel:
    """One rank's attention. fault: what is wrong with it, "" for nothing."""

    def __init__(self, exchange, problem, fault="", returns_lse=False):
        self.exchange, self.problem, self.fault, self.returns_lse = exchange, problem, fault, returns_lse
        self.w, self.sharding = problem.sharding.workload, problem.sharding
        self.rank, self.ranks = exchange.rank, exchange.ranks

    def __call__(self, q, k, v):
        kernel = self

        class Autograd(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                out, lse = kernel.forward(q, k, v)
                ctx.save_for_backward(q, k, v, out, lse)
                ctx.mark_non_differentiable(lse)
                return out, lse

            @staticmethod
            def backward(ctx, dout, _):
                return kernel.backward(*ctx.saved_tensors, dout)

        packed = self.w.is_packed
        if packed:
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out, lse = Autograd.apply(q, k, v)
        if packed:
            out, lse = out[0].transpose(0, 1), lse[0]
        return (out, lse) if self.returns_lse else out

    # -- a chunk -------------------------------------------------------------------------------------------------------

    def seen(self, rows, keys):
        mask, bias = self.problem.mask, self.problem.bias
        if bias is not None:
            bias = bias.expand(-1, -1, self.w.q_len, self.w.kv_len)[:, :, rows][..., keys]
        return mask[:, :, rows][..., keys], bias

    def scores(self, q, k, seen):
        mask, bias = seen
        s, slope = scores_of(q, grouped(k, q.shape[1]), self.w, bias)
        return s.masked_fill(~mask, -math.inf), slope

    def chunk(self, q, k, v, seen):
        """Return out, rounded as a kernel leaves it, and lse of one chunk of keys."""
        s, _ = self.scores(q, k, seen)
        lse = s.logsumexp(-1)
        p = (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp().to(q.dtype)
        return (p.float() @ grouped(v, q.shape[1]).float()).to(q.dtype), lse

    def chunk_backward(self, q, k, v, seen, lse, delta, dout):
        """Return dq, dk, dv of one chunk of keys, rounded, by the lse and D of whole rows."""
        s, slope = self.scores(q, k, seen)
        p = (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
        dv = summed(p.to(q.dtype).float().transpose(-1, -2) @ dout.float(), self.w).to(q.dtype)
        ds = p * (dout.float() @ grouped(v, q.shape[1]).float().transpose(-1, -2) - delta) * slope
        ds = (ds * self.w.softmax_scale).to(q.dtype).float()
        dq = (ds @ grouped(k, q.shape[1]).float()).to(q.dtype)
        return dq, summed(ds.transpose(-1, -2) @ q.float(), self.w).to(q.dtype), dv

    def rows(self):
        return self.sharding.rows[self.rank]

    def keys(self, source):
        return self.sharding.keys[source]

    def deltas(self, out, dout):
        return (out.float() * dout.float()).sum(-1, keepdim=True)


class Ring(Kernel):
    """Keys and values go round; outs of chunks are merged by their lse; dk and dv travel with their chunk."""

    #: what gradients are summed in
    sums = torch.float32

    def forward(self, q, k, v):
        out, lse = torch.zeros(*q.shape[:3], v.shape[-1]), torch.full(q.shape[:3], -math.inf)
        if self.fault == "lse in bfloat16":
            lse = lse.bfloat16()
        own_k, own_v, partial = k, v, None
        for step in range(self.ranks):
            source = (self.rank - step) % self.ranks
            keys, values = (own_k, own_v) if self.fault == "stale keys" else (k, v)
            if self.fault == "stale values":
                values = own_v
            times = 1
            if step == self.ranks - 1 and self.fault == "last chunk skipped" and step:
                times = 0
            if step == 0 and self.fault == "own chunk twice":
                times = 2
            if self.fault == "rank 1 never receives" and self.rank == 1 and step:
                times = 0
            for _ in range(times):
                one = self.chunk(q, keys, values, self.seen_at(source, keys.shape[2]))
                partial = one if partial is None else partial
                out, lse = self.merged(out, lse, *one)
            k, v = self.exchange.shift(k), self.exchange.shift(v)
        if self.fault == "rank 0 right, others not" and self.rank:
            out = out * 1.02
        self.first_lse = partial[1]
        if self.fault == "head and tail swapped":
            out = out.roll(out.shape[2] // 2, 2)
        return out.to(q.dtype), lse.float()

    def seen_at(self, source, length):
        rows, keys = self.rows(), self.keys(source)
        if self.fault == "local causal":
            rows, keys = torch.arange(len(rows)), torch.arange(len(keys))
        if self.fault == "causal on the diagonal only" and source != self.rank:
            mask, bias = self.seen(rows, keys)
            return torch.ones_like(mask), bias
        if self.fault == "positions of contiguous shards":
            whole = Sharding(self.w, "contiguous", self.ranks)
            rows, keys = whole.rows[self.rank][: len(rows)], whole.keys[source][: len(keys)]
        if self.fault == "sources counted backwards":
            keys = self.keys((self.rank + (self.rank - source)) % self.ranks)
        if len(keys) != length:
            keys = keys[:length] if len(keys) > length else torch.cat([keys, keys[-1:].expand(length - len(keys))])
        mask, bias = self.seen(rows, keys)
        if self.fault == "tail of uneven shards":
            mask = mask.clone()
            mask[..., min(map(len, self.sharding.keys)) :] = False
        return mask, bias

    def merged(self, out, lse, out_b, lse_b):
        """Merge a chunk into what was seen before, in float32."""
        fault = self.fault
        if fault == "merged in base 2":
            total = torch.logaddexp2(lse, lse_b)
            a, b = (2 ** (one - total).nan_to_num(-math.inf, neginf=-math.inf) for one in (lse, lse_b))
            return out * a[..., None] + out_b.float() * b[..., None], total
        if fault == "merged by equal weights":
            total = torch.logaddexp(lse, lse_b)
            half = torch.where(lse == -math.inf, 0.0, 0.5)[..., None]
            return out * half + out_b.float() * (1 - half), total
        if fault == "chunks added up":
            return out + out_b.float(), torch.logaddexp(lse, lse_b)
        if fault == "NaN of rows without keys":
            total = torch.maximum(lse, lse_b) + torch.log1p((-(lse - lse_b).abs()).exp())
            return out * (lse - total).exp()[..., None] + out_b.float() * (lse_b - total).exp()[..., None], total
        if fault == "exp of lse itself":
            total = (lse.exp() + lse_b.exp()).log()
            return (out * lse.exp()[..., None] + out_b.float() * lse_b.exp()[..., None]) / total.exp()[..., None], total
        if fault == "lse in bfloat16":
            lse_b = lse_b.bfloat16()
        total = torch.logaddexp(lse.float(), lse_b.float()).to(lse.dtype)
        safe = total.float().masked_fill(total == -math.inf, 0)
        a, b = (lse.float() - safe).exp()[..., None], (lse_b.float() - safe).exp()[..., None]
        return out * a + out_b.float() * b, total

    def backward(self, q, k, v, out, lse, dout):
        fault = self.fault
        if fault == "lse of the own chunk in backward":
            lse = self.first_lse
        delta = self.deltas(out, dout)
        if fault == "D left out":
            delta = delta * 0
        dq, dk, dv = (torch.zeros(t.shape, dtype=self.sums) for t in (q, k, v))
        own_k, own_v = k, v
        for step in range(self.ranks):
            source = (self.rank - step) % self.ranks
            stale = fault == "stale keys in backward" and own_k.shape == k.shape
            keys, values = (own_k, own_v) if stale else (k, v)
            parts = self.chunk_backward(q, keys, values, self.seen_at(source, keys.shape[2]), lse, delta, dout)
            if not (fault == "dq of one step dropped" and step == self.ranks - 1):
                dq += parts[0].to(self.sums)
            if not (fault == "dk and dv not reduced" and step):
                times = 2 if fault == "remote dk and dv twice" and step else 1
                dk, dv = dk + times * parts[1].to(self.sums), dv + times * parts[2].to(self.sums)
            if fault == "dk and dv stay with the last rank" and step == self.ranks - 1:
                break
            k, v, dk, dv = (self.exchange.shift(t) for t in (k, v, dk, dv))
        if fault == "dk and dv stay with the last rank":
            dk, dv = (t if t.shape == own_k.shape else torch.zeros(own_k.shape) for t in (dk, dv))
        if fault == "gradients divided by the ranks":
            dq, dk, dv = (t / self.ranks for t in (dq, dk, dv))
        if fault == "gradients reduced twice":
            dk, dv = dk * self.ranks, dv * self.ranks
        if fault == "dv of rank 0 alone" and self.rank:
            dv = dv * 0
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class AllGather(Kernel):
    """Keys and values of all ranks are gathered; dk and dv are summed over ranks, and scattered."""

    def gathered(self, t, name):
        parts = self.exchange.all_gather(t)
        if self.fault == "gathered in reverse order":
            parts = parts[::-1]
        if self.fault == "values of the next rank" and name == "v":
            parts = [*parts[1:], parts[0]]
        if self.fault == "last rank missing":
            parts[-1] = torch.zeros_like(parts[-1])
        return torch.cat(parts, 2)

    def order(self):
        if self.fault == "order not restored":
            return torch.arange(sum(map(len, self.sharding.keys)))
        return torch.cat(self.sharding.keys)

    def rows(self):
        rows = super().rows()
        return torch.arange(len(rows)) if self.fault == "rows begin at 0 on each rank" else rows

    def forward(self, q, k, v):
        return self.chunk(q, self.gathered(k, "k"), self.gathered(v, "v"), self.seen(self.rows(), self.order()))

    def backward(self, q, k, v, out, lse, dout):
        k, v = self.gathered(k, "k"), self.gathered(v, "v")
        seen = self.seen(self.rows(), self.order())
        dq, dk, dv = self.chunk_backward(q, k, v, seen, lse, self.deltas(out, dout), dout)
        sizes = [len(one) for one in self.sharding.keys]
        found = []
        for whole in (dk, dv):
            parts = self.exchange.all_to_all(list(whole.split(sizes, 2)))
            total = sum(one.float() for one in parts)
            if self.fault == "dk and dv of own rows only":
                total = parts[self.rank].float()
            if self.fault == "mean over ranks":
                total = total / self.ranks
            if self.fault == "reduced and not scattered home":
                total = sum(
                    one.float() for one in self.exchange.all_to_all([whole.split(sizes, 2)[i - 1] for i in range(self.ranks)])
                )
                total = total if total.shape == parts[0].shape else torch.zeros(parts[0].shape)
            found.append(total.to(q.dtype))
        return dq, *found


class Ulysses(Kernel):
    """Each rank computes some heads of all rows: sequences are exchanged for heads, and back."""

    def to_heads(self, t, restored):
        """Return all rows of the rank's heads, in the order of positions, from the rank's rows of all heads."""
        received = torch.cat(self.exchange.all_to_all(list(t.tensor_split(self.ranks, 1))), 2)
        if self.fault == "order of rows not restored":
            return received
        whole = torch.empty_like(received)
        whole[:, :, torch.cat(restored)] = received
        return whole

    def to_rows(self, t, shards):
        parts = self.exchange.all_to_all([t[:, :, one] for one in shards])
        if self.fault == "heads returned in reverse order":
            parts = parts[::-1]
        return torch.cat(parts, 1)

    def spread(self, t):
        if self.fault == "key head of the wrong group":
            return t.repeat(1, self.w.heads // self.w.kv_heads, 1, 1)
        return grouped(t, self.w.heads)

    def forward(self, q, k, v):
        q, k, v = self.on_heads(q, k, v)
        out, lse = self.local(q, k, v)
        return self.to_rows(out, self.sharding.rows), self.to_rows(lse[..., None], self.sharding.rows)[..., 0]

    def on_heads(self, q, k, v):
        rows, keys = self.sharding.rows, self.sharding.keys
        return self.to_heads(q, rows), self.to_heads(self.spread(k), keys), self.to_heads(self.spread(v), keys)

    def local(self, q, k, v):
        return self.chunk(q, k, v, self.on_mine())

    def on_mine(self):
        mask, bias = self.seen(torch.arange(self.problem.mask.shape[2]), torch.arange(self.problem.mask.shape[3]))
        heads = torch.arange(self.w.heads).tensor_split(self.ranks)[self.rank]
        some = [t if t is None or t.shape[1] == 1 else t[:, heads] for t in (mask, bias)]
        if self.fault == "bias of the first heads" and bias is not None and bias.shape[1] > 1:
            some[1] = bias[:, : len(heads)]
        return some

    def backward(self, q, k, v, out, lse, dout):
        rows, keys = self.sharding.rows, self.sharding.keys
        whole = self.on_heads(q, k, v)
        out, lse, dout = (self.to_heads(t, rows) for t in (out, lse[..., None], dout))
        s, slope = self.scores(whole[0], whole[1], self.on_mine())
        p = (s - lse.masked_fill(lse == -math.inf, 0)).exp()
        dv = p.to(q.dtype).float().transpose(-1, -2) @ dout.float()
        ds = p * (dout.float() @ whole[2].float().transpose(-1, -2) - self.deltas(out, dout)) * slope * self.w.softmax_scale
        ds = ds.to(q.dtype).float()
        dk = ds.transpose(-1, -2) @ whole[0].float()
        dq = self.to_rows((ds @ whole[1].float()).to(q.dtype), rows)
        dk, dv = (self.to_rows(t, keys).unflatten(1, (self.w.kv_heads, -1)) for t in (dk, dv))
        if self.fault == "first of the group only":
            return dq, dk[:, :, 0].to(q.dtype), dv[:, :, 0].to(q.dtype)
        if self.fault == "mean over the group":
            return dq, dk.mean(2).to(q.dtype), dv.mean(2).to(q.dtype)
        return dq, dk.sum(2).to(q.dtype), dv.sum(2).to(q.dtype)


HONEST = (Ring, AllGather, Ulysses)
