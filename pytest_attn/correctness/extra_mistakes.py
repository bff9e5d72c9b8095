"""What a softmax matrix, or a row maximum, may be instead of the one that it should be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from pytest_attn.correctness.comparison import Suggestion
from pytest_attn.correctness.confirm import WholeCase
from pytest_attn.correctness.reference import Reference, compute_reference

if TYPE_CHECKING:
    import torch

#: how far a weight or a maximum may be from the one that explains it, as a part of its size
_NEAR = {"weights": 0.02, "max": 1e-4}

#: what else a result may be, of the reference with weights and max
Other: TypeAlias = "Callable[[Reference], torch.Tensor]"


def name_extra(name: str, reference: Reference, case: WholeCase) -> list[Suggestion]:
    """Return what explains a result on every distribution; nothing where nothing does. name: "weights" or "max"."""
    if reference.is_sampled:
        return []
    both = {id(one.reference): _with_both(one.reference) for one in case.returned}
    for words, other in _others(name, reference):
        if all(_is_near(name, got, other(both[id(expected)])) for got, expected in case.of(name)):
            return [Suggestion("other result", {"tensor": name, "words": words})]
    return []


def _with_both(reference: Reference) -> Reference:
    return compute_reference(reference.inputs, reference.precision, extra=("weights", "max"))


def _others(name: str, reference: Reference) -> Iterator[tuple[str, Other]]:
    w = reference.inputs.workload
    if name == "max":
        yield "in base 2: log2 e times the maximum (say lse_base=2 if that is meant)", lambda r: _max(r) / math.log(2)
        yield "converted from base 2 once too often", lambda r: _max(r) * math.log(2)
        yield "the maximum before the scale", lambda r: _max(r) / w.softmax_scale
        yield "lse, not the maximum", _lse
        return
    yield "not divided by the row's sum: exp(score - max)", lambda r: _weights(r) * _col((_lse(r) - _max(r)).exp())
    yield "exp(score), neither shifted nor divided", lambda r: _weights(r) * _col(_lse(r).exp())
    yield "the scores: the softmax is missing", lambda r: _weights(r).log() + _col(_lse(r))
    yield "the logarithms of the weights", lambda r: _weights(r).log()
    if w.sinks:
        yield "divided by the row's sum without its sink", lambda r: _weights(r) / _col(_weights(r).sum(-1))
    if w.heads > 1:
        yield "the mean over all heads", lambda r: _weights(r).mean(1, keepdim=True).expand_as(_weights(r))
    if w.q_len == w.kv_len:
        yield "transposed: (batch, heads, keys, rows)", lambda r: _weights(r).mT


def _is_near(name: str, got: torch.Tensor, other: torch.Tensor) -> bool:
    other = other.to(got.device)
    if not bool((got.isfinite() == other.isfinite()).all()):
        return False
    near = (got.double() - other).abs() <= _NEAR[name] * ((1 if name == "max" else 1e-4) + other.abs())
    return bool((near | (got == other)).all())


def _weights(reference: Reference) -> torch.Tensor:
    return reference.tensors["weights"].value


def _max(reference: Reference) -> torch.Tensor:
    return reference.tensors["max"].value


def _lse(reference: Reference) -> torch.Tensor:
    return reference.tensors["lse"].value


def _col(rows: torch.Tensor) -> torch.Tensor:
    """Return one number per row, -inf as 0, beside the keys."""
    return rows.masked_fill(rows == -math.inf, 0).unsqueeze(-1)
