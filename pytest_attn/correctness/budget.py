"""The budget of the forward pass: the variance of what a kernel may round in scores, P and out.

The budget tau (a standard deviation) of every element sums the squares of independent rounding errors:

    out: eu(o)^2 + sum_j e_ij^2 v_j^2 + sum_j n_ij (v_j - o)^2
    dv:  eu(dv)^2 + sum_i (e_ij^2 + n_ij) do_i^2
    dq:  eu(dq)^2 + scale^2 sum_j w_ij k_j^2 + scale^2 eps_i^2 (sum_j P_ij k_j)^2
    dk:  eu(dk)^2 + scale^2 sum_i w_ij q_i^2 + scale^2 sum_i P_ij^2 eps_i^2 q_i^2

with eu(x) = max(u |x|, floor), e_ij the rounding of P_ij, n_ij = P_ij^2 times the variance of the score, w_ij the variance
of dS_ij = P_ij (dP_ij - D_i), and eps_i the error of D_i = sum(do_i o_i), which kernels form from the rounded o. In half
precision each x, a sum of n products, adds (2^-27 n x)^2 besides: what tensor cores cut off.
The source of these formulas is an error analysis of flash-attention's algorithm, calibrated in docs/results/calibration.md.
eu and e_ij are in `rounding.py`, out and n_ij here, the gradients in `gradients.py`. In the code e_ij^2 is p_rounding_var,
n_ij p_noise_var, D_i row_sum, eps_i^2 row_sum_var.

What quantized kernels add (fields of `Precision`): e_ij follows P's own dtype or step, and is never more than P_ij; where P
has few steps, sum_j e_ij^2 v_j^2 gives way to what a plain rounding of the row loses, if that is more (`_coarse_variance`);
float16 sums err by u times each partial sum; what is unknown of q and k moves the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import FLOOR, LARGEST, LSE_UNIT, SHARED, UNIT
from pytest_attn.correctness.blocks import Block, Chunk
from pytest_attn.correctness.exact import sinks_of
from pytest_attn.correctness.products import over_keys
from pytest_attn.correctness.rounding import Rounding, row_tops
from pytest_attn.correctness.score_noise import ScoreBudget, ScoreNoise
from pytest_attn.workloads.positions import TILE

if TYPE_CHECKING:
    import torch

#: Largest value that a row of P has when kernels round it to fp8: 1, or what the format can hold.
_FP8_PEAKS = (1.0, LARGEST["float8_e4m3fn"])
#: Tensor cores add 16 keys at a time, so a float16 sum over 64 keys rounds four times. The squares of its partial sums add up
#: to 30/16 of that of the whole sum where the terms agree, and to 2.5 times the terms' own squares where they are random:
#: both lie below this factor times (whole sum^2 + sum of terms^2).
_HALF_ROUNDINGS = 2.0


@dataclass
class RowNoise:
    """A relative error that all P of a row share.

    variance: of it, (n, heads, rows, 1). of_out: what it adds to the variance of out beside its share in out itself,
    (n, heads, rows, v_head_dim). It is None unless the parts of a row have such errors of their own.
    """

    variance: torch.Tensor
    of_out: torch.Tensor | None = None

    def at(self, kept: torch.Tensor) -> RowNoise:
        """Return that of the rows for which `kept` (rows,) is true."""
        return RowNoise(self.variance[:, :, kept], None if self.of_out is None else self.of_out[:, :, kept])


@dataclass
class ForwardRows:
    """What the forward pass of some query rows gave.

    q: (n, heads, rows, head_dim), out: (n, heads, rows, v_head_dim), lse: (n, heads, rows), p: (n, heads, rows, keys), and
    p_noise_var: n_ij like p, None where scores count as exact. row_noise: None where all P of a row have errors of their own.
    dropped: what dropout multiplies P by, None without it; p is before dropout.
    """

    q: torch.Tensor
    p: torch.Tensor
    lse: torch.Tensor
    out: torch.Tensor
    p_noise_var: torch.Tensor | None
    row_noise: RowNoise | None
    dropped: torch.Tensor | None = None

    def at(self, kept: torch.Tensor) -> ForwardRows:
        """Return the rows for which `kept` (rows,) is true."""
        q, p, lse, out = (t[:, :, kept] for t in (self.q, self.p, self.lse, self.out))
        noise_var = None if self.p_noise_var is None else self.p_noise_var[:, :, kept]
        dropped = None if self.dropped is None else self.dropped[:, :, kept]
        return ForwardRows(q, p, lse, out, noise_var, self.row_noise and self.row_noise.at(kept), dropped)


class ForwardBudget:
    """The forward pass of one block: what is unknown of its inputs, and the variance of each chunk's scores, P and out."""

    def __init__(self, block: Block, rounding: Rounding) -> None:
        self.workload, self.rounding, self.precision = block.workload, rounding, rounding.precision
        self.scale, self.kv_len = block.workload.softmax_scale, block.k.shape[2]
        self.scores = ScoreBudget(block, rounding)
        self.v_rounding_var = rounding.of_v(block.v)

    # -- P -----------------------------------------------------------------------------------------------------------

    def noise_of_p(self, noise: ScoreNoise, p: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Return n_ij (n, heads, rows, keys), in place of the variance of the scores.

        Scores that may be far off, as those of unknown q and k, change P by more than its derivative tells: `highest` is
        what they may be.
        """
        if noise.highest is None:
            return noise.variance.mul_(p).mul_(p)
        largest_p = noise.highest.sub_(lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).clamp_(max=0).exp_()
        return noise.variance.clamp_(max=1).mul_(largest_p.square_())

    def of_lse(self, noise: ScoreNoise | None, p: torch.Tensor, lse: torch.Tensor) -> torch.Tensor | None:
        """Return the variance of lse (n, heads, rows) where the profile makes the scores noisy; None elsewhere."""
        import torch

        unit = self.rounding.operand_unit
        if noise is None or not (self.precision.has_noisy_scores or unit):
            return None
        if not unit:
            moved = p if noise.highest is not None else p.square()  # far off, one score moves lse with it
            return (moved * noise.variance).sum(-1)
        # all scores are cut alike, and moved far: lse moves by their mean, which is at most lse and the entropy of P
        mean = lse.masked_fill(lse == -math.inf, 0).abs_().add_(torch.special.entr(p).sum(-1))
        return (p * noise.variance).sum(-1).add_(mean.mul_(2 * unit).square_())

    def of_rows(self, p: torch.Tensor, lse: torch.Tensor, chunk: Chunk) -> RowNoise | None:
        """Return what moves all P of a row together: rounded sinks, rounded factors of the online softmax."""
        unit, sinks = self.rounding.unit, sinks_of(chunk)
        noise = None
        if self.precision.rounds_rescaling:
            factors = 1 + math.log2(max(1.0, self.kv_len / TILE))  # the maximum grows ever more rarely
            variance = lse.new_full((*lse.shape, 1), factors * (SHARED * unit) ** 2)
            noise = RowNoise(variance, over_keys(p, chunk.v_squared).mul_(factors * (SHARED * unit) ** 2))
        if self.precision.rounds_sinks and sinks is not None:
            share = (sinks - lse.unsqueeze(-1)).exp_()  # of the denominator
            of_sinks = share.mul_(sinks).square_().mul_((SHARED * unit) ** 2)
            noise = RowNoise(of_sinks) if noise is None else RowNoise(noise.variance + of_sinks, noise.of_out)
        return noise

    # -- out ---------------------------------------------------------------------------------------------------------

    def of_out(self, rows: ForwardRows, p_rounding_var: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return the variance of out, (n, heads, rows, v_head_dim), for some rows of a chunk."""
        p, out, lse, noise_var = rows.p, rows.out, rows.lse, rows.p_noise_var
        if rows.dropped is not None:
            p, p_rounding_var = p * rows.dropped, p_rounding_var * rows.dropped.square()
        of_lse = lse.where(lse.isfinite(), lse.new_zeros(())).mul(SHARED * LSE_UNIT).unsqueeze(-1)
        variance = self.rounding.of_sum(out, self.kv_len, added=p.count_nonzero(-1).unsqueeze(-1))
        if self.precision.is_coarse:
            variance += _coarse_variance(p, out, p_rounding_var, chunk, self.precision.p_step)
        else:
            variance += over_keys(p_rounding_var, chunk.v_squared)
        variance += (out * of_lse).square_()  # where partial results are merged by their lse, as in split-KV kernels
        if noise_var is not None and rows.dropped is not None:  # sum_j n_ij (z_j v_j - o)^2, at most twice its squares' sum
            of_kept = over_keys(noise_var * rows.dropped.square(), chunk.v_squared)
            variance += (of_kept + out.square() * noise_var.sum(-1, keepdim=True)).mul_(2)
        elif noise_var is not None:  # sum_j n_ij (v_j - o)^2, expanded
            mixed = over_keys(noise_var, chunk.v_squared) - 2 * out * over_keys(noise_var, chunk.v)
            variance += (mixed + out.square() * noise_var.sum(-1, keepdim=True)).clamp_(min=0)
        q_var = self._query_variance(rows.q)
        if q_var is not None:
            variance += self._of_moved_rows(p, out, q_var, chunk)
        if rows.row_noise is not None:
            variance += out.square().mul_(rows.row_noise.variance)
            variance = variance if rows.row_noise.of_out is None else variance.add_(rows.row_noise.of_out)
        if self.v_rounding_var is not None:
            variance += over_keys(p.square(), self.v_rounding_var[:, :, chunk.keys])
        if self.precision.half_sum_keys:
            variance += _half_sum_variance(p, out, chunk, self.precision.half_sum_keys)
        return variance

    def _query_variance(self, q: torch.Tensor) -> torch.Tensor | None:
        """Return the variance of q's own error, (n, heads, rows or 1, head_dim or 1); None where q is exact."""
        if self.precision.rounds_scaled_query:
            return q.square().mul_(self.rounding.unit**2)
        return self.scores.unknown_q_var

    def _of_moved_rows(self, p: torch.Tensor, out: torch.Tensor, q_var: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return what errors of q do to out: one error moves all scores of a row together (Cauchy-Schwarz)."""
        spread_v = (over_keys(p, chunk.v_squared) - out.square()).clamp_(min=0)
        spread_k = (over_keys(p, chunk.k.square()) - over_keys(p, chunk.k).square()).clamp_(min=0)
        moved = (q_var * spread_k).sum(-1, keepdim=True).mul_(self.scale**2)
        return spread_v * moved


def _coarse_variance(
    p: torch.Tensor, out: torch.Tensor, p_rounding_var: torch.Tensor, chunk: Chunk, step: float
) -> torch.Tensor:
    """Return what a P of few steps loses: that of independent roundings, or of plain rounding where that is more.

    A row with one large P and many below half a step loses all of these together; kernels that divide by the sum of
    rounded P lose something else, which counts as well. Without `step` P is rounded to fp8.
    p and p_rounding_var: (n, heads, rows, keys); out, and what is returned: (n, heads, rows, v_head_dim).
    """
    import torch

    variance = over_keys(p_rounding_var, chunk.v_squared)
    top = row_tops(p).clamp_(min=torch.finfo(p.dtype).tiny)
    for peak in (1 / step,) if step else _FP8_PEAKS:
        scaled = p / top * peak
        rounded = scaled.round_() if step else scaled.to(torch.float8_e4m3fn).double()
        lost = rounded * (top / peak) - p
        drift = over_keys(lost, chunk.v)
        variance = variance.maximum(drift.square())
        variance = variance.maximum((drift - out * lost.sum(-1, keepdim=True)).square_())
    return variance


def _half_sum_variance(p: torch.Tensor, out: torch.Tensor, chunk: Chunk, size: int) -> torch.Tensor:
    """Return the rounding of float16 sums over `size` keys, which hold P as a part of its row's largest."""
    import torch

    first = chunk.keys.start
    tiles = range(first // size * size, chunk.keys.stop, size)
    variance = torch.zeros_like(out)
    for start in tiles:
        keys = slice(max(start - first, 0), start - first + size)
        variance += over_keys(p[..., keys], chunk.v[:, :, keys]).square_()
    variance += over_keys(p.square(), chunk.v_squared)
    variance *= UNIT["float16"] ** 2
    variance += row_tops(p).square_().mul_(FLOOR["float16"] ** 2 * len(tiles))
    return variance.mul_(_HALF_ROUNDINGS)
