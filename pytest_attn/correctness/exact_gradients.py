"""The backward pass of exact attention in float64, with the variance of what a kernel may round on its way.

dS_ij = P_ij (dP_ij - D_i), dP = dO v^T, D_i = sum(do_i o_i); dq = scale dS k, dk = scale dS^T q, dv = P^T dO. The formulas of
the budget are those of `budget.py`.

Sinks, the bias and ALiBi's slopes have gradients, too. With s the final scores, dS their gradient, and
P_sink = exp(sink - lse) the share of a row's sink:

    dsinks_h = - sum_i P_sink,i D_i
    dbias    = dS, summed over the dimensions along which the bias is broadcast (before the softcap: times its slope)
    dalibi_h = - sum_ij dS_ij |i + kv_len - q_len - j|

Their variances are those of dS and D: one D moves all dS of its row together.

Code that subtracts the row's maximum from its scores where autograd sees it gives the maximum a gradient, minus the sum of the
row's dS. That is 0, but for what dS, D and the sum of P lost in float32 or the dtype; all of it goes to the key, or the sink,
that is the largest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from pytest_attn.backends.precision import LSE_UNIT, SHARED, SLOPE_UNIT, TINY, Precision
from pytest_attn.correctness.arithmetic import Block, Chunk, distances_of, over_group, over_keys, over_rows, per_key, sinks_of
from pytest_attn.correctness.budget import ForwardRows, Rounding, largest_norm, lse_of_keys, row_tops
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.parameters import PARAMETERS
from pytest_attn.workloads.workload import Workload

# -- q, k and v --------------------------------------------------------------------------------------------------------


@dataclass
class BackwardRows:
    """Ingredients of the backward pass of some query rows.

    q: (n, heads, rows, head_dim), dout: (n, heads, rows, v_head_dim).
    row_sum: D_i, row_sum_var: its variance, lse_var: what float32 loses of lse, denominator_var: of the relative error that
    noise leaves in the sum of exp, None without noise, all (n, heads, rows, 1).
    p, p_rounding_var: e_ij^2, p_noise_var: n_ij, slope: d(final score) / d(scaled score), slope_var: the variance of that, all
    (n, heads, rows, keys). None stands for: not formed yet (p_rounding_var), no noise, slope 1, an exact slope.
    dropped: what dropout multiplies P by, None without it; p is before dropout. are_lost: (n, heads, rows, 1), in which rows
    a dP, of a hidden key as well, is beyond the dtype in which it is rounded; None where it is in none.
    """

    q: torch.Tensor
    dout: torch.Tensor
    row_sum: torch.Tensor
    row_sum_var: torch.Tensor
    lse_var: torch.Tensor
    denominator_var: torch.Tensor | None
    p: torch.Tensor
    p_rounding_var: torch.Tensor | None
    p_noise_var: torch.Tensor | None
    slope: torch.Tensor | None
    slope_var: torch.Tensor | None
    dropped: torch.Tensor | None = None
    are_lost: torch.Tensor | None = None

    def at_rows(self, kept: torch.Tensor | slice) -> BackwardRows:
        """Return the rows that `kept` (rows,) says."""
        every: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        kept_rows: dict[str, Any] = {name: None if t is None else t[:, :, kept] for name, t in every.items()}
        return BackwardRows(**kept_rows)

    def at_keys(self, keys: torch.Tensor) -> BackwardRows:
        """Return the same rows with these keys (positions) only; e_ij^2 is formed again."""
        names = ("p_noise_var", "slope", "slope_var", "dropped")
        optional: dict[str, Any] = {name: None if (t := getattr(self, name)) is None else t[..., keys] for name in names}
        return replace(self, p=self.p[..., keys], p_rounding_var=None, **optional)


#: the variance of what may be anything, NaN as well: in float32 its root is infinite, and times 0 it is 0 in float64
_UNKNOWN = 2.0**900


@dataclass
class ScoreGradient:
    """The gradient of the scaled scores; all are (n, heads, rows, keys) but for row_sum_var (n, heads, rows, 1).

    ds: dS, and variance: its own, without that of D. weight: how much of D enters dS. p_rounding_var: e_ij^2.
    row_sum_var: D's variance, with what only the scores tell of it. denominator_var, are_lost: as in `BackwardRows`.
    of_maximum: the variance of the maximum's gradient, (n, heads, rows, 1), None where it has none.
    """

    ds: torch.Tensor
    variance: torch.Tensor
    weight: torch.Tensor
    p_rounding_var: torch.Tensor
    row_sum_var: torch.Tensor
    denominator_var: torch.Tensor | None
    of_maximum: torch.Tensor | None
    are_lost: torch.Tensor | None


class Gradients:
    """The gradients of one block's chunks, and their variances."""

    def __init__(self, block: Block, rounding: Rounding) -> None:
        self.workload, self.rounding, self.precision = block.workload, rounding, rounding.precision
        self.scale = block.workload.softmax_scale
        self.q_len, self.kv_len = block.segment.lengths

    def rows_of(
        self,
        forward: ForwardRows,
        p_rounding_var: torch.Tensor | None,
        slope: torch.Tensor | None,
        slope_var: torch.Tensor | None,
        chunk: Chunk,
    ) -> BackwardRows:
        """Return what the backward pass needs of a chunk's rows, after their forward pass."""
        p, noise_var, denominator_var = forward.p, forward.p_noise_var, None
        if noise_var is not None:  # the error of the row's denominator moves all its probabilities together
            denominator_var = noise_var.sum(-1, keepdim=True)
            noise_var = noise_var + p.square().mul_(denominator_var)
        dout = chunk.block.dout[:, :, chunk.rows].double()
        weighted = dout * forward.out
        row_sum = weighted.sum(-1, keepdim=True)
        unit_squared = self.rounding.unit_squared(self.workload.v_head_dim + self.kv_len)  # of D, and of each o in it
        squares = weighted.square_().sum(-1, keepdim=True)
        row_sum_var = squares * (SHARED**2 * unit_squared)
        if self.precision.rounds_share_of_keys and (sinks := sinks_of(chunk)) is not None:
            row_sum_var += self._of_late_sinks(row_sum, squares, forward.lse, sinks)
        lse_var = forward.lse.where(forward.lse.isfinite(), 0.0).unsqueeze(-1).mul_(SHARED * LSE_UNIT).square_()
        if (row_noise := forward.row_noise) is not None:
            denominator_var = row_noise.variance if denominator_var is None else denominator_var + row_noise.variance
            noise_var = _plus(noise_var, p.square().mul_(row_noise.variance))
            row_sum_var += row_sum.square().mul_(row_noise.variance)
            if row_noise.of_out is not None:
                row_sum_var += dout.square().mul_(row_noise.of_out).sum(-1, keepdim=True)
        dropped = forward.dropped
        sums = row_sum, row_sum_var, lse_var, denominator_var
        are_lost = self._lost_rows(dout, chunk.block.v)
        return BackwardRows(forward.q, dout, *sums, p, p_rounding_var, noise_var, slope, slope_var, dropped, are_lost)

    def _lost_rows(self, dout: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        """Return the rows whose gradients are infinity times 0 where dP has the dtype, whatever they are exactly."""
        largest = DTYPES[self.workload.out_dtype].largest
        if not self.rounding.rounds_dp_to_dtype or not v.numel() or bool(largest_norm(dout) * largest_norm(v) <= largest):
            return None
        return (per_key(dout, v).abs() > largest).any(-1, keepdim=True)

    def _of_late_sinks(
        self, row_sum: torch.Tensor, squares: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        """Return the variance of D where sinks come last: it is D / (1 - share) less what flows back through their share.

        Of that the dtype rounds the products do o, whose squares are given, their sum, and each step to the scores.
        """
        share = (sinks - lse.unsqueeze(-1)).exp_()
        steps = lse_of_keys(share, lse).square_().mul_(2).add_(4)
        lost = share / (1 - share).clamp_(min=TINY) * (SHARED * self.rounding.unit)
        return (row_sum.square() * steps + squares).mul_(lost.square_())

    def row_sum_var_of_all_keys(self, rows: BackwardRows, chunk: Chunk) -> torch.Tensor:
        """Return D's variance with that of the out it is formed from, of which a sample of the keys tells too little."""
        of_p = self.rounding.of_p(rows.p, self.kv_len)
        of_p = of_p if rows.dropped is None else of_p.mul_(2).mul_(rows.dropped.square())
        of_out = rows.dout.square() * over_keys(of_p, chunk.v_squared)
        return rows.row_sum_var + of_out.sum(-1, keepdim=True).mul_(SHARED**2)

    # -- scores ------------------------------------------------------------------------------------------------------

    def of_scores(self, rows: BackwardRows, v: torch.Tensor, v_squared: torch.Tensor, all_keys: int) -> ScoreGradient:
        """Form dS of the keys of v (n, kv_heads, keys, v_head_dim), which may be some of `all_keys` that the rows see.

        Where only some keys are looked at, what scores add to the variance of D is scaled up to that of all.
        """
        p, keys = rows.p, v.shape[2]
        share = SHARED**2 * all_keys / max(1, keys)
        p_rounding_var = self.rounding.of_p(p, self.kv_len) if rows.p_rounding_var is None else rows.p_rounding_var
        dp = per_key(rows.dout, v)
        if rows.dropped is not None:
            dp.mul_(rows.dropped)
        row_sum_var = rows.row_sum_var
        if keys == all_keys:  # D comes from the kernel's own o, which carries the rounding of P
            row_sum_var = row_sum_var + _sum_of_products(dp.square(), p_rounding_var).mul_(share)
        variance = self._variance_of_dp(dp, rows, v_squared)
        if variance is not None and self.rounding.rounds_dp_to_dtype:
            row_sum_var = row_sum_var + share * variance.sum(-1, keepdim=True)
        ds = dp.sub_(rows.row_sum)
        if self.precision.ds_from_rounded_p:
            variance = _plus(variance, ds.square().mul_(p_rounding_var))
        if rows.p_noise_var is not None:
            moved = ds.square().mul_(rows.p_noise_var)  # dS^2 times the score's variance, as n_ij = P^2 variance
            row_sum_var = row_sum_var + share / SHARED**2 * moved.sum(-1, keepdim=True)  # n_ij has its share of SHARED
            variance = _plus(variance, moved)
        ds.mul_(p)
        if self.rounding.is_float32:  # D as the sum of P dP, or parts of the keys with an lse of their own
            apart = ds.abs().sum(-1, keepdim=True).mul_(all_keys / max(1, keys)).add_(rows.row_sum.abs())
            row_sum_var = row_sum_var + apart.square_().mul_(rows.lse_var)
        of_maximum = None
        if self.rounding.is_float32 or self.rounding.rounds_dp_to_dtype:
            lost = _sum_of_products(rows.row_sum.square().expand_as(p), p_rounding_var)
            lost += self.rounding.of_result(ds, all_keys).sum(-1, keepdim=True)
            of_maximum = row_sum_var + lost.mul_(share)
            lifted = p if rows.p_noise_var is None else rows.p_noise_var.sqrt().mul_(_LIFT).add_(p)
            variance = _plus(variance, of_maximum * (lifted >= row_tops(p)))  # of each P that noise may make the largest
        ds, weight, variance = self._through_slope(ds, variance, rows)
        variance = self._plus_rounding(variance, ds, rows)
        if rows.are_lost is not None:
            variance.masked_fill_(rows.are_lost, _UNKNOWN)
        return ScoreGradient(
            ds, variance, weight, p_rounding_var, row_sum_var, rows.denominator_var, of_maximum, rows.are_lost
        )

    def _variance_of_dp(self, dp: torch.Tensor, rows: BackwardRows, v_squared: torch.Tensor) -> torch.Tensor | None:
        """Return P_ij^2 times the variance of dP_ij, (n, heads, rows, keys); None where dP counts as exact."""
        unit = self.rounding.unit
        if self.rounding.rounds_dp_to_dtype:
            return dp.square().mul_(unit**2).mul_(rows.p).mul_(rows.p)
        if self.rounding.is_float32:
            of_sums = unit**2 * (1 + self.workload.v_head_dim / 2) + 2 * self.rounding.operand_unit**2
            variance = per_key(rows.dout.square() * of_sums, v_squared)
            if (cut := self.rounding.of_cut_products(dp)) is not None:
                variance += cut
            variance = variance if rows.dropped is None else variance.mul_(rows.dropped).mul_(rows.dropped)
            return variance.mul_(rows.p).mul_(rows.p)
        return None

    def _through_slope(
        self, ds: torch.Tensor, variance: torch.Tensor | None, rows: BackwardRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return dS, its weight of D and its variance as softcap and score_mod leave them, in place; what they add, too."""
        if rows.slope is None:
            return ds, rows.p, variance
        before = ds.clone()
        ds, weight = ds.mul_(rows.slope), rows.p * rows.slope
        if variance is not None:  # where both are off, they are together
            slope_squared = rows.slope.square()
            variance = variance.mul_(slope_squared if rows.slope_var is None else slope_squared.add_(rows.slope_var))
        if self.workload.softcap is not None:  # 1 - tanh^2 in float32 keeps an absolute error where it is small
            variance = _plus(variance, before.square().mul_(SLOPE_UNIT**2))
        if rows.slope_var is not None:
            variance = _plus(variance, before.square().mul_(rows.slope_var))
        return ds, weight, variance

    def _plus_rounding(self, variance: torch.Tensor | None, ds: torch.Tensor, rows: BackwardRows) -> torch.Tensor:
        """Return the variance of dS with that of its own roundings to the dtype."""
        floor = self.rounding.floor
        floors = [floor / self.scale if self.precision.rounds_scaled_ds else floor]
        if self.precision.rounds_scores:  # dS, and then scale * dS
            floors.append(floor / self.scale)
            if rows.slope is not None and self.workload.softcap is not None:  # times softcap, through tanh, over softcap
                floors += [floor] * 3
        for least in floors:
            variance = _plus(variance, self.rounding.where_seen(ds, rows.p, max(self.q_len, self.kv_len), least))
        assert variance is not None
        operands = self.rounding.of_operands(ds)
        return variance if operands is None else variance.add_(operands)

    # -- queries and keys --------------------------------------------------------------------------------------------

    def of_queries(self, scores: ScoreGradient, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dq and its variance, both (n, heads, rows, head_dim)."""
        dq = over_keys(scores.ds, k).mul_(self.scale)
        drift = over_keys(scores.weight, k).square_().mul_(scores.row_sum_var)
        variance = over_keys(scores.variance, k.square()).add_(drift).mul_(self.scale**2)
        if scores.denominator_var is not None:
            variance += dq.square().mul_(scores.denominator_var)
        times = -(-self.kv_len // 512) if self.precision.sums_query_blocks else 1
        if times > 1:  # partial sums: of random terms half of all, and more where these stray; where they agree, a third
            variance = variance * (1 + times / 6) + self.rounding.of_result(dq, self.kv_len) * (times / 3)
        variance = self.rounding.with_parts(variance, dq, self.kv_len) + self.rounding.of_sum(dq, self.kv_len)
        if self.rounding.is_float32:
            total = over_keys(scores.ds.abs(), k.abs()).mul_(self.scale)
            variance += self.rounding.of_ordered_terms(total, k.shape[2])
        return dq, variance if scores.are_lost is None else variance.masked_fill_(scores.are_lost, _UNKNOWN)


class KeyGradients:
    """dk and dv of one block: sums over its chunks, per query head if a kernel rounds these before it sums them up.

    sums: name -> value, variance and the total of the terms' magnitudes, which counts in float32, each (n, heads or kv_heads,
    keys, d).
    """

    def __init__(self, block: Block, rounding: Rounding) -> None:
        w, k = block.workload, block.k
        self.rounding, self.group, self.scale, self.q_len = rounding, w.group, w.softmax_scale, block.segment.lengths[0]
        self.per_query_head = rounding.precision.sums_rounded_heads and w.group > 1
        self.heads = w.group * k.shape[1] if self.per_query_head else k.shape[1]
        keys = k.shape[2] if block.segment.keys is None else len(block.segment.keys)
        shapes = {name: (k.shape[0], self.heads, keys, dim) for name, dim in (("dk", w.head_dim), ("dv", w.v_head_dim))}
        number = 3 if rounding.is_float32 else 2
        self.sums = {name: [k.new_zeros(shape) for _ in range(number)] for name, shape in shapes.items()}

    def add(self, rows: BackwardRows, scores: ScoreGradient, keys: slice) -> None:
        """Add the share of some query rows to the sums of these keys; overwrites `scores`."""
        noise = scores.p_rounding_var if rows.p_noise_var is None else scores.p_rounding_var + rows.p_noise_var
        p = rows.p
        if rows.dropped is not None:
            p, noise = p * rows.dropped, noise * rows.dropped.square()
        self._add("dv", keys, p, rows.dout, self._over_rows(noise, rows.dout.square()))
        drift = scores.weight.square().mul_(scores.row_sum_var)
        q_squared = rows.q.square()
        if rows.are_lost is not None:  # NaN times 0 is lost as well
            q_squared.masked_fill_(rows.are_lost, 1)
        variance = self._over_rows(scores.variance.add_(drift), q_squared).mul_(self.scale**2)
        self._add("dk", keys, scores.ds.mul_(self.scale), rows.q, variance)

    def _over_rows(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return over_rows(a, b, self.heads)

    def _add(self, name: str, keys: slice, a: torch.Tensor, b: torch.Tensor, variance: torch.Tensor) -> None:
        """Add the sum of a * b over rows."""
        value, of_value, *total = self.sums[name]
        value[:, :, keys] += self._over_rows(a, b)
        of_value[:, :, keys] += variance
        for magnitude in total:
            magnitude[:, :, keys] += self._over_rows(a.abs(), b.abs())

    def rounded(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, value and variance, both (n, kv_heads, keys, d), of each sum once it is rounded."""
        terms = self.group * self.q_len
        before = self.rounding.precision.roundings(self.q_len, self.group) - 1  # the last is that of the result
        for name, (value, variance, *total) in self.sums.items():
            for magnitude in total:
                variance = variance + self.rounding.of_ordered_terms(magnitude, terms)
            if before:  # partial sums: of random terms half of all, and more where these stray; where they agree, a third
                variance = variance * (1 + before * 0.75) + self.rounding.of_result(value, terms) * (before / 3)
            variance = self.rounding.with_parts(variance, value, terms)
            if self.per_query_head:
                variance = over_group(variance + self.rounding.of_result(value, terms), self.group)
                value = over_group(value, self.group)
            yield name, value, variance + self.rounding.of_sum(value, terms)


#: standard deviations by which noise may lift a score to its row's largest
_LIFT = 8.0


def _sum_of_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum a * b over the last dimension, without writing the product."""
    total: torch.Tensor = torch.linalg.vecdot(a, b)
    return total.unsqueeze(-1)


def _plus(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else total.add_(term)


# -- sinks, bias, slopes -----------------------------------------------------------------------------------------------


#: values and variances by name
Sums: TypeAlias = "dict[str, tuple[torch.Tensor, torch.Tensor]]"


class BackwardSteps(NamedTuple):
    """Ingredients of the gradients of a chunk's parameters.

    ds: dS of the final scores, ds_of_bias: the same where the bias is added, both (n, heads, rows, keys). row_sum: D_i,
    (n, heads, rows, 1). lse: (n, heads, rows).
    """

    chunk: Chunk
    ds: torch.Tensor
    ds_of_bias: torch.Tensor
    row_sum: torch.Tensor
    lse: torch.Tensor

    @property
    def sink_share(self) -> torch.Tensor:
        """The probability of each row's sink, (n, heads, rows, 1)."""
        sinks = sinks_of(self.chunk)
        assert sinks is not None
        return (sinks - self.lse.unsqueeze(-1)).exp_()


class Variances(NamedTuple):
    """The variances of the same steps. of_scores, of_bias: of ds and ds_of_bias. of_lse: (n, heads, rows), None if exact."""

    of_scores: ScoreGradient
    of_bias: ScoreGradient
    of_lse: torch.Tensor | None


class Reduction(NamedTuple):
    """Share of a chunk in the gradient of a parameter, and its variance.

    Both are (n, heads, rows or 1, keys or 1), and summed up over what the parameter has only once.
    """

    value: Callable[[BackwardSteps], torch.Tensor]
    variance: Callable[[BackwardSteps, Variances], torch.Tensor]


def _variance_of_sinks(steps: BackwardSteps, variances: Variances) -> torch.Tensor:
    share = steps.sink_share
    variance = share.square() * variances.of_scores.row_sum_var
    if (of_maximum := variances.of_scores.of_maximum) is not None:  # the largest may be the sink
        variance += of_maximum * (share >= row_tops(variances.of_scores.weight) / 2)
    if variances.of_lse is not None:
        variance += (share * steps.row_sum).square_().mul_(variances.of_lse.unsqueeze(-1))
    return variance


def _variance_of_slopes(steps: BackwardSteps, variances: Variances) -> torch.Tensor:
    distances, scores = -distances_of(steps.chunk), variances.of_scores
    drift = (scores.weight * distances).sum(-1, keepdim=True).square_().mul_(scores.row_sum_var)
    return (scores.variance * distances.square()).sum(-1, keepdim=True).add_(drift)


def _variance_of_bias(steps: BackwardSteps, variances: Variances) -> torch.Tensor:
    scores = variances.of_bias
    variance, weight = scores.variance, scores.weight
    if PARAMETERS["bias"].shape(steps.chunk.block.workload)[3] == 1:  # of what is summed over keys, one D moves all together
        variance, weight = (t.sum(-1, keepdim=True) for t in (variance, weight))
    return variance + weight.square().mul_(scores.row_sum_var)


#: by the parameter's name
REDUCTIONS = {
    "sinks": Reduction(lambda steps: -steps.sink_share * steps.row_sum, _variance_of_sinks),
    "bias": Reduction(lambda steps: steps.ds_of_bias, _variance_of_bias),
    "alibi": Reduction(lambda steps: (steps.ds * -distances_of(steps.chunk)).sum(-1, keepdim=True), _variance_of_slopes),
}


class ParameterGradients:
    """The gradients of one block's parameters: sums over its chunks, added to those of the other blocks.

    sums: name -> value and variance, each of the shape that is compared.
    """

    def __init__(self, block: Block, gradients: Gradients, sums: Sums) -> None:
        self.block, self.gradients, self.sums = block, gradients, sums
        #: of sums over sequences and rows: what each sequence of the block has added, (n, heads or 1, 1, keys or 1), and where
        self._shares: dict[str, tuple[torch.Tensor, Chunk]] = {}

    def add(self, rows: BackwardRows, lse: torch.Tensor, lse_var: torch.Tensor | None, chunk: Chunk) -> None:
        """Add the share of a chunk's rows. lse, lse_var: (n, heads, rows)."""
        whole = dataclasses.replace(rows, slope=None, slope_var=None)  # of the final scores, after softcap
        scores = self.gradients.of_scores(whole, chunk.v, chunk.v_squared, chunk.v.shape[2])
        is_first = self.block.workload.bias_before_softcap
        of_bias = self.gradients.of_scores(rows, chunk.v, chunk.v_squared, chunk.v.shape[2]) if is_first else scores
        steps, variances = BackwardSteps(chunk, scores.ds, of_bias.ds, rows.row_sum, lse), Variances(scores, of_bias, lse_var)
        for name, (value, variance) in self.sums.items():
            share = REDUCTIONS[name].value(steps)
            add_share(value, share, chunk)
            add_share(variance, REDUCTIONS[name].variance(steps, variances), chunk)
            if adds_coarsely(name, w := self.block.workload):
                self._add_to_sequences(name, summed(share, (w.batch, *value.shape[1:])), chunk)

    def _add_to_sequences(self, name: str, share: torch.Tensor, chunk: Chunk) -> None:
        if name in self._shares and share.shape[2] == 1:
            share = share + self._shares[name][0]
        self._shares[name] = share, chunk
        if share.shape[2] > 1:  # no other chunk has these rows
            self.add_roundings()

    def add_roundings(self) -> None:
        """Add what is lost where the gradients of the block's sequences are rounded one by one, and added one by one.

        Autograd adds them in the parameter's dtype where a kernel takes sequence by sequence: of n of them, n - 2 sums are
        rounded before the last one, which have about half as many of the squares where signs are mixed; see `rounded`.
        """
        w = self.block.workload
        for name, (share, chunk) in self._shares.items():
            lost = _rounding_of(name, self.gradients.precision, w).of_result(share, w.q_len).mul_(1 + (w.batch - 2) / 2)
            add_share(self.sums[name][1], lost, chunk)
        self._shares.clear()


def add_values(sums: Mapping[str, torch.Tensor], steps: BackwardSteps) -> None:
    """Add a chunk's share to gradients of parameters by name, each of the shape that is compared."""
    for name, total in sums.items():
        add_share(total, REDUCTIONS[name].value(steps), steps.chunk)


def add_share(total: torch.Tensor, share: torch.Tensor, chunk: Chunk) -> None:
    """Add (n, heads, rows or 1, keys or 1) to a sum, in place, summed over what the sum has only once."""
    share = summed(share, total.shape)
    batches = chunk.block.batches if total.shape[0] > 1 else slice(0, 1)
    heads = chunk.block.heads if total.shape[1] > 1 else slice(0, 1)
    rows = chunk.rows if total.shape[2] > 1 else slice(0, 1)
    place = total[batches, heads, :, chunk.keys if total.shape[3] > 1 else slice(0, 1)]
    place[:, :, rows] += share


def summed(share: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Sum (n, heads, rows or 1, keys or 1) over what `shape` has only once."""
    for axis in (3, 0, 1, 2):
        share = share.sum(axis, keepdim=True) if shape[axis] == 1 else share
    return share


def zeros_of(name: str, w: Workload, device: torch.device) -> torch.Tensor:
    """Return 0 in the shape of a parameter's gradient, in float64, to be added to."""
    return torch.zeros(PARAMETERS[name].shape(w), dtype=torch.float64, device=device)


def sums_of(parameters: tuple[str, ...], w: Workload, device: torch.device) -> Sums:
    """Return values and variances of 0, to be added to."""
    return {name: (zeros_of(name, w, device), zeros_of(name, w, device)) for name in parameters}


def rounded(sums: Sums, precision: Precision, w: Workload) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, value and variance of each sum once it is rounded to the dtype of its parameter.

    Where sequences may be added one by one, n - 2 sums of n are rounded before: a third of the square each, with one sign.
    """
    terms = w.batch * w.q_len
    for name, (value, variance) in sums.items():
        times = 1 + (w.batch - 2) / 3 if adds_coarsely(name, w) else 1
        yield f"d{name}", value, variance + _rounding_of(name, precision, w).of_result(value, terms).mul_(times)


def adds_coarsely(name: str, w: Workload) -> bool:
    """Return whether a gradient is summed over sequences in a dtype in which that counts beside a kernel's other roundings."""
    coarse, fine = (DTYPES[dtype].spacing for dtype in (PARAMETERS[name].dtype(w), w.out_dtype))
    return w.batch > 1 and "b" not in PARAMETERS[name].dims(w) and coarse > fine


def _rounding_of(name: str, precision: Precision, w: Workload) -> Rounding:
    return Rounding(precision, PARAMETERS[name].dtype(w))
