"""Large scores, far below and far above 0."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pytest_attn.invariants.derived import TOO_LONG
from pytest_attn.invariants.difference import Results, at_first
from pytest_attn.invariants.invariant import QUANTIZES, Invariant, on
from pytest_attn.invariants.probe import Probe
from pytest_attn.workloads.inputs import Inputs, draw_inputs

if TYPE_CHECKING:
    from torch import Tensor

#: Largest q . k asked for, before it is scaled: kernels may hold it in the tensors' dtype, whose largest is 65,504 in float16.
_LARGEST = {"bfloat16": 4e6, "float16": 3e4, "float32": 4e6}
_SPREAD = 2e4
_ONE_TENSOR = "v is a part of k, so that large keys are large values"
_ROUNDING = 1.02  # an average in 16 bits may exceed the largest value by so much


class Magnitude(Invariant):
    """The softmax is that of differences: neither large scores nor a large common shift make it overflow."""

    name = "magnitude"
    summary = "scores of about 10,000, and rows whose scores all lie far below or above 0, give finite and right results"
    calls = 2

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Leave out quantized kernels, and what takes too long."""
        if probe.is_approximate:
            return QUANTIZES
        if probe.workload.is_quantized or probe.workload.v_in_k:
            return "quantized tensors hold no such numbers" if probe.workload.is_quantized else _ONE_TENSOR
        return None if probe.is_short else TOO_LONG

    def run(self, probe: Probe) -> str:
        """Call with large scores, then with large shifts."""
        for words, inputs in (("large scores", _large(probe)), ("all scores of a row far from 0", _shifted(probe))):
            with on(words):
                found = probe.run(inputs)
            if misfit := _no_average(found, inputs) if _rounds_scores(probe) else probe.misfit(found, inputs):
                return f"{words}: {misfit}"
        return ""


def _rounds_scores(probe: Probe) -> bool:
    """Whether scores of 10,000 are off by more than the softmax bears, so that out may be any average of values."""
    precision = probe.spec.profile
    return precision.rounds_scores or precision.rounds_scaled_query


def _no_average(found: Results, inputs: Inputs) -> str:
    """Say where out lies outside the values, or a gradient is not finite; "" where all are."""
    largest = inputs.gathered()[1].abs().max() * _ROUNDING
    for name, tensor in found.items():
        wrong = tensor.isnan() if name == "lse" else ~tensor.isfinite()
        if name == "out":
            wrong = wrong | (tensor.abs() > largest)
        if bool(wrong.any()):
            return at_first(name, tensor, wrong)
    return ""


def _large(probe: Probe) -> Inputs:
    """Scale q and k of N(0, 1) so that scores are about 10,000."""
    drawn = draw_inputs(probe.workload, "randn", probe.spec.seed, probe.device)
    wanted = min(_SPREAD / probe.workload.softmax_scale, _LARGEST[probe.workload.dtype] / 4)
    factor = (wanted / probe.workload.head_dim**0.5) ** 0.5
    return dataclasses.replace(drawn, q=drawn.q * factor, k=drawn.k * factor)


def _shifted(probe: Probe) -> Inputs:
    """Give all keys one large channel, and queries one that moves all scores of a row down, in every third head up."""
    import torch

    drawn = draw_inputs(probe.workload, "randn", probe.spec.seed, probe.device)
    w = probe.workload
    shift = min(_LARGEST[w.dtype] / 4, 2e5 / w.softmax_scale)
    k, q = drawn.k.clone(), drawn.q.clone()
    k[..., 0] = 64
    sign = torch.where(torch.arange(w.heads, device=probe.device) % 3 == 2, 1.0, -1.0)
    q[..., 0] = _per_head(sign * shift / 64, q, w.is_packed).to(q.dtype)
    return dataclasses.replace(drawn, q=q, k=k)


def _per_head(values: Tensor, like: Tensor, is_packed: bool) -> Tensor:
    return values.expand(like.shape[:-1]) if is_packed else values[:, None].expand(like.shape[:-1])
