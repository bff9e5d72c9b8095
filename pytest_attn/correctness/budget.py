"""The budget of the forward pass: the variance of what a kernel may round in scores, P and out.

The budget tau (a standard deviation) of every element sums the squares of independent rounding errors:

    out: eu(o)^2 + sum_j e_ij^2 v_j^2 + sum_j n_ij (v_j - o)^2
    dv:  eu(dv)^2 + sum_i (e_ij^2 + n_ij) do_i^2
    dq:  eu(dq)^2 + scale^2 sum_j w_ij k_j^2 + scale^2 eps_i^2 (sum_j P_ij k_j)^2
    dk:  eu(dk)^2 + scale^2 sum_i w_ij q_i^2 + scale^2 sum_i P_ij^2 eps_i^2 q_i^2

with eu(x) = max(u |x|, floor), e_ij the rounding of P_ij, n_ij = P_ij^2 times the variance of the score, w_ij the variance
of dS_ij = P_ij (dP_ij - D_i), and eps_i the error of D_i = sum(do_i o_i), which kernels form from the rounded o. In half
precision each x, a sum of n products, adds (2^-27 n x)^2 besides: what tensor cores cut off. In float32 eps_i^2 has what the
rounding of lse does to a D_i that is the sum of P_ij dP_ij: (2^-24 lse_i)^2 (|D_i| + sum_j |dS_ij|)^2.
The source of these formulas is an error analysis of flash-attention's algorithm, calibrated in docs/results/calibration.md.
What concerns gradients is in `exact_gradients.py`. In the code e_ij^2 is p_rounding_var,
n_ij p_noise_var, D_i row_sum, eps_i^2 row_sum_var.

Where a profile writes scores in the dtype, the variance of the score has (u x)^2 of each x that is written: scale q k, its
sum with a bias, what soft-cap makes of it (through the slope of tanh, and tanh itself), its sum with ALiBi.

What quantized kernels add (fields of `Precision`): e_ij follows P's own dtype or step, and is never more than P_ij; where P
has few steps, sum_j e_ij^2 v_j^2 gives way to what a plain rounding of the row loses, if that is more (`_coarse_variance`);
float16 sums err by u times each partial sum; what is unknown of q and k moves the scores.

Two results may come beside out and lse. For the weights, P is the result:

    weights: e_ij^2 + n_ij + P_ij^2 (sum_k n_ik + r_i + (SHARED LSE_UNIT lse_i)^2)

with r_i the variance of what all P of a row share; the noise of its scores moves the denominator as well. max, like lse, is
held to what float32 sums allow, and to its scores' noise: what a profile declares, and what float32 loses of large ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pytest_attn.backends.precision import FLOOR, LARGEST, LSE_UNIT, SHARED, TENSOR_CORE_UNIT, TINY, UNIT, Precision
from pytest_attn.correctness.arithmetic import Block, Chunk, alibi_of, before_softcap, over_keys, per_key, sinks_of
from pytest_attn.workloads.positions import TILE

# -- roundings ---------------------------------------------------------------------------------------------------------


#: Tensor cores add 16 products at a time to a float32 sum and cut off what does not fit (Fasi et al., Numerical behavior of
#: NVIDIA tensor cores, 2021): up to a unit in the last place, 2^-23, at each step, always toward 0, so the losses add up.
_CUT_FROM_SUM = 2.0**-23 / 16


class Rounding:
    """Roundings of a kernel of this precision profile to a workload's dtype."""

    def __init__(self, precision: Precision, dtype: str) -> None:
        self.precision = precision
        self.is_float32 = dtype == "float32"
        self.rounds_scores_to_dtype = precision.rounds_scores and not self.is_float32
        self.rounds_dp_to_dtype = (precision.rounds_scores or precision.rounds_dp) and not self.is_float32
        self.unit, self.floor = precision.unit(dtype), FLOOR[dtype]
        self.operand_unit = precision.operand_unit if self.is_float32 else 0.0

    def unit_squared(self, terms: int) -> float:
        """Return the squared unit roundoff of a sum of `terms` products: in float32 the sum itself rounds as well.

        A sum of n random terms passes through partial sums whose squares add up to at most n times those of its terms.
        """
        return self.unit**2 * (1 + terms if self.is_float32 else 1)

    def of_result(self, x: torch.Tensor, terms: int, floor: float | None = None) -> torch.Tensor:
        """Return eu(x)^2, in the shape of x; `floor` replaces the least error it may have."""
        floor = max(self.floor, TINY) if floor is None else floor
        variance = x.square().mul_(self.unit_squared(terms))
        return variance.clamp_(min=floor**2) if floor else variance

    def of_sum(self, x: torch.Tensor, terms: int, added: torch.Tensor | None = None) -> torch.Tensor:
        """Like `of_result`, with what the products of the sum x lose together.

        added: how many of the terms are not 0, in a shape that broadcasts with x; all of them by default.
        """
        variance, cut = self.of_result(x, terms), self.of_cut_products(x)
        if not self.is_float32:
            variance += (x * ((terms if added is None else added) * _CUT_FROM_SUM)).square_()
        return variance if cut is None else variance.add_(cut)

    def with_parts(self, variance: torch.Tensor, x: torch.Tensor, terms: int) -> torch.Tensor:
        """Return the variance of a gradient x of `terms` terms with that of rounding its parts, and the sums of these.

        variance: u^2 times the terms' squares, or more. Where terms are random, the squares of n parts add up to theirs, and
        the sums of 2 to n - 1 parts to (n + 1) (n - 2) / 2n times as much; where they agree, together to about n / 3 x^2.
        """
        parts = self.precision.parts
        return variance if parts == 1 else variance * (1 + parts / 2) + self.of_result(x, terms) * (parts / 3)

    def of_operands(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the variance, in the shape of x, of rounding x and its partner in a product, None where these are exact.

        Where x stands for each term of a sum; what all terms lose alike is `of_cut_products`.
        """
        return x.square().mul_(2 * self.operand_unit**2) if self.operand_unit else None

    def of_ordered_terms(self, total: torch.Tensor, terms: int) -> torch.Tensor:
        """Return the variance of a float32 sum whose positive terms come first, as where values change slowly from key to key.

        total: of the terms' magnitudes. The partial sums rise to half of it and fall again, their squares' mean is 1/12 of its
        square.
        """
        return total.square().mul_(self.unit**2 * terms / 12)

    def of_cut_products(self, total: torch.Tensor) -> torch.Tensor | None:
        """Return the square of what a sum of products loses where both operands are cut off: their errors do not cancel."""
        return total.square().mul_((2 * self.operand_unit) ** 2) if self.operand_unit else None

    def where_seen(self, x: torch.Tensor, p: torch.Tensor, terms: int, floor: float | None = None) -> torch.Tensor:
        """Like `of_result`, but an element that P never reaches is an exact zero in every kernel."""
        variance = self.of_result(x, terms, self.floor if floor is None else floor)
        return variance.mul_(p > 0) if self.floor else variance

    def of_p(self, p: torch.Tensor, kv_len: int) -> torch.Tensor:
        """Return e_ij^2 of P (..., rows, keys), of which each row is a part of kv_len probabilities."""
        step, dtype = self.precision.p_step, self.precision.p_dtype
        if step:
            return p.minimum(row_tops(p).mul_(step / math.sqrt(12))).square_()
        if dtype:
            return p.minimum((p * UNIT[dtype]).maximum(row_tops(p).mul_(FLOOR[dtype]))).square_()
        rounded, operands = self.where_seen(p, p, kv_len), self.of_operands(p)
        return rounded if operands is None else rounded.add_(operands)

    def of_v(self, v: torch.Tensor) -> torch.Tensor | None:
        """Return the variance of rounding V (..., keys, d) to a small dtype; None where it is taken as it is."""
        dtype = self.precision.v_dtype
        if dtype is None or not v.numel():
            return None
        top = v.abs().amax(-2, keepdim=True)
        return (v.abs() * UNIT[dtype]).maximum(top * (FLOOR[dtype] / LARGEST[dtype])).square_()

    def of_unknown(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the variance (n, heads, 1, 1) of what is unknown of q or k (n, heads, length, d); None where all is known."""
        if not self.precision.qk_error or not x.numel():
            return None
        return x.double().abs().amax((-2, -1), keepdim=True).mul_(self.precision.qk_error).square_()


def lse_of_keys(share: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return lse without the sink, which has this share of the row (n, heads, rows, 1); lse: (n, heads, rows)."""
    return (1 - share).clamp_(min=TINY).log_().add_(lse.unsqueeze(-1))


def row_tops(p: torch.Tensor) -> torch.Tensor:
    """Return each row's largest P, (..., rows, 1); 0 where there are no keys."""
    return p.amax(-1, keepdim=True) if p.shape[-1] else p.new_zeros((*p.shape[:-1], 1))


# -- noise of scores ---------------------------------------------------------------------------------------------------


#: An error of q or k may be a rare large one: scores are followed this many standard deviations up.
_REACH = 8.0
#: standard deviation of a score above which P changes by more than its derivative tells
_FAR = 1 / 8
#: rows whose norms are formed together
_NORMS = 1 << 16


@dataclass
class ScoreNoise:
    """Noise of the scores of a chunk; every tensor is (n, heads, rows, keys).

    variance: of the scores. slope_var: of softcap's slope, which a rounded score moves; None without softcap.
    highest: what the scores may be, where they may be far off; None elsewhere.
    """

    variance: torch.Tensor
    slope_var: torch.Tensor | None = None
    highest: torch.Tensor | None = None


def largest_norm(vectors: torch.Tensor) -> torch.Tensor:
    """Return the largest norm of vectors (n, heads, length, dim), without waiting for it."""
    parts = vectors.tensor_split(-(-vectors.shape[2] // _NORMS), 2)
    largest = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64).max() for part in parts]
    return largest[0] if len(largest) == 1 else torch.stack(largest).max()


class ScoreBudget:
    """The variance of the scores of one block, chunk by chunk.

    unknown_q_var, unknown_k_var: of what is unknown of q and k, None where they are known.
    """

    def __init__(self, block: Block, rounding: Rounding) -> None:
        self.workload, self.rounding, self.precision = block.workload, rounding, rounding.precision
        self.scale = block.workload.softmax_scale
        self.unknown_q_var, self.unknown_k_var = rounding.of_unknown(block.q), rounding.of_unknown(block.k)
        are_declared_noisy = self.precision.has_noisy_scores or self.precision.qk_error > 0
        self.are_noisy = are_declared_noisy or rounding.is_float32 or self._float32_shows(block)

    def _float32_shows(self, block: Block) -> bool:
        """Return whether float32's own rounding of the scores shows beside the dtype's rounding of P."""
        if not block.q.numel() or not block.k.numel():
            return False
        largest = self.scale * float(largest_norm(block.q) * largest_norm(block.k))
        return largest * TENSOR_CORE_UNIT * self.workload.head_dim / 4 > self.rounding.unit / 2

    def of_scaled(self, scaled: torch.Tensor, chunk: Chunk) -> ScoreNoise | None:
        """Return the noise of the scaled scores (n, heads, rows, keys), as softcap leaves it; None where none shows."""
        if not self.are_noisy:
            return None
        variance, slope_var = self._scaled_score_variance(scaled, chunk), None
        written = self.rounding.unit**2 if self.rounding.rounds_scores_to_dtype else 0.0  # of each step in the dtype
        nearest = before_softcap(scaled, chunk)
        if written and nearest is not scaled:
            variance += nearest.square().mul_(written)
        if (softcap := self.workload.softcap) is not None:  # tanh damps what lies before it
            if written:  # its argument
                variance += nearest.square().mul_(written)
            is_far = self._is_far(variance)
            if is_far:  # how near to 0, where softcap damps least, noise may move the scores
                nearest = nearest.abs().sub_(variance.sqrt().mul_(SHARED * _REACH)).clamp_(min=0)
            tanh_squared = torch.tanh(nearest / softcap).square_()
            damping = (1 - tanh_squared).square_()
            tanh_squared = tanh_squared.fill_(1) if is_far else tanh_squared  # its most, wherever that is
            slope_var = variance * damping * tanh_squared * (2 / softcap) ** 2
            variance *= damping
            if written:  # tanh, of which the slope is formed, and softcap times tanh
                slope_var += tanh_squared.square().mul_(4 * written)
                variance += tanh_squared.mul_(2 * written * softcap**2)
        return ScoreNoise(variance.mul_(SHARED**2), slope_var)

    def _is_far(self, variance: torch.Tensor) -> bool:
        """Return whether scores may be so far off that their exponentials, and softcap, are far from linear in between."""
        if self.rounding.operand_unit:
            return True
        return self.precision.has_noisy_scores and bool(variance.numel()) and float(variance.max()) * SHARED**2 > _FAR**2

    def _scaled_score_variance(self, scaled: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Variance of the scaled scores: of the dtype's rounding where the profile has it, of float32's sums otherwise."""
        unit, scale, head_dim = self.rounding.unit, self.scale, self.workload.head_dim
        k_squared, q_squared = chunk.k.square(), chunk.q.square()
        float32 = unit if self.rounding.is_float32 else UNIT["float32"]
        variance = per_key(q_squared.mul(float32**2 * scale**2 * (1 + head_dim / 2)), k_squared)
        if self.rounding.is_float32:  # sums that round
            variance += scaled.square().mul_(unit**2 * (2 + head_dim / 6))
            variance += self.precision.exponential_unit**2  # a relative error of the exponential is an error of the score
        else:  # sums that truncate: the errors of the products add up, they do not cancel
            variance += scaled.square().mul_((TENSOR_CORE_UNIT * head_dim / 4) ** 2)
        if self.rounding.rounds_scores_to_dtype:
            variance += scaled.square().mul_(2 * unit**2).add_(per_key(q_squared.mul(unit**2 * scale**2), k_squared))
        if folded := self.precision.rounds_scaled_query + self.precision.rounds_scaled_key:
            variance += per_key(q_squared.mul(folded * unit**2 * scale**2), k_squared)
        if self.precision.rounds_products:  # a tree of sums: its levels' squares add up to their terms', and where these agree
            levels = math.ceil(math.log2(max(2, head_dim)))  # to twice the whole's
            variance += per_key(q_squared.mul(1.5 * unit**2 * scale**2 * (1 + levels)), k_squared)
            variance += scaled.square().mul_(3 * unit**2)
        if (cut := self.rounding.of_cut_products(scaled)) is not None:
            variance += per_key(q_squared.mul(2 * self.rounding.operand_unit**2 * scale**2), k_squared).add_(cut)
        if self.unknown_q_var is not None and self.unknown_k_var is not None:
            unknown_k_var = self.unknown_k_var.repeat_interleave(self.workload.group, 1)
            variance += per_key((self.unknown_q_var * scale**2).expand_as(q_squared), k_squared)
            variance += (unknown_k_var * scale**2) * q_squared.sum(-1, keepdim=True)
        return variance

    def add_final_rounding(self, noise: ScoreNoise, scores: torch.Tensor, chunk: Chunk) -> None:
        """Add what float32 rounds of the final scores, after softcap, bias and ALiBi, and keep how high they may be."""
        finite = scores.clamp(min=-1e100)
        noise.variance += finite.square().mul_(2 * (SHARED * UNIT["float32"]) ** 2)
        if self.rounding.rounds_scores_to_dtype:
            for written in self._sums_after_softcap(finite, chunk):
                noise.variance += written.square().mul_((SHARED * self.rounding.unit) ** 2)
        if self.precision.rounds_shifted_scores and finite.shape[-1]:
            top, sinks = finite.amax(-1, keepdim=True), sinks_of(chunk)
            shifted = finite - (top if sinks is None else top.maximum(sinks))
            noise.variance += shifted.square_().mul_((SHARED * self.rounding.unit) ** 2)
        if self.precision.qk_error or self.rounding.operand_unit:
            noise.highest = scores + _REACH * noise.variance.sqrt()
        elif self.precision.has_noisy_scores:
            deviation = noise.variance.sqrt().masked_fill_(scores == -math.inf, 0)
            is_far = deviation > _FAR
            if bool(is_far.any()):
                noise.highest = scores + deviation.mul_(is_far).mul_(_REACH)

    def _sums_after_softcap(self, final: torch.Tensor, chunk: Chunk) -> Iterator[torch.Tensor]:
        """Yield what code writes that adds bias and ALiBi and calls score_mod in the dtype, broadcastable to the scores."""
        w = self.workload
        if w.alibi:
            distant = alibi_of(chunk)
            yield distant
            yield final - distant
        has_bias = w.bias is not None and not w.bias_before_softcap
        if has_bias or w.alibi or w.score_mod is not None:
            yield final


# -- the budget of out and lse -----------------------------------------------------------------------------------------


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

    def at(self, kept: torch.Tensor | slice) -> RowNoise:
        """Return that of the rows that `kept` (rows,) says."""
        return RowNoise(self.variance[:, :, kept], None if self.of_out is None else self.of_out[:, :, kept])


@dataclass
class ForwardRows:
    """Results of the forward pass of some query rows.

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

    def at(self, kept: torch.Tensor | slice) -> ForwardRows:
        """Return the rows that `kept` (rows,) says."""
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
        """Return the variance of lse (n, heads, rows) where scores are noisy, or P is summed as rounded; None elsewhere."""
        unit = self.rounding.operand_unit
        of_sum = self.rounding.of_p(p, self.kv_len).sum(-1) if self.precision.sums_rounded_p else None
        if noise is None:
            return of_sum
        if not unit:
            moved = p if noise.highest is not None else p.square()  # far off, one score moves lse with it
            of_scores = (moved * noise.variance).sum(-1)
            return of_scores if of_sum is None else of_scores + of_sum
        # all scores are cut alike, and moved far: lse moves by their mean, which is at most lse and the entropy of P
        mean = lse.masked_fill(lse == -math.inf, 0).abs_().add_(torch.special.entr(p).sum(-1))
        return (p * noise.variance).sum(-1).add_(mean.mul_(2 * unit).square_())

    def of_rows(self, p: torch.Tensor, lse: torch.Tensor, chunk: Chunk) -> RowNoise | None:
        """Return what moves all P of a row together: rounded sinks or their share, rounded factors of the online softmax."""
        unit, sinks = self.rounding.unit, sinks_of(chunk)
        noise = None
        if self.precision.rounds_rescaling:
            factors = 1 + math.log2(max(1.0, self.kv_len / TILE))  # the maximum grows ever more rarely
            variance = lse.new_full((*lse.shape, 1), factors * (SHARED * unit) ** 2)
            noise = RowNoise(variance, over_keys(p, chunk.v_squared).mul_(factors * (SHARED * unit) ** 2))
        if (self.precision.rounds_sinks or self.precision.rounds_share_of_keys) and sinks is not None:
            share = (sinks - lse.unsqueeze(-1)).exp_()  # of the denominator
            if self.precision.rounds_sinks:
                of_sinks = share.mul_(sinks).square_()
            else:
                of_keys = lse_of_keys(share, lse)
                of_sinks = share.square().mul_(of_keys.square() + (of_keys - sinks).square_()).add_(1.5)
            of_sinks.mul_((SHARED * unit) ** 2)
            noise = RowNoise(of_sinks) if noise is None else RowNoise(noise.variance + of_sinks, noise.of_out)
        return noise

    # -- out ---------------------------------------------------------------------------------------------------------

    def of_out(self, rows: ForwardRows, p_rounding_var: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return the variance of out, (n, heads, rows, v_head_dim), for some rows of a chunk."""
        p, out, lse, noise_var = rows.p, rows.out, rows.lse, rows.p_noise_var
        if rows.dropped is not None:
            p, p_rounding_var = p * rows.dropped, p_rounding_var * rows.dropped.square()
        of_lse = lse.where(lse.isfinite(), lse.new_zeros(())).mul(SHARED * LSE_UNIT).unsqueeze(-1)
        variance = self.rounding.of_sum(out, self.kv_len, added=p.sign().sum(-1, keepdim=True))  # faster than count_nonzero
        if self.precision.is_coarse:
            variance += _coarse_variance(p, out, p_rounding_var, chunk, self.precision.p_step)
        else:
            of_p = over_keys(p_rounding_var, chunk.v_squared)
            variance += of_p if self.precision.parts == 1 else of_p.mul_(2)  # parts of out, of random terms: as much again
        if self.rounding.is_float32:
            variance += self.rounding.of_ordered_terms(over_keys(p, chunk.v.abs()), chunk.v.shape[2])
        variance += (out * of_lse).square_()  # where partial results are merged by their lse, as in split-KV kernels
        if noise_var is not None and rows.dropped is not None:  # sum_j n_ij (z_j v_j - o)^2, at most twice its squares' sum
            of_kept = over_keys(noise_var * rows.dropped.square(), chunk.v_squared)
            variance += (of_kept + out.square() * noise_var.sum(-1, keepdim=True)).mul_(2)
        elif noise_var is not None:  # sum_j n_ij (v_j - o)^2, expanded
            mixed = over_keys(noise_var, chunk.v_squared) - 2 * out * over_keys(noise_var, chunk.v)
            variance += (mixed + out.square() * noise_var.sum(-1, keepdim=True)).clamp_(min=0)
        is_rounded = self.precision.rounds_scaled_query
        q_var = rows.q.square().mul_(self.rounding.unit**2) if is_rounded else self.scores.unknown_q_var
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


# -- weights and row maxima --------------------------------------------------------------------------------------------


def weights_variance(rows: ForwardRows, rounding: Rounding, kv_len: int) -> torch.Tensor:
    """Return the variance of P (n, heads, rows, keys), as a kernel returns it."""
    p, noise_var, lse = rows.p, rows.p_noise_var, rows.lse
    variance = rounding.of_p(p, kv_len).clamp_(min=TINY**2).mul_(p > 0)
    of_lse = lse.where(lse.isfinite(), lse.new_zeros(())).mul(SHARED * LSE_UNIT).unsqueeze(-1)
    shared = of_lse.square_()
    if noise_var is not None:
        variance = variance + noise_var
        shared = shared + noise_var.sum(-1, keepdim=True)
    if rows.row_noise is not None:
        shared = shared + rows.row_noise.variance
    return variance + p.square().mul_(shared)


def row_maxima(scores: torch.Tensor, noise: ScoreNoise | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest final score of each row, -inf where it sees no key, and its variance, both (n, heads, rows).

    scores: after softcap, bias, ALiBi, score_mod and mask, without sinks, (n, heads, rows, keys).
    """
    if not scores.shape[-1]:
        nothing = scores.new_full(scores.shape[:-1], -math.inf)
        return nothing, scores.new_zeros(scores.shape[:-1])
    top = scores.amax(-1)
    if noise is None:
        return top, scores.new_zeros(top.shape)
    return top, noise.variance.masked_fill(scores == -math.inf, 0).amax(-1)
