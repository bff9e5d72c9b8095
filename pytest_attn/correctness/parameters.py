"""Gradients beside those of q, k and v: sinks, the bias, ALiBi's slopes, with their budgets.

With s the final scores, dS = P (dP - D) their gradient, and P_sink = exp(sink - lse) the share of a row's sink:

    dsinks_h = - sum_i P_sink,i D_i
    dbias    = dS, summed over the dimensions along which the bias is broadcast (before the softcap: times its slope)
    dalibi_h = - sum_ij dS_ij |i + kv_len - q_len - j|

The variances are those of dS and D (`gradients.py`): one D moves all dS of its row together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch

from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.blocks import Block, Chunk
from pytest_attn.correctness.exact import distances_of, sinks_of
from pytest_attn.correctness.gradients import BackwardRows, Gradients, ScoreGradient
from pytest_attn.correctness.rounding import Rounding
from pytest_attn.workloads.parameters import PARAMETERS
from pytest_attn.workloads.workload import Workload

#: values and variances by name
Sums: TypeAlias = "dict[str, tuple[torch.Tensor, torch.Tensor]]"


class BackwardSteps(NamedTuple):
    """What the gradients of a chunk's parameters are formed from.

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
    """What a chunk adds to the gradient of a parameter, and the variance of that.

    Both are (n, heads, rows or 1, keys or 1), and summed up over what the parameter has only once.
    """

    value: Callable[[BackwardSteps], torch.Tensor]
    variance: Callable[[BackwardSteps, Variances], torch.Tensor]


def _variance_of_sinks(steps: BackwardSteps, variances: Variances) -> torch.Tensor:
    share = steps.sink_share
    variance = share.square() * variances.of_scores.row_sum_var
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

    def add(self, rows: BackwardRows, lse: torch.Tensor, lse_var: torch.Tensor | None, chunk: Chunk) -> None:
        """Add the share of a chunk's rows. lse, lse_var: (n, heads, rows)."""
        whole = dataclasses.replace(rows, slope=None, slope_var=None)  # of the final scores, after softcap
        scores = self.gradients.of_scores(whole, chunk.v, chunk.v_squared, chunk.v.shape[2])
        is_first = self.block.workload.bias_before_softcap
        of_bias = self.gradients.of_scores(rows, chunk.v, chunk.v_squared, chunk.v.shape[2]) if is_first else scores
        steps, variances = BackwardSteps(chunk, scores.ds, of_bias.ds, rows.row_sum, lse), Variances(scores, of_bias, lse_var)
        for name, (value, variance) in self.sums.items():
            add_share(value, REDUCTIONS[name].value(steps), chunk)
            add_share(variance, REDUCTIONS[name].variance(steps, variances), chunk)


def add_values(sums: Mapping[str, torch.Tensor], steps: BackwardSteps) -> None:
    """Add a chunk's share to gradients of parameters by name, each of the shape that is compared."""
    for name, total in sums.items():
        add_share(total, REDUCTIONS[name].value(steps), steps.chunk)


def add_share(total: torch.Tensor, share: torch.Tensor, chunk: Chunk) -> None:
    """Add (n, heads, rows or 1, keys or 1) to a sum, in place, summed over what the sum has only once."""
    for axis in (3, 0, 1, 2):
        share = share.sum(axis, keepdim=True) if total.shape[axis] == 1 else share
    batches = chunk.block.batches if total.shape[0] > 1 else slice(0, 1)
    heads = chunk.block.heads if total.shape[1] > 1 else slice(0, 1)
    rows = chunk.rows if total.shape[2] > 1 else slice(0, 1)
    place = total[batches, heads, :, chunk.keys if total.shape[3] > 1 else slice(0, 1)]
    place[:, :, rows] += share


def zeros_of(name: str, w: Workload, device: torch.device) -> torch.Tensor:
    """Return 0 in the shape of a parameter's gradient, in float64, to be added to."""
    return torch.zeros(PARAMETERS[name].shape(w), dtype=torch.float64, device=device)


def sums_of(parameters: tuple[str, ...], w: Workload, device: torch.device) -> Sums:
    """Return values and variances of 0, to be added to."""
    return {name: (zeros_of(name, w, device), zeros_of(name, w, device)) for name in parameters}


def rounded(sums: Sums, precision: Precision, w: Workload) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, value and variance of each sum once it is rounded to the dtype of its parameter."""
    terms = w.batch * w.q_len
    for name, (value, variance) in sums.items():
        rounding = Rounding(precision, PARAMETERS[name].dtype(w))
        yield f"d{name}", value, variance + rounding.of_result(value, terms)
