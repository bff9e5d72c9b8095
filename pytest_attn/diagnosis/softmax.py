"""What lse, the softmax weights or the row maxima may be instead of what they should be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import torch

from pytest_attn.correctness.exact import Block, Chunk, modify, scaled_scores
from pytest_attn.correctness.judge import LSE_TOLERANCE
from pytest_attn.correctness.reference import Reference, compute_reference, score_elements, segments_of
from pytest_attn.diagnosis.attention import attention_faults
from pytest_attn.diagnosis.hypothesis import OF_FLOAT32, AttentionFault, FaultHypothesis, Prediction, View
from pytest_attn.workloads.heads import ungrouped
from pytest_attn.workloads.workload import Workload

#: how far lse or a maximum, and a weight, may be from the one that explains it, as a part of its size
_NEAR, _NEAR_WEIGHT = 1e-4, 0.02
#: scores above which no other lse is computed
_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class WholeResult:
    """All of lse, of the weights or of the maxima, (batch, heads, rows, keys), with 1 for the keys of those that have none."""

    view: View
    reference: Reference

    @classmethod
    def of(cls, name: str, got: torch.Tensor, reference: Reference) -> WholeResult:
        """Return what is seen of a heads-first result."""
        exact = _with_keys(reference.tensors[name].value)
        return cls(View(_with_keys(got), exact, torch.zeros_like(exact)), reference)

    @cached_property
    def results(self) -> dict[str, torch.Tensor]:
        """Exact lse, weights and maxima."""
        computed = compute_reference(self.reference.inputs, self.reference.precision, extra=("weights", "max"))
        return {name: computed.tensors[name].value for name in ("lse", "weights", "max")}


Hypothesis: TypeAlias = FaultHypothesis[WholeResult]
#: what else a result may be, heads-first
Value: TypeAlias = Callable[[WholeResult], torch.Tensor]


def _with_keys(result: torch.Tensor) -> torch.Tensor:
    return result if result.dim() == 4 else result.unsqueeze(-1)


def _hypothesis(fault: str, words: str, value: Value, near: float = _NEAR, floor: float = 1.0) -> Hypothesis:
    """Return what predicts a value; elements may be off by a part of their size, or of `floor` where they are small."""

    def predict(seen: WholeResult) -> Prediction:
        found = _with_keys(value(seen)).to(seen.view.got.device)
        if not found.isfinite().equal(seen.view.got.isfinite()):
            raise ValueError
        return Prediction(found, lambda: near * (floor + found.abs()))

    return FaultHypothesis(fault, words, predict, OF_FLOAT32)


# -- lse -------------------------------------------------------------------------------------------------------------------


def faults_of_lse(w: Workload, reference: Reference) -> Iterator[Hypothesis]:
    """Yield what lse may be, the cheapest to find out first."""
    for fault, factor, words in (
        ("lse-base-2", 1 / math.log(2), "log2 e: it is in base 2 (where that is meant, the marker says lse_base=2)"),
        (
            "lse-converted-twice",
            math.log(2),
            "ln 2: it was converted from base 2 twice, or is natural where lse_base=2 is said",
        ),
        ("lse-negative", -1.0, "-1"),
    ):
        yield _hypothesis(fault, f"lse is off by a factor of {words}", partial(_multiple, factor))
    for fault, shift, words in (
        ("lse-ln-2-too-large", math.log(2), "ln 2 too large"),
        ("lse-ln-2-too-small", -math.log(2), "ln 2 too small"),
    ):
        yield _hypothesis(fault, f"lse is {words} in every row", partial(_shifted, shift))
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        predict = partial(_rounded_to, dtype)
        yield FaultHypothesis("lse-rounded", f"lse is rounded to {name}; float32 expected", predict, OF_FLOAT32)
    if not reference.is_sampled:
        for one, other, words in ((1, 2, "(batch, rows, heads)"), (0, 1, "(heads, batch, rows)")):
            words = f"lse lies in memory as {words}; (batch, heads, rows) expected"
            yield _hypothesis("lse-layout", words, partial(_laid_out, one, other), LSE_TOLERANCE)
    if score_elements(w) > _ELEMENTS:
        return
    words = "lse is the logarithm of the sum relative to the row's maximum: the maximum is not added"
    for with_sinks in (False, True) if w.sinks else (False,):
        yield _hypothesis("lse-without-maximum", words, partial(_without_maximum, with_sinks))
    words = "lse is the row's maximum: the logarithm of the sum is not added"
    yield _hypothesis("lse-is-maximum", words, lambda seen: _row_maxima(seen.reference))
    for likely in attention_faults(w, reference.inputs):
        yield _hypothesis(likely.fault, f"lse is that of attention {likely.words}", partial(_of_attention, likely))


def _exact(seen: WholeResult) -> torch.Tensor:
    return seen.reference.tensors["lse"].value


def _multiple(factor: float, seen: WholeResult) -> torch.Tensor:
    return _exact(seen) * factor


def _shifted(shift: float, seen: WholeResult) -> torch.Tensor:
    return _exact(seen) + shift


def _rounded_to(dtype: torch.dtype, seen: WholeResult) -> Prediction:
    """Predict the numbers of a smaller dtype which are nearest to the exact ones; there is none for others."""
    exact, rounded = seen.view.exact, seen.view.got.to(dtype)
    if not bool(((rounded.to(seen.view.got.dtype) == seen.view.got) | ~seen.view.got.isfinite()).all()):
        raise ValueError
    return Prediction(exact, lambda: exact.abs() * torch.finfo(dtype).eps)


def _laid_out(one: int, other: int, seen: WholeResult) -> torch.Tensor:
    """Return lse as it lies in memory with two dimensions swapped, which shapes need not show."""
    exact = _exact(seen)
    if exact.shape[one] == 1 or exact.shape[other] == 1:
        raise ValueError
    return exact.transpose(one, other).reshape(exact.shape)


def _without_maximum(with_sinks: bool, seen: WholeResult) -> torch.Tensor:
    return _exact(seen) - _row_maxima(seen.reference, with_sinks)


def _of_attention(fault: AttentionFault, seen: WholeResult) -> torch.Tensor:
    inputs, w = fault.attention(seen.reference.inputs)
    return compute_reference(inputs, seen.reference.precision, workload=w).tensors["lse"].value


def _row_maxima(reference: Reference, with_sinks: bool = False) -> torch.Tensor:
    """Return the largest final score of each row, or sink, heads-first; -inf where a row sees no key."""
    exact = reference.tensors["lse"]
    maxima = torch.full_like(exact.value, -math.inf)
    w, device = reference.inputs.workload, exact.value.device
    for segment in segments_of(reference.inputs, w, device):
        batch, heads = segment.k.shape[:2]
        block = Block(segment, slice(0, batch), slice(0, heads))
        rows = torch.arange(segment.lengths[0], device=device)
        if not len(rows) or not segment.lengths[1]:
            continue
        chunk = Chunk(block, rows)
        scores, _ = modify(scaled_scores(chunk), chunk)
        maxima[:, :, segment.q_start : segment.q_start + len(rows)] = scores.amax(-1)
    maxima, sinks = ungrouped(maxima, w), reference.inputs.sinks
    if with_sinks and sinks is not None:
        maxima = maxima.maximum(sinks.to(device).double()[:, None])
    return maxima if exact.rows is None else maxima[:, :, exact.rows]


# -- weights and maxima ----------------------------------------------------------------------------------------------------


def faults_of_extra(name: str, reference: Reference) -> Iterator[Hypothesis]:
    """Yield what the "weights" or the "max" may be."""
    near, floor = (_NEAR_WEIGHT, 1e-4) if name == "weights" else (_NEAR, 1.0)
    if not reference.is_sampled:
        for fault, words, value in _other_maxima(reference) if name == "max" else _other_weights(reference):
            yield _hypothesis(fault, f"{name} is {words}", value, near, floor)


def _other_maxima(reference: Reference) -> Iterator[tuple[str, str, Value]]:
    scale = reference.inputs.workload.softmax_scale
    words = "in base 2: log2 e times the maximum (say lse_base=2 if that is meant)"
    yield "max-base-2", words, lambda r: r.results["max"] / math.log(2)
    yield "max-converted-twice", "converted from base 2 once too often", lambda r: r.results["max"] * math.log(2)
    yield "max-before-scale", "the maximum before the scale", lambda r: r.results["max"] / scale
    yield "max-is-lse", "lse, not the maximum", lambda r: r.results["lse"]


def _other_weights(reference: Reference) -> Iterator[tuple[str, str, Value]]:
    w = reference.inputs.workload

    def weights(r: WholeResult) -> torch.Tensor:
        return r.results["weights"]

    def sums(r: WholeResult) -> torch.Tensor:
        return _beside_keys((r.results["lse"] - r.results["max"]).exp())

    yield "weights-not-divided", "not divided by the row's sum: exp(score - max)", lambda r: weights(r) * sums(r)
    words = "exp(score), neither shifted nor divided"
    yield "weights-not-shifted", words, lambda r: weights(r) * _beside_keys(r.results["lse"].exp())
    words = "the scores: the softmax is missing"
    yield "weights-are-scores", words, lambda r: weights(r).log() + _beside_keys(r.results["lse"])
    yield "weights-are-logarithms", "the logarithms of the weights", lambda r: weights(r).log()
    if w.sinks:
        words = "divided by the row's sum without its sink"
        yield "weights-without-sink", words, lambda r: weights(r) / _beside_keys(weights(r).sum(-1))
    if w.heads > 1:
        mean: Value = lambda r: weights(r).mean(1, keepdim=True).expand_as(weights(r))  # noqa: E731
        yield "weights-averaged-over-heads", "the mean over all heads", mean
    if w.q_len == w.kv_len:
        yield "weights-transposed", "transposed: (batch, heads, keys, rows)", lambda r: weights(r).mT


def _beside_keys(rows: torch.Tensor) -> torch.Tensor:
    """Return one number per row, -inf as 0, beside the keys."""
    return rows.masked_fill(rows == -math.inf, 0).unsqueeze(-1)
