"""The budget of the forward pass: the variance of what a kernel may round in scores, P and out.

The budget tau (a standard deviation) of every element sums the squares of independent rounding errors:

    out: eu(o)^2 + sum_j e_ij^2 v_j^2 + sum_j n_ij (v_j - o)^2
    dv:  eu(dv)^2 + sum_i (e_ij^2 + n_ij) do_i^2
    dq:  eu(dq)^2 + scale^2 sum_j w_ij k_j^2 + scale^2 eps_i^2 (sum_j P_ij k_j)^2
    dk:  eu(dk)^2 + scale^2 sum_i w_ij q_i^2 + scale^2 sum_i P_ij^2 eps_i^2 q_i^2

with eu(x) = max(u |x|, floor), e_ij the rounding of P_ij, n_ij = P_ij^2 times the variance of the score, w_ij the variance
of dS_ij = P_ij (dP_ij - D_i), and eps_i the error of D_i = sum(do_i o_i), which kernels form from the rounded o.
The source of these formulas is an error analysis of flash-attention's algorithm, calibrated in docs/calibration.md.
eu and e_ij are in `rounding.py`, out and n_ij here, the gradients in `gradients.py`. In the code e_ij^2 is p_rounding_var,
n_ij p_noise_var, D_i row_sum, eps_i^2 row_sum_var.

What quantised kernels add (fields of `Precision`): e_ij follows P's own dtype or step, and is never more than P_ij; where P
has few steps, sum_j e_ij^2 v_j^2 gives way to what a plain rounding of the row loses, if that is more (`_coarse_variance`);
float16 sums err by u times each partial sum; what is unknown of q and k moves the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import FLOOR, LARGEST, LSE_UNIT, SHARED, TENSOR_CORE_UNIT, UNIT
from pytest_attn.correctness.blocks import Block, Chunk
from pytest_attn.correctness.products import over_keys, per_key
from pytest_attn.correctness.rounding import Rounding, row_tops

if TYPE_CHECKING:
    import torch

#: Largest value that a row of P has when kernels round it to fp8: 1, or what the format can hold.
_FP8_PEAKS = (1.0, LARGEST["float8_e4m3fn"])
#: An error of q or k may be a rare large one: scores are followed this many standard deviations up.
_REACH = 8.0
#: Tensor cores add 16 keys at a time, so a float16 sum over 64 keys rounds four times. The squares of its partial sums add up
#: to 30/16 of that of the whole sum where the terms agree, and to 2.5 times the terms' own squares where they are random:
#: both lie below this factor times (whole sum^2 + sum of terms^2).
_HALF_ROUNDINGS = 2.0


@dataclass
class ScoreNoise:
    """How noisy the scores of a chunk are; every tensor is (n, heads, rows, keys).

    variance: of the scores. slope_var: of softcap's slope, which a rounded score moves; None without softcap.
    highest: what the scores may be, where they may be far off; None elsewhere.
    """

    variance: torch.Tensor
    slope_var: torch.Tensor | None = None
    highest: torch.Tensor | None = None


@dataclass
class ForwardRows:
    """What the forward pass of some query rows gave.

    q: (n, heads, rows, head_dim), out: (n, heads, rows, v_head_dim), lse: (n, heads, rows), p: (n, heads, rows, keys), and
    p_noise_var: n_ij like p, None where scores count as exact.
    """

    q: torch.Tensor
    p: torch.Tensor
    lse: torch.Tensor
    out: torch.Tensor
    p_noise_var: torch.Tensor | None

    def at(self, kept: torch.Tensor) -> ForwardRows:
        """Return the rows for which `kept` (rows,) is true."""
        q, p, lse, out = (t[:, :, kept] for t in (self.q, self.p, self.lse, self.out))
        return ForwardRows(q, p, lse, out, None if self.p_noise_var is None else self.p_noise_var[:, :, kept])


class ForwardBudget:
    """The forward pass of one block: what is unknown of its inputs, and the variance of each chunk's scores, P and out."""

    def __init__(self, block: Block, rounding: Rounding) -> None:
        self.workload, self.rounding, self.precision = block.workload, rounding, rounding.precision
        self.scale, self.kv_len = block.workload.softmax_scale, block.k.shape[2]
        self.unknown_q_var, self.unknown_k_var = rounding.of_unknown(block.q), rounding.of_unknown(block.k)
        self.v_rounding_var = rounding.of_v(block.v)
        self.scores_are_noisy = self._declares_noisy_scores() or rounding.is_float32 or self._float32_shows(block)

    def _declares_noisy_scores(self) -> bool:
        """Whether the precision profile itself makes the scores noisy."""
        return self.precision.rounds_scores or self.precision.rounds_scaled_query or self.precision.qk_error > 0

    def _float32_shows(self, block: Block) -> bool:
        """Whether float32's own rounding of the scores shows beside the dtype's rounding of P."""
        if not block.q.numel() or not block.k.numel():
            return False
        largest = self.scale * float(block.q.double().norm(dim=-1).max()) * float(block.k.norm(dim=-1).max())
        return largest * TENSOR_CORE_UNIT * self.workload.head_dim / 4 > self.rounding.unit / 2

    # -- scores ------------------------------------------------------------------------------------------------------

    def of_scaled_scores(self, scaled: torch.Tensor, chunk: Chunk) -> ScoreNoise | None:
        """Return the noise of the scaled scores (n, heads, rows, keys), as softcap leaves it; None where none shows."""
        import torch

        if not self.scores_are_noisy:
            return None
        variance, slope_var = self._scaled_score_variance(scaled, chunk), None
        if self.workload.softcap is not None:  # tanh damps what lies before it
            tanh_squared = torch.tanh(self._nearest_to_0(scaled, variance) / self.workload.softcap).square_()
            damping = (1 - tanh_squared).square_()
            tanh_squared = tanh_squared.fill_(1) if self.rounding.operand_unit else tanh_squared  # its most, wherever that is
            slope_var = variance * damping * tanh_squared.mul_((2 / self.workload.softcap) ** 2)
            variance *= damping
        return ScoreNoise(variance.mul_(SHARED**2), slope_var)

    def _nearest_to_0(self, scaled: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """Return how near to 0, where softcap damps least, products in tf32 may move the scores; others as they are."""
        if not self.rounding.operand_unit:
            return scaled
        return scaled.abs().sub_(variance.sqrt().mul_(SHARED * _REACH)).clamp_(min=0)

    def _scaled_score_variance(self, scaled: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Variance of the scaled scores: of the dtype's rounding where the profile has it, of float32's sums otherwise."""
        unit, scale, head_dim = self.rounding.unit, self.scale, self.workload.head_dim
        k_squared, q_squared = chunk.k.square(), chunk.q.square()
        if self.rounding.is_float32:  # sums that round
            variance = per_key(q_squared.mul(unit**2 * scale**2 * (1 + head_dim / 2)), k_squared)
            variance += scaled.square().mul_(unit**2 * (2 + head_dim / 6))
            variance += self.precision.exponential_unit**2  # a relative error of the exponential is an error of the score
        else:  # sums that truncate: the errors of the products add up, they do not cancel
            variance = scaled.square().mul_((TENSOR_CORE_UNIT * head_dim / 4) ** 2)
        if self.rounding.rounds_scores_to_dtype:
            variance += scaled.square().mul_(2 * unit**2).add_(per_key(q_squared.mul(unit**2 * scale**2), k_squared))
        if self.precision.rounds_scaled_query:
            variance += per_key(q_squared.mul(unit**2 * scale**2), k_squared)
        if (cut := self.rounding.of_cut_products(scaled)) is not None:
            variance += per_key(q_squared.mul(2 * self.rounding.operand_unit**2 * scale**2), k_squared).add_(cut)
        if self.unknown_q_var is not None and self.unknown_k_var is not None:
            unknown_k_var = self.unknown_k_var.repeat_interleave(self.workload.group, 1)
            variance += per_key((self.unknown_q_var * scale**2).expand_as(q_squared), k_squared)
            variance += (unknown_k_var * scale**2) * q_squared.sum(-1, keepdim=True)
        return variance

    def add_final_rounding(self, noise: ScoreNoise, scores: torch.Tensor) -> None:
        """Add what float32 rounds of the final scores, after softcap, bias and ALiBi, and keep how high they may be."""
        noise.variance += scores.clamp(min=-1e100).square_().mul_(2 * (SHARED * UNIT["float32"]) ** 2)
        if self.precision.qk_error or self.rounding.operand_unit:
            noise.highest = scores + _REACH * noise.variance.sqrt()

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
        if noise is None or not (self.precision.rounds_scores or self.precision.rounds_scaled_query or unit):
            return None
        if not unit:
            return p.square().mul_(noise.variance).sum(-1)
        # all scores are cut alike, and moved far: lse moves by their mean, which is at most lse and the entropy of P
        mean = lse.masked_fill(lse == -math.inf, 0).abs_().add_(torch.special.entr(p).sum(-1))
        return (p * noise.variance).sum(-1).add_(mean.mul_(2 * unit).square_())

    # -- out ---------------------------------------------------------------------------------------------------------

    def of_out(self, rows: ForwardRows, p_rounding_var: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return the variance of out, (n, heads, rows, v_head_dim), for some rows of a chunk."""
        p, out, lse = rows.p, rows.out, rows.lse
        of_lse = lse.where(lse.isfinite(), lse.new_zeros(())).mul(SHARED * LSE_UNIT).unsqueeze(-1)
        variance = self.rounding.of_sum(out, self.kv_len)
        if self.precision.is_coarse:
            variance += _coarse_variance(p, out, p_rounding_var, chunk, self.precision.p_step)
        else:
            variance += over_keys(p_rounding_var, chunk.v_squared)
        variance += (out * of_lse).square_()  # where partial results are merged by their lse, as in split-KV kernels
        if rows.p_noise_var is not None:  # sum_j n_ij (v_j - o)^2, expanded
            mixed = over_keys(rows.p_noise_var, chunk.v_squared) - 2 * out * over_keys(rows.p_noise_var, chunk.v)
            variance += (mixed + out.square() * rows.p_noise_var.sum(-1, keepdim=True)).clamp_(min=0)
        q_var = self._query_variance(rows.q)
        if q_var is not None:
            variance += self._of_moved_rows(p, out, q_var, chunk)
        if self.v_rounding_var is not None:
            variance += over_keys(p.square(), self.v_rounding_var[:, :, chunk.keys])
        if self.precision.half_sum_keys:
            variance += _half_sum_variance(p, out, chunk, self.precision.half_sum_keys)
        return variance

    def _query_variance(self, q: torch.Tensor) -> torch.Tensor | None:
        """Return the variance of q's own error, (n, heads, rows or 1, head_dim or 1); None where q is exact."""
        if self.precision.rounds_scaled_query:
            return q.square().mul_(self.rounding.unit**2)
        return self.unknown_q_var

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
