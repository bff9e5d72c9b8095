"""Gradients beside those of q, k and v: sinks, the bias, ALiBi's slopes, with their budgets.

With s the final scores, dS = P (dP - D) their gradient, and P_sink = exp(sink - lse) the share of a row's sink:

    dsinks_h = - sum_i P_sink,i D_i
    dbias    = dS, summed over the dimensions along which the bias is broadcast (before the softcap: times its slope)
    dalibi_h = - sum_ij dS_ij |i + kv_len - q_len - j|

The variances are those of dS and D (`gradients.py`): one D moves all dS of its row together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.blocks import Block, Chunk
from pytest_attn.correctness.exact import distances_of, sinks_of
from pytest_attn.correctness.gradients import BackwardRows, Gradients, ScoreGradient
from pytest_attn.correctness.rounding import Rounding
from pytest_attn.workloads.parameters import PARAMETERS
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: values and variances by name
Sums: TypeAlias = "dict[str, tuple[torch.Tensor, torch.Tensor]]"


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
        if "sinks" in self.sums:
            self._add_sinks(scores, rows, lse, lse_var, chunk)
        if "alibi" in self.sums:
            distances = -distances_of(chunk)
            drift = (scores.weight * distances).sum(-1, keepdim=True).square_().mul_(scores.row_sum_var)
            variance = (scores.variance * distances.square()).sum(-1, keepdim=True).add_(drift)
            self._add("alibi", (scores.ds * distances).sum(-1, keepdim=True), variance, slice(0, 1), slice(0, 1))
        if "bias" in self.sums:
            self._add_bias(of_bias, chunk)

    def _add_sinks(
        self, scores: ScoreGradient, rows: BackwardRows, lse: torch.Tensor, lse_var: torch.Tensor | None, chunk: Chunk
    ) -> None:
        sinks = sinks_of(chunk)
        assert sinks is not None
        share = (sinks - lse.unsqueeze(-1)).exp_()
        variance = share.square() * scores.row_sum_var
        if lse_var is not None:
            variance += (share * rows.row_sum).square_().mul_(lse_var.unsqueeze(-1))
        self._add("sinks", -share * rows.row_sum, variance, slice(0, 1), slice(0, 1))

    def _add_bias(self, scores: ScoreGradient, chunk: Chunk) -> None:
        over_keys = self.sums["bias"][0].shape[3] == 1
        value, variance, weight = scores.ds, scores.variance, scores.weight
        if over_keys:
            value, variance, weight = (t.sum(-1, keepdim=True) for t in (value, variance, weight))
        is_of_rows = self.sums["bias"][0].shape[2] > 1
        at = chunk.rows if is_of_rows else slice(0, 1)
        variance = variance + weight.square().mul_(scores.row_sum_var)
        self._add("bias", value, variance, at, slice(0, 1) if over_keys else chunk.keys)

    def _add(self, name: str, value: torch.Tensor, variance: torch.Tensor, rows: torch.Tensor | slice, keys: slice) -> None:
        """Add (n, heads, rows, keys) to the sums of these rows and keys, summed over what the parameter has only once."""
        for total, share in zip(self.sums[name], (value, variance), strict=True):
            for axis in range(3):
                share = share.sum(axis, keepdim=True) if total.shape[axis] == 1 else share
            batches = self.block.batches if total.shape[0] > 1 else slice(0, 1)
            heads = self.block.heads if total.shape[1] > 1 else slice(0, 1)
            place = total[batches, heads, :, keys]
            place[:, :, rows] += share


def sums_of(parameters: tuple[str, ...], w: Workload, device: torch.device) -> Sums:
    """Return values and variances of 0, to be added to."""
    import torch

    def zeros(name: str) -> torch.Tensor:
        return torch.zeros(PARAMETERS[name].shape(w), dtype=torch.float64, device=device)

    return {name: (zeros(name), zeros(name)) for name in parameters}


def rounded(sums: Sums, precision: Precision, w: Workload) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, value and variance of each sum once it is rounded to the dtype of its parameter."""
    terms = w.batch * w.q_len
    for name, (value, variance) in sums.items():
        rounding = Rounding(precision, PARAMETERS[name].dtype(w))
        yield f"d{name}", value, variance + rounding.of_result(value, terms)
