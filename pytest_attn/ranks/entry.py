"""One batch entry, or packed sequence, in float64, with its rows and keys told apart by the ranks that hold them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_attn.correctness.exact import modify
from pytest_attn.correctness.reference import Reference, heads_first
from pytest_attn.diagnosis.steps import Region, RegionScores
from pytest_attn.workloads.sharding import Sharding

if TYPE_CHECKING:
    import torch


class Entry:
    """All rows and keys of a batch entry: (heads, rows, keys), or (heads, rows or keys, dim), with the heads of keys repeated.

    of_row, of_key: the rank that holds each; 0 for rows that all have. row_at, key_at: which of the rank's own it is. length:
    how many keys the entry has where it is padded or in pages.
    """

    def __init__(self, reference: Reference, sharding: Sharding, batch: int) -> None:
        w = sharding.workload
        self._inputs, self._region = reference.inputs, Region(batch)
        self.part = RegionScores(self._inputs, w, self._region)
        self.sharding, self.group = sharding, w.group
        segment = self.part.block.segment
        self.rows, self.keys = self.part.rows + segment.q_start, self.part.at + segment.kv_start
        if sharding.shares_pages:  # every rank has all rows
            self.of_row, self.row_at = self.rows * 0, self.rows
        else:
            self.of_row, self.row_at = (t[self.rows] for t in owners(sharding.rows))
        self.length = w.kv_lens[batch] if w.kv_lens else w.kv_len
        self.of_key, self.key_at = (t[self.keys] for t in owners(sharding.keys))
        self.scores: torch.Tensor = self.part.scores[0]
        self.q: torch.Tensor = self.part.q[0].double()
        self.k, self.v = (t[0].double().repeat_interleave(w.group, 0) for t in (self.part.k, self.part.v))
        self.dout: torch.Tensor = self.part.dout[0]

    @cached_property
    def visible(self) -> torch.Tensor:
        """What each row sees, (heads, rows, keys)."""
        return self.scores > -math.inf

    def scores_with(self, k: torch.Tensor) -> torch.Tensor:
        """Return the masked scores of other keys, (heads, keys, dim)."""
        scaled = (self.q * self.sharding.workload.softmax_scale) @ k.transpose(-1, -2)
        return modify(scaled[None], self.part)[0][0]

    @cached_property
    def unmasked(self) -> torch.Tensor:
        """The scores without the mask: those of rows that see all."""
        w = self.sharding.workload.replace(mask=None)
        return RegionScores(self._inputs, w, self._region).scores[0]

    def out(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return attention with these scores, 0 in rows that see nothing, (heads, rows, dim)."""
        return scores.softmax(-1).nan_to_num(0.0) @ v

    def gradients(self, scores: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor) -> Gradients:
        """Return P and dS of a backward pass with these scores, keys, values and lse (heads, rows)."""
        delta = (self.dout * self.out(self.scores, self.v)).sum(-1, keepdim=True)
        p = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        ds = p * (self.dout @ v.transpose(-1, -2) - delta) * self.sharding.workload.softmax_scale
        slope = self.part.slope
        return Gradients(self, p, ds if slope is None else ds * slope[0], k)

    @cached_property
    def lse(self) -> torch.Tensor:
        """The log-sum-exp of each row, (heads, rows)."""
        return self.scores.logsumexp(-1)

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient of key heads from those of query heads."""
        heads, *rest = gradient.shape
        return gradient.reshape(heads // self.group, self.group, *rest).sum(1)

    def mine(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this entry's part of a whole native tensor, (heads, rows or keys, dim)."""
        whole = heads_first(tensor.detach(), self.sharding.workload).double()
        return self.of_whole(name, whole)

    def of_whole(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this entry's part of a heads-first tensor."""
        at = self.keys if name in ("dk", "dv") else self.rows
        return whole[self.part.block.batches][0][:, at]

    def owners(self, name: str) -> torch.Tensor:
        """Return the rank that holds each row of a tensor of this name."""
        return self.of_key if name in ("dk", "dv") else self.of_row


class Gradients:
    """P and dS of one backward pass, (heads, rows, keys), and the keys that it read."""

    def __init__(self, entry: Entry, p: torch.Tensor, ds: torch.Tensor, k: torch.Tensor) -> None:
        self.entry, self.p, self.ds, self.k = entry, p, ds, k

    def of(self, name: str, times: torch.Tensor | None = None) -> torch.Tensor:
        """Return dq, dk or dv. times: how often each row and key counts, (rows, keys), None for once."""
        entry = self.entry
        if name == "dv":
            p = self.p if times is None else self.p * times
            return entry.summed(p.transpose(-1, -2) @ entry.dout)
        ds = self.ds if times is None else self.ds * times
        return ds @ self.k if name == "dq" else entry.summed(ds.transpose(-1, -2) @ entry.q)


def owners(shards: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each position the rank that holds it, and which of the rank's own it is."""
    import torch

    length = sum(map(len, shards))
    rank, local = torch.empty(length, dtype=torch.int64), torch.empty(length, dtype=torch.int64)
    for number, positions in enumerate(shards):
        rank[positions], local[positions] = number, torch.arange(len(positions))
    return rank, local


#: what makes a tensor of one entry
Made = Callable[[Entry], "torch.Tensor"]
