"""The arithmetic of exact attention in float64, and the budget of rounding error that goes with every element.

The budget tau (a standard deviation) of every element sums the squares of independent rounding errors:

    out: eu(o)^2 + sum_j e_ij^2 v_j^2 + sum_j n_ij (v_j - o)^2
    dv:  eu(dv)^2 + sum_i (e_ij^2 + n_ij) do_i^2
    dq:  eu(dq)^2 + scale^2 sum_j w_ij k_j^2 + scale^2 eps_i^2 (sum_j P_ij k_j)^2
    dk:  eu(dk)^2 + scale^2 sum_i w_ij q_i^2 + scale^2 sum_i P_ij^2 eps_i^2 q_i^2

with eu(x) = max(u |x|, floor), e_ij the rounding of P_ij, n_ij = P_ij^2 times the variance of the score, w_ij the variance
of dS_ij = P_ij (dP_ij - D_i), and eps_i the error of D_i = sum(do_i o_i), which kernels form from the rounded o.
The source of these formulas is an error analysis of flash-attention's algorithm, calibrated in docs/calibration.md.

What quantised kernels add (fields of `Precision`): e_ij follows P's own dtype or step, and is never more than P_ij; where P
has few steps, sum_j e_ij^2 v_j^2 gives way to what a plain rounding of the row loses, if that is more (`_coarse_variance`);
float16 sums err by u times each partial sum; what is unknown of q and k moves the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.correctness.gradients import Gradients
from pytest_attn.correctness.precision import FLOOR, LARGEST, LSE_UNIT, SHARED, TENSOR_CORE_UNIT, TINY, UNIT, Precision
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import MaskMod, describe, interval
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: Score elements that one chunk may hold (times 8 bytes, times about five temporaries).
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
TILE = 128
#: Largest value that a row of P has when kernels round it to fp8: 1, or what the format can hold.
_FP8_PEAKS = (1.0, LARGEST["float8_e4m3fn"])
#: An error of q or k may be a rare large one: scores are followed this many standard deviations up.
_REACH = 8.0
#: Tensor cores add 16 keys at a time, so a float16 sum over 64 keys rounds four times. The squares of its partial sums add up
#: to 30/16 of that of the whole sum where the terms agree, and to 2.5 times the terms' own squares where they are random:
#: both lie below this factor times (whole sum^2 + sum of terms^2).
_HALF_ROUNDINGS = 2.0


@dataclass
class Expected:
    """What one tensor should be: `value` (float64) and its budget `tau` (float32), both (batch, heads, rows, dim).

    `rows` lists the sampled positions along the third dimension, None for all. lse has no dim and no budget of its own.
    """

    value: torch.Tensor
    tau: torch.Tensor
    rows: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.value.nbytes + self.tau.nbytes)


@dataclass
class Segment:
    """Sequences of equal length: q, dout (n, heads, q_len, d) and k, v (n, kv_heads, kv_len, d) in the workload's dtype."""

    workload: Workload
    inputs: Inputs
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    mask_mod: MaskMod | None
    first_batch: int
    rows: torch.Tensor | None
    keys: torch.Tensor | None
    q_start: int = 0
    kv_start: int = 0

    @property
    def lengths(self) -> tuple[int, int]:
        """q_len and kv_len."""
        return self.q.shape[2], self.k.shape[2]


def chunk_elements(device: torch.device) -> int:
    """Return how many scores one chunk may hold on this device."""
    return _CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]


class Block:
    """Some key heads of some batch entries, in float64: computes their rows chunk by chunk into the reference."""

    def __init__(
        self,
        tensors: dict[str, Expected],
        segment: Segment,
        place: tuple[slice, slice],
        precision: Precision,
        backward: bool,
    ) -> None:
        import torch

        w = segment.workload
        batches, kv_heads = place
        self.tensors, self.segment, self.precision, self.backward, self.w = tensors, segment, precision, backward, w
        self.place = place
        self.scale = w.softmax_scale
        self.unit, self.floor = precision.unit(w.dtype), FLOOR[w.dtype]
        self.heads = slice(kv_heads.start * w.group, kv_heads.stop * w.group)
        self.q = segment.q[batches, self.heads]
        self.dout = segment.dout[batches, self.heads]
        self.k, self.v = (t[batches, kv_heads].double() for t in (segment.k, segment.v))
        self.v2 = self.v.square()
        device = self.k.device
        self.b_index = torch.arange(batches.start, batches.stop, device=device).view(-1, 1, 1, 1) + segment.first_batch
        self.h_index = torch.arange(self.heads.start, self.heads.stop, device=device).view(1, -1, 1, 1)
        self.keys = segment.keys
        self.per_head = precision.sums_rounded_heads and w.group > 1
        self.sums = (
            {} if not backward else {name: self._zeros(dim) for name, dim in (("dk", w.head_dim), ("dv", w.v_head_dim))}
        )
        self.v_error2 = self._v_error2()
        self.unknown_q, self.unknown_k = (self._unknown2(t) for t in (self.q, self.k))
        self.noisy_scores = (
            precision.rounds_scores or precision.rounds_scaled_query or precision.qk_error > 0 or self._scores_are_noisy()
        )

    def _unknown2(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the variance of what is unknown of q or k, one number per head; None where all is known."""
        if not self.precision.qk_error or not x.numel():
            return None
        return x.double().abs().amax((-2, -1), keepdim=True).mul_(self.precision.qk_error).square_()

    def _v_error2(self) -> torch.Tensor | None:
        """Return the variance of rounding V to a small dtype; None where it is taken as it is."""
        dtype = self.precision.v_dtype
        if dtype is None or not self.v.numel():
            return None
        top = self.v.abs().amax(-2, keepdim=True)
        return (self.v.abs() * UNIT[dtype]).maximum(top * (FLOOR[dtype] / LARGEST[dtype])).square_()

    def _zeros(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums for a gradient of the keys and its variance, per query head if these are rounded, else per key head."""
        heads = self.w.group * self.k.shape[1] if self.per_head else self.k.shape[1]
        keys = self.k.shape[2] if self.keys is None else len(self.keys)
        value = self.k.new_zeros(self.k.shape[0], heads, keys, dim)
        return value, self.k.new_zeros(value.shape)

    def _scores_are_noisy(self) -> bool:
        """Whether float32's own rounding of the scores shows beside the dtype's rounding of P."""
        if self.w.dtype == "float32":
            return True
        if not self.q.numel() or not self.k.numel():
            return False
        largest = self.scale * float(self.q.double().norm(dim=-1).max()) * float(self.k.norm(dim=-1).max())
        return largest * TENSOR_CORE_UNIT * self.w.head_dim / 4 > self.unit / 2

    def unit2(self, terms: int) -> float:
        """Return the squared unit roundoff of a sum of `terms` products: in float32 the sum itself rounds as well.

        A sum of n random terms passes through partial sums whose squares add up to at most n times those of its terms.
        """
        return self.unit**2 * (1 + terms if self.w.dtype == "float32" else 1)

    def rounded(self, x: torch.Tensor, terms: int, floor: float | None = None) -> torch.Tensor:
        """Return eu(x)^2, the variance of rounding a result x to the dtype; `floor` replaces the least error it may have."""
        floor = max(self.floor, TINY) if floor is None else floor
        variance = x.square().mul_(self.unit2(terms))
        return variance.clamp_(min=floor**2) if floor else variance

    def run(self) -> None:
        """Compute every chunk of rows, then round the gradients of the keys."""
        import torch

        q_len, kv_len = self.segment.lengths
        chosen = self.segment.rows
        everything = torch.arange(q_len, device=self.k.device)
        rows = everything if chosen is None or self.backward else chosen
        groups_in_block = self.k.shape[0] * self.k.shape[1] * self.w.group
        step = max(1, chunk_elements(self.k.device) // max(1, groups_in_block * kv_len))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            Chunk(self, part, chosen).run()
        for name, (value, tau2) in self.sums.items():
            self._finish(name, value, tau2)

    def _finish(self, name: str, value: torch.Tensor, tau2: torch.Tensor) -> None:
        """Round the summed gradient of the keys and put it in its place."""
        batches, kv_heads = self.place
        terms = self.w.group * self.segment.lengths[0]
        times = self.precision.roundings(self.segment.lengths[0])
        if times > 1:  # rounding a sum after every block: earlier partial sums are as large as their terms make them
            tau2 = tau2 * (1 + times) + self.rounded(value, terms) * (times / 3)
        if self.per_head:
            tau2 = self._summed_over_group(tau2 + self.rounded(value, terms))
            value = self._summed_over_group(value)
        expected, start = self.tensors[name], self.segment.kv_start
        part = slice(start, start + value.shape[2])
        expected.value[batches, kv_heads, part] = value
        expected.tau[batches, kv_heads, part] = (tau2 + self.rounded(value, terms)).sqrt_().float()

    def _summed_over_group(self, x: torch.Tensor) -> torch.Tensor:
        n, heads, keys, dim = x.shape
        return x.view(n, heads // self.w.group, self.w.group, keys, dim).sum(2)

    def span(self, rows: torch.Tensor) -> slice:
        """The keys that any of these rows can see, where the mask tells; all keys otherwise."""
        q_len, kv_len = self.segment.lengths
        if self.segment.inputs.kv_lens is not None or self.w.plain_mask is None or kv_len < 2 * TILE:
            return slice(0, kv_len)
        spans = [interval(self.w.plain_mask, int(row), q_len, kv_len) for row in (rows[0], rows[-1])]
        if spans[0] is None or spans[1] is None:
            return slice(0, kv_len)
        return slice(min(spans[0][0], spans[1][0]), max(spans[0][1], spans[1][1], 1))


class Chunk:
    """Some query rows of a block: their scores, probabilities, results and budgets."""

    def __init__(self, block: Block, rows: torch.Tensor, chosen: torch.Tensor | None) -> None:
        import torch

        self.block, self.rows = block, rows
        self.span = block.span(rows) if block.keys is None else slice(0, block.k.shape[2])
        self.k, self.v, self.v2 = (t[:, :, self.span] for t in (block.k, block.v, block.v2))
        self.q = block.q[:, :, rows].double()
        self.q_index = rows.view(1, 1, -1, 1)
        self.kv_index = torch.arange(self.span.start, self.span.stop, device=rows.device).view(1, 1, 1, -1)
        self.kept = torch.ones_like(rows, dtype=torch.bool) if chosen is None else torch.isin(rows, chosen)
        positions = rows if chosen is None else torch.searchsorted(chosen, rows[self.kept])
        self.at = positions + (block.segment.q_start if chosen is None else 0)
        self.slope_variance: torch.Tensor | None = None  # of `slope`, where a rounded score moves softcap's
        self.slope: torch.Tensor | None = None  # d(final score) / d(scaled q . k), where a modification changes it

    # -- products over grouped heads: (n, heads, rows, x) with (n, kv_heads, keys, y) ------------------------------------

    def per_key(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """(n, heads, rows, d) x (n, kv_heads, keys, d) -> (n, heads, rows, keys)."""
        import torch

        n, heads, rows, dim = a.shape
        folded = a.reshape(n, b.shape[1], -1, dim)
        return torch.matmul(folded, b.transpose(-1, -2)).view(n, heads, rows, b.shape[2])

    def over_keys(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """(n, heads, rows, keys) x (n, kv_heads, keys, d) -> (n, heads, rows, d)."""
        import torch

        n, heads, rows, keys = a.shape
        folded = a.reshape(n, b.shape[1], heads // b.shape[1] * rows, keys)  # keys may be none
        return torch.matmul(folded, b).view(n, heads, rows, b.shape[3])

    def over_rows(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """(n, heads, rows, keys)^T x (n, heads, rows, d) -> (n, kv_heads, keys, d), or per query head if these are rounded."""
        import torch

        if self.block.per_head:
            return torch.matmul(a.transpose(-1, -2), b)
        n, heads, rows, keys = a.shape
        kv_heads = self.k.shape[1]
        folded = a.reshape(n, kv_heads, heads // kv_heads * rows, keys)
        return torch.matmul(folded.transpose(-1, -2), b.reshape(n, kv_heads, -1, b.shape[3]))

    # -- forward -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Compute and store the chunk's results."""
        raw = self.per_key(self.q * self.block.scale, self.k)
        noise = self._score_variance(raw) if self.block.noisy_scores else None
        scores = self._modify(raw)
        if noise is not None:  # float32 rounds the final score once more, after softcap, bias and ALiBi
            noise += scores.clamp(min=-1e100).square_().mul_(2 * (SHARED * UNIT["float32"]) ** 2)
        highest = None if noise is None or not self.block.precision.qk_error else scores + _REACH * noise.sqrt()
        p, lse = self._softmax(scores)
        out = self.over_keys(p, self.v)
        self.store("lse", lse[:, :, self.kept], None)
        n2 = None if noise is None else self._noise_of_p(noise, p, lse, highest)
        e2 = self.rounding_of_p(p) if bool(self.kept.all()) else None
        if e2 is not None:
            self.store("out", out, self._out_variance(self.q, out, lse, p, e2, n2))
        elif bool(self.kept.any()):
            q, some_out, some_lse, some_p = (t[:, :, self.kept] for t in (self.q, out, lse, p))
            noise = None if n2 is None else n2[:, :, self.kept]
            e2_of_some = self.rounding_of_p(some_p)
            self.store("out", some_out, self._out_variance(q, some_out, some_lse, some_p, e2_of_some, noise))
        if self.block.backward:
            Gradients(self).run(p, out, n2, e2)

    def _modify(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply softcap, bias, ALiBi, score_mod and the mask, in this order; keeps the derivative for the backward pass."""
        import torch

        w, inputs, segment = self.block.w, self.block.segment.inputs, self.block.segment
        if w.softcap is not None:
            scores = scores.div_(w.softcap).tanh_()
            self.slope = 1 - scores.square()
            scores = scores.mul_(w.softcap)
        if inputs.bias is not None and w.bias is not None:
            bias = inputs.bias.to(scores.device).expand(w.batch, w.heads, w.q_len, w.kv_len)
            batches, _ = self.block.place
            scores = scores + bias[batches, self.block.heads][:, :, self.rows][..., self.span].double()
        if inputs.alibi_slopes is not None and w.alibi:
            slopes = inputs.alibi_slopes.to(scores.device).double()[self.block.h_index]
            scores = scores - slopes * (self.q_index + self._kv_lens() - segment.lengths[0] - self.kv_index).abs()
        if w.score_mod is not None:
            scores = self._apply_score_mod(scores)
        if segment.mask_mod is not None:
            visible = segment.mask_mod(self.block.b_index, self.block.h_index, self.q_index, self.kv_index)
            if not isinstance(visible, torch.Tensor) or visible.dtype != torch.bool:
                raise ValueError(f"{w.id}: mask must return a boolean tensor, it returned {describe(visible)}")
            scores = scores.masked_fill_(~visible, -math.inf)
        return scores

    def _kv_lens(self) -> torch.Tensor | int:
        lens = self.block.segment.inputs.kv_lens
        return self.block.segment.lengths[1] if lens is None else lens.to(self.rows.device)[self.block.b_index]

    def _apply_score_mod(self, scores: torch.Tensor) -> torch.Tensor:
        import torch

        assert self.block.w.score_mod is not None
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            modified = self.block.w.score_mod(leaf, self.block.b_index, self.block.h_index, self.q_index, self.kv_index)
            if not isinstance(modified, torch.Tensor):
                raise ValueError(f"{self.block.w.id}: score_mod must return a tensor, it returned {describe(modified)}")
            modified = (modified.double() + 0 * leaf).expand(scores.shape)  # so that one without the score has slope 0
            (slope,) = torch.autograd.grad(modified.sum(), leaf)
        self.slope = slope if self.slope is None else self.slope * slope
        return modified.detach().clone()

    def _softmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return P (in place of the scores) and the natural log-sum-exp; a row that sees nothing has P = 0, lse = -inf."""
        top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -math.inf)
        sinks = self._sinks()
        if sinks is not None:
            top = top.maximum(sinks)
        top = top.masked_fill_(top == -math.inf, 0.0)
        p = scores.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks - top).exp()
        lse = (total.log() + top).squeeze(-1)
        return p.div_(total.masked_fill(total == 0, 1.0)), lse

    def _sinks(self) -> torch.Tensor | None:
        sinks = self.block.segment.inputs.sinks
        if sinks is None or not self.block.w.sinks:
            return None
        return sinks.to(self.rows.device).double()[self.block.h_index]

    # -- budgets -----------------------------------------------------------------------------------------------------

    def rounded_where_seen(self, x: torch.Tensor, p: torch.Tensor, terms: int, floor: float | None = None) -> torch.Tensor:
        """Like `rounded`, but an element that P never reaches is an exact zero in every kernel."""
        variance = self.block.rounded(x, terms, self.block.floor if floor is None else floor)
        return variance.mul_(p > 0) if self.block.floor else variance

    def _score_variance(self, raw: torch.Tensor) -> torch.Tensor:
        """Variance of the scaled scores: of the dtype's rounding where the profile has it, of float32's sums otherwise."""
        import torch

        b, precision = self.block, self.block.precision
        k2, q2 = self.k.square(), self.q.square()
        if b.w.dtype == "float32":  # sums that round
            variance = self.per_key(q2.mul(b.unit**2 * b.scale**2 * (1 + b.w.head_dim / 2)), k2)
            variance += raw.square().mul_(b.unit**2 * (2 + b.w.head_dim / 6))
            variance += precision.exponential_unit**2  # a relative error of the exponential is an error of the score
        else:  # sums that truncate: the errors of the products add up, they do not cancel
            variance = raw.square().mul_((TENSOR_CORE_UNIT * b.w.head_dim / 4) ** 2)
        if precision.rounds_scores and b.w.dtype != "float32":
            variance += raw.square().mul_(2 * b.unit**2).add_(self.per_key(q2.mul(b.unit**2 * b.scale**2), k2))
        if precision.rounds_scaled_query:
            variance += self.per_key(q2.mul(b.unit**2 * b.scale**2), k2)
        if b.unknown_q is not None and b.unknown_k is not None:
            unknown_k = b.unknown_k.repeat_interleave(b.w.group, 1)
            variance += self.per_key((b.unknown_q * b.scale**2).expand_as(q2), k2)
            variance += (unknown_k * b.scale**2) * q2.sum(-1, keepdim=True)
        if b.w.softcap is not None:  # tanh damps what lies before it
            t2 = torch.tanh(raw / b.w.softcap).square_()
            damping = (1 - t2).square_()
            self.slope_variance = variance * damping * t2.mul_((2 / b.w.softcap) ** 2)
            variance *= damping
        return variance.mul_(SHARED**2)

    def _noise_of_p(
        self, noise: torch.Tensor, p: torch.Tensor, lse: torch.Tensor, highest: torch.Tensor | None
    ) -> torch.Tensor:
        """Return n_ij, in place of the variance of the scores.

        Scores that may be far off, as those of unknown q and k, change P by more than its derivative tells: `highest` is
        what they may be.
        """
        if highest is None:
            return noise.mul_(p).mul_(p)
        largest_p = highest.sub_(lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).clamp_(max=0).exp_()
        return noise.clamp_(max=1).mul_(largest_p.square_())

    def rounding_of_p(self, p: torch.Tensor) -> torch.Tensor:
        """Return e_ij^2."""
        step, dtype = self.block.precision.p_step, self.block.precision.p_dtype
        if step:
            return p.minimum(_row_tops(p).mul_(step / math.sqrt(12))).square_()
        if dtype:
            return p.minimum((p * UNIT[dtype]).maximum(_row_tops(p).mul_(FLOOR[dtype]))).square_()
        return self.rounded_where_seen(p, p, terms=self.block.segment.lengths[1])

    def _out_variance(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        p: torch.Tensor,
        e2: torch.Tensor,
        n2: torch.Tensor | None,
    ) -> torch.Tensor:
        of_lse = lse.where(lse.isfinite(), lse.new_zeros(())).mul(SHARED * LSE_UNIT).unsqueeze(-1)
        variance = self.block.rounded(out, self.block.segment.lengths[1])
        variance += self._coarse_variance(p, out, e2) if self.block.precision.is_coarse else self.over_keys(e2, self.v2)
        variance += (out * of_lse).square_()  # where partial results are merged by their lse, as in split-KV kernels
        if n2 is not None:  # sum_j n_ij (v_j - o)^2, expanded
            mixed = self.over_keys(n2, self.v2) - 2 * out * self.over_keys(n2, self.v)
            variance += (mixed + out.square() * n2.sum(-1, keepdim=True)).clamp_(min=0)
        error_of_q = self._query_variance(q)
        if error_of_q is not None:  # one error of q moves all scores of a row together: Cauchy-Schwarz
            spread_v = (self.over_keys(p, self.v2) - out.square()).clamp_(min=0)
            spread_k = (self.over_keys(p, self.k.square()) - self.over_keys(p, self.k).square()).clamp_(min=0)
            moved = (error_of_q * spread_k).sum(-1, keepdim=True).mul_(self.block.scale**2)
            variance += spread_v * moved
        if self.block.v_error2 is not None:
            variance += self.over_keys(p.square(), self.block.v_error2[:, :, self.span])
        if self.block.precision.half_sum_keys:
            variance += self._half_sum_variance(p, out)
        return variance

    def _query_variance(self, q: torch.Tensor) -> torch.Tensor | None:
        if self.block.precision.rounds_scaled_query:
            return q.square().mul_(self.block.unit**2)
        return self.block.unknown_q

    def _coarse_variance(self, p: torch.Tensor, out: torch.Tensor, e2: torch.Tensor) -> torch.Tensor:
        """Return what a P of few steps loses: that of independent roundings, or of plain rounding where that is more.

        A row with one large P and many below half a step loses all of these together; kernels that divide by the sum of
        rounded P lose something else, which counts as well.
        """
        import torch

        variance = self.over_keys(e2, self.v2)
        top = _row_tops(p).clamp_(min=torch.finfo(p.dtype).tiny)
        step = self.block.precision.p_step
        for peak in (1 / step,) if step else _FP8_PEAKS:
            scaled = p / top * peak
            rounded = scaled.round_() if step else scaled.to(torch.float8_e4m3fn).double()
            lost = rounded * (top / peak) - p
            drift = self.over_keys(lost, self.v)
            variance = variance.maximum(drift.square())
            variance = variance.maximum((drift - out * lost.sum(-1, keepdim=True)).square_())
        return variance

    def _half_sum_variance(self, p: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the rounding of float16 sums, which hold P as a part of its row's largest."""
        import torch

        size, first = self.block.precision.half_sum_keys, self.span.start
        tiles = range(first // size * size, self.span.stop, size)
        variance = torch.zeros_like(out)
        for start in tiles:
            keys = slice(max(start - first, 0), start - first + size)
            variance += self.over_keys(p[..., keys], self.v[:, :, keys]).square_()
        variance += self.over_keys(p.square(), self.v2)
        variance *= UNIT["float16"] ** 2
        variance += _row_tops(p).square_().mul_(FLOOR["float16"] ** 2 * len(tiles))
        return variance.mul_(_HALF_ROUNDINGS)

    # -- results -----------------------------------------------------------------------------------------------------

    def store(self, name: str, value: torch.Tensor, tau2: torch.Tensor | None) -> None:
        """Put the chunk's rows of a result, and of its variance, in their place."""
        expected = self.block.tensors[name]
        batches, _ = self.block.place
        expected.value[batches, self.block.heads].index_copy_(2, self.at, value)
        if tau2 is not None:
            expected.tau[batches, self.block.heads].index_copy_(2, self.at, tau2.sqrt().float())

    def add(self, name: str, keys: torch.Tensor | None, value: torch.Tensor, tau2: torch.Tensor) -> None:
        """Add the chunk's share of a gradient of the keys, and of its variance."""
        part = self.span if keys is None else slice(None)
        for target, source in zip(self.block.sums[name], (value, tau2), strict=True):
            target[:, :, part] += source


def _row_tops(p: torch.Tensor) -> torch.Tensor:
    """Return each row's largest P, (..., rows, 1); 0 where there are no keys."""
    return p.amax(-1, keepdim=True) if p.shape[-1] else p.new_zeros((*p.shape[:-1], 1))
