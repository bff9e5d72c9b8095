"""Attention forward and backward in float64, step by step, where a step can be replaced by a wrong one.

A region is some rows with all keys where out or dq is asked for, and some keys with all rows where dk or dv is; of small
workloads it is all of both. lse and D come from the reference, so no region needs what it leaves out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from pytest_attn.correctness.arithmetic import (
    Block,
    Chunk,
    kept_share,
    modify,
    over_group,
    over_keys,
    over_rows,
    per_key,
    scaled_scores,
    weights_given,
)
from pytest_attn.correctness.reference import Reference, segments_of
from pytest_attn.workloads.dtypes import FLOATING_DTYPES
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload, grouped

#: scores up to which a region holds all rows and keys, and how many rows or keys it holds beyond that
_WHOLE, _FEW = 1 << 18, 8
#: scores that no region may exceed
_MOST = 1 << 22
#: what one rounding of P or dS may be off, with room for what else a wrong step does to it
UNIT = {name: max(one.spacing, 2.0**-18) for name, one in FLOATING_DTYPES.items()}


@dataclass(frozen=True)
class Region:
    """Part of a workload that is computed: a batch entry (packed: a sequence), rows and keys of it, None for all."""

    batch: int
    rows: torch.Tensor | None = None
    keys: torch.Tensor | None = None


class RegionScores(Chunk):
    """The rows and keys of a region, and their scores.

    scaled, scores: before and after softcap, bias, ALiBi, score_mod and mask; slope: derivative between the two, None for 1.
    All (1, heads, rows, keys), float64.
    """

    def __init__(self, inputs: Inputs, w: Workload, region: Region) -> None:
        segments, batch = list(segments_of(inputs, w, inputs.device)), region.batch
        segment, batches = (segments[batch], slice(0, 1)) if w.is_packed else (segments[0], slice(batch, batch + 1))
        block = Block(segment, batches, slice(0, w.kv_heads))
        q_len, kv_len = segment.lengths
        rows = torch.arange(q_len, device=block.k.device) if region.rows is None else region.rows
        super().__init__(block, rows)
        at = torch.arange(kv_len, device=rows.device) if region.keys is None else region.keys
        self.at, self.keys = at, at  # type: ignore[assignment]  # an index does where a span does
        self.k, self.v = block.k[:, :, at], block.v[:, :, at]
        self.key_index = at.view(1, 1, 1, -1)
        self.scaled = scaled_scores(self)
        self.scores, self.slope = modify(self.scaled.clone(), self)

    @property
    def workload(self) -> Workload:
        """The workload whose scores these are."""
        return self.block.workload

    @property
    def dout(self) -> torch.Tensor:
        """The gradient of out, (1, heads, rows, v_head_dim)."""
        return self.block.dout[:, :, self.rows].double()

    @cached_property
    def dp(self) -> torch.Tensor:
        """The gradient of P, (1, heads, rows, keys)."""
        return self.dropped(per_key(self.dout, self.v))

    def dropped(self, weights: torch.Tensor) -> torch.Tensor:
        """Return P, or dP, (1, heads, rows, keys), as dropout leaves it."""
        share = kept_share(self)
        return weights if share is None else weights * share

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region of a heads-first tensor (batch, heads, rows, ...) of query rows, its heads grouped."""
        return self._of(grouped(tensor, self.workload), self.rows + self.block.segment.q_start)

    def of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region of a heads-first tensor (batch, kv_heads, keys, ...)."""
        return self._of(tensor, self.at + self.block.segment.kv_start)

    def _of(self, tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return tensor[self.block.batches][:, :, at.to(tensor.device)]


def regions_of(reference: Reference, name: str, bad: torch.Tensor) -> Iterator[Region]:
    """Yield where to look at a tensor, the worst batch entry first; nothing where regions would be too large.

    bad: (batch, heads, rows), rows of the tensor that are wrong.
    """
    w = reference.inputs.workload
    if reference.is_sampled:
        return
    if w.is_packed:
        lengths = list(zip(w.q_lens or (), w.kv_lens or (), strict=True))
        if w.heads * sum(q_len * kv_len for q_len, kv_len in lengths) <= _WHOLE:
            yield from (Region(batch) for batch, (q_len, kv_len) in enumerate(lengths) if q_len and kv_len)
        return
    entries = bad.any(-1).any(-1)
    for batch in sorted(range(w.batch), key=lambda b: not bool(entries[b])):
        region = _region_in(w, name, batch, bad[batch].any(0))
        if region is not None:
            yield region


def _region_in(w: Workload, name: str, batch: int, faulty: torch.Tensor) -> Region | None:
    is_of_keys = name in ("dk", "dv")
    if w.heads * w.q_len * w.kv_len <= _WHOLE:
        return Region(batch)
    if w.heads * (w.q_len if is_of_keys else w.kv_len) * 2 * _FEW > _MOST:
        return None
    chosen = torch.cat([faulty.nonzero().flatten()[:_FEW], (~faulty).nonzero().flatten()[:_FEW]]).sort().values
    return Region(batch, keys=chosen) if is_of_keys else Region(batch, rows=chosen)


@dataclass(frozen=True)
class AttentionSteps:
    """Start of a backward pass, and its steps: those of an honest one, unless they are replaced.

    region: scores and slopes; lse (1, heads, rows, 1); row_sum: D, alike, and row_sum_var: its variance, in units squared.
    dscores: (P, dP, D) -> dS. weigh: P, or dS, as the last products take it. summed: sums a gradient of the keys over the
    query heads of each key head. slope: of the modifications, None for 1.
    """

    region: RegionScores
    lse: torch.Tensor
    row_sum: torch.Tensor
    row_sum_var: torch.Tensor
    slope: torch.Tensor | None = None
    dscores: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = lambda p, dp, d: p * (dp - d)
    weigh: Callable[[torch.Tensor], torch.Tensor] = lambda p: p
    summed: Callable[[torch.Tensor, int], torch.Tensor] = over_group

    def gradient(self, name: str) -> torch.Tensor:
        """Return dq (1, heads, rows, dim), dk or dv (1, kv_heads, keys, dim) of the region."""
        if name == "dv":
            return self._over_rows(self.weigh(self.region.dropped(self.p())), self.region.dout)
        ds = self.weigh(self._ds(self.row_sum))
        return over_keys(ds, self.region.k) if name == "dq" else self._over_rows(ds, self.region.q)

    def variance(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the variance of what is rounded on the way to a gradient of this value."""
        region, unit_squared = self.region, UNIT[self.region.workload.out_dtype] ** 2
        if name == "dv":
            p = self.weigh(region.dropped(self.p()))
            return (self._over_rows(p.square(), region.dout.square()) + value.square()) * unit_squared
        ds = self.weigh(self._ds(self.row_sum))
        weight = self.weigh(self._ds(self.row_sum + 1)) - ds  # how much of D's own error enters
        if name == "dq":
            drift = over_keys(weight, region.k).square() * self.row_sum_var
            return (over_keys(ds.square(), region.k.square()) + value.square() + drift) * unit_squared
        terms = ds.square() + weight.square() * self.row_sum_var
        return (self._over_rows(terms, region.q.square()) + value.square()) * unit_squared

    def p(self) -> torch.Tensor:
        """Return P = exp(s - lse), 0 where the mask hides, (1, heads, rows, keys)."""
        return weights_given(self.region.scores, self.lse)

    def _ds(self, row_sum: torch.Tensor) -> torch.Tensor:
        """Return dS with this D, before it is weighed."""
        slope = self.region.workload.softmax_scale * (1.0 if self.slope is None else self.slope)
        return self.dscores(self.p(), self.region.dp, row_sum) * slope

    def _over_rows(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.summed(over_rows(a, b, b.shape[1]), self.region.workload.group)


def honest_steps(reference: Reference, region: Region) -> AttentionSteps:
    """Return the right steps in a region, with lse and D of the reference."""
    scores = RegionScores(reference.inputs, reference.inputs.workload, region)
    lse = scores.of_rows(reference.tensors["lse"].value).unsqueeze(-1)
    out, dout = scores.of_rows(reference.tensors["out"].value), scores.dout
    p = weights_given(scores.scores, lse)
    of_out = (dout * out).square().sum(-1, keepdim=True)
    of_p = (p * scores.dp).square().sum(-1, keepdim=True)
    row_sum = (dout * out).sum(-1, keepdim=True)
    return AttentionSteps(scores, lse, row_sum, of_out + of_p, scores.slope)
