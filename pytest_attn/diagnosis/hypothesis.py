"""Fault hypotheses, and the one rule by which one explains what a callable returned, or does not.

A hypothesis says what a tensor would be had the callable a certain fault. It explains the tensor where that is what was
returned, on every distribution of inputs: a wrong hint is worse than none.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from pytest_attn.correctness.comparison import residual_over_budget
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

#: the inputs and the workload of another attention
Other: TypeAlias = tuple[Inputs, Workload]


class Tolerance(NamedTuple):
    """Distance that a prediction may have from what was returned, as it is more or less precise.

    element, row: the largest |z| of an element, and RMS of z over a row, in units of the prediction's own std. left: which
    part of the wrong rows' deviation from the exact result, by its norm, may be left.
    """

    element: float = math.inf
    row: float = math.inf
    left: float = math.inf


#: of a computation with one step changed: the variance of its roundings is a bound from above, within which much would fit,
#: so that it has to explain most of the deviation as well
OF_STEPS = Tolerance(element=8.0, left=0.25)
#: of what float32 holds: all elements are within the std, which is what float32 may be off
OF_FLOAT32 = Tolerance(element=1.0)


class View(NamedTuple):
    """The part of a tensor that is looked at, heads-first, on one distribution of inputs.

    got, exact: as returned and as it should be, (..., rows, dim). std: how far a fault-free one is from exact. bad:
    (..., rows), True where rows are wrong; None where they may as well be right.
    """

    got: torch.Tensor
    exact: torch.Tensor
    std: torch.Tensor
    bad: torch.Tensor | None = None


class Prediction(NamedTuple):
    """Value that a tensor would have, and how far a kernel with the fault is from it; std None: that is not known."""

    value: torch.Tensor
    std: Callable[[], torch.Tensor] | None = None


class HasView(Protocol):
    """Sight of a tensor on one distribution of inputs: the view, and what it takes to compute what else it may be."""

    @property
    def view(self) -> View:
        """Tensor that was returned, and that should have been."""


Seen = TypeVar("Seen", bound=HasView)


@dataclass(frozen=True, eq=False)
class FaultHypothesis(Generic[Seen]):
    """One fault that a callable may have.

    fault: its identity, of `faults.FAULTS`. words: what a message says of it. predict: what the tensor would be, of what is
    seen of it on any distribution of inputs; raises RuntimeError, IndexError or ValueError where there is no such thing.
    """

    fault: str
    words: str
    predict: Callable[[Seen], Prediction]
    tolerance: Tolerance


@dataclass(frozen=True, eq=False)
class AttentionFault:
    """A fault that amounts to another attention, from which hypotheses on out, lse and the gradients are made.

    words: continue "attention ...". attention: makes the other attention, of inputs of any distribution; raises as `predict`
    does.
    """

    fault: str
    words: str
    attention: Callable[[Inputs], Other]


def of_workload(w: Workload, **changes: object) -> Callable[[Inputs], Other]:
    """Return what makes attention with another mask, scale, option, ..."""
    return lambda inputs: (inputs, w.replace(**changes))


def of_tensors(w: Workload, changes: Callable[[Inputs], Mapping[str, Any]]) -> Callable[[Inputs], Other]:
    """Return what makes attention to other tensors: changes says which, of the right ones."""
    return lambda inputs: (dataclasses.replace(inputs, **changes(inputs)), w)


class Fit(NamedTuple):
    """Fit of a prediction: the largest |z|. rank: the less the better; what it leaves where that counts, else z."""

    z: float
    rank: float


def explains(hypothesis: FaultHypothesis[Seen], seen: Seen) -> Fit | None:
    """Return how well a hypothesis fits what is seen, None where that is not what it predicts: the one rule.

    What is neither a number in the result nor in the prediction is a fault of its own, and left out unless most is.
    """
    try:
        value, std = hypothesis.predict(seen)
    except (RuntimeError, IndexError, ValueError):  # a fault that this workload cannot have
        return None
    view, tolerance = seen.view, hypothesis.tolerance
    numbers = view.got.isfinite()
    if view.got.shape != value.shape or bool((numbers & ~value.isfinite()).any()):
        return None
    if not _has_enough_numbers(view, numbers, value):
        return None
    left = _left(view, value, numbers) if tolerance.left < math.inf and view.bad is not None else 0.0
    if not left <= tolerance.left:
        return None
    if std is None:
        return Fit(0.0, left)
    z = residual_over_budget((view.got.double() - value).where(numbers, 0.0), std())
    largest = float(z.abs().max()) if z.numel() else 0.0
    row = float(z.square().mean(-1).max()) ** 0.5 if tolerance.row < math.inf else 0.0
    if not (largest <= tolerance.element and row <= tolerance.row):
        return None
    return Fit(largest, largest if tolerance.left == math.inf else left)


def _has_enough_numbers(view: View, numbers: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether most rows hold numbers, of those whose prediction the dtype can hold; True where it can hold none."""
    holds = view.exact.isfinite().any(-1)
    fits = holds & (value.abs() <= torch.finfo(view.got.dtype).max).all(-1)
    rows = numbers.any(-1)[fits]
    return bool(rows.float().mean() > 0.5) if len(rows) else bool(holds.any())


def _left(view: View, value: torch.Tensor, numbers: torch.Tensor) -> float:
    """Return the norm of what is left unexplained in the wrong rows over that of their deviation."""
    both = numbers & value.isfinite()
    off, deviation = ((view.got.double() - other).where(both, 0.0)[view.bad] for other in (value, view.exact))
    size = float(deviation.norm())
    return float(off.norm()) / size if size else math.inf
