"""Which other backward pass explains a gradient that is wrong while out is right.

A part of the backward pass is computed again with one step changed: another D, another lse, P of another attention, a
derivative left out, other heads summed up. A change is named if it gives the kernel's gradient on every distribution.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import SUGGESTED
from pytest_attn.correctness.backward_changes import Change, likely_changes
from pytest_attn.correctness.backward_parts import Place, places_of
from pytest_attn.correctness.comparison import Suggestion, TensorComparison
from pytest_attn.correctness.confirm import WholeCase, explains_most, unexplained
from pytest_attn.correctness.out_mistakes import fitting_profiles
from pytest_attn.correctness.parameters import is_of_parameter
from pytest_attn.correctness.reference import Reference

if TYPE_CHECKING:
    import torch

#: what is left out where time is over
_CHANGES = "mistakes in steps of the backward pass"


def name_gradient(comparison: TensorComparison, bad: torch.Tensor, reference: Reference, case: WholeCase) -> list[Suggestion]:
    """Return what explains a gradient on every distribution, or the profiles that do; nothing where nothing does."""
    name = comparison.name
    if is_of_parameter(name):
        return _factor(comparison, case)
    return (
        _factor(comparison, case)
        or _swapped(name, case)
        or _change(name, bad, reference, case)
        or fitting_profiles(name, [p for p in SUGGESTED if p != reference.precision.name], reference.precision.name, case)
    )


def _factor(comparison: TensorComparison, case: WholeCase) -> list[Suggestion]:
    w = case.workload
    scale = w.softmax_scale
    known = {
        1 / scale: "the factor softmax_scale is missing",
        scale: "the factor softmax_scale was applied twice",
        1 / w.group: f"it looks like the mean over the {w.group} query heads of a group, not their sum",
        -1.0: "its sign is flipped",
        math.log(2): "a factor of ln 2 too much",
        1 / math.log(2): "a factor of ln 2 is missing",
    }
    for factor, text in known.items():
        if factor != 1 and case.has_slope(comparison.name, factor):
            return [Suggestion("gradient factor", {"tensor": comparison.name, "slope": comparison.alpha, "factor": text})]
    return []


def _swapped(name: str, case: WholeCase) -> list[Suggestion]:
    """Name another gradient that this one holds on every distribution."""
    for other in {"dq", "dk", "dv"} - {name}:
        if all(_holds(got, name, other, reference) for got, reference in case.of(name)):
            return [Suggestion("swapped gradients", {"tensor": name, "other": other})]
    return []


def _holds(got: torch.Tensor, name: str, other: str, reference: Reference) -> bool:
    expected, own = reference.tensors[other], reference.tensors[name]
    if got.shape != expected.value.shape or not bool(got.isfinite().all()) or not bool(own.value.any()):
        return False
    variance = own.value.new_zeros(())
    return unexplained(got, expected.value, variance, own.value, expected.tau, None) is not None


def _change(name: str, bad: torch.Tensor, reference: Reference, case: WholeCase) -> list[Suggestion]:
    """Name the change that leaves least unexplained, of those that explain the whole case."""
    place = next(places_of(reference, name, bad), None)
    if place is None:
        return []
    got = next(got for got, of in case.of(name) if of is reference)
    changes = case.patience.each(_CHANGES, likely_changes(reference, name, place))
    fits = [(change.text, _left(change, name, got, reference, place, bad)) for change in changes]
    by_left = sorted(((text, left) for text, left in fits if left is not None), key=lambda found: found[1])
    for text, _ in case.patience.each(_CHANGES, by_left):
        if _is_change(text, name, bad, case):
            return [Suggestion("backward", {"tensor": name, "text": text})]
    return []


def _is_change(text: str, name: str, bad: torch.Tensor, case: WholeCase) -> bool:
    """Whether the gradient is on every distribution what a change gives."""
    for got, reference in case.of(name):
        for place in places_of(reference, name, bad):
            changes = (change for change in likely_changes(reference, name, place) if change.text == text)
            if not any(_left(change, name, got, reference, place, None) is not None for change in changes):
                return False
    return True


def _left(
    change: Change, name: str, got: torch.Tensor, reference: Reference, place: Place, bad: torch.Tensor | None
) -> float | None:
    """Return which part of the deviation a change leaves unexplained, None where it does not explain the gradient."""
    try:
        steps = change.steps()
        value = steps.gradient(name)
    except (RuntimeError, IndexError, ValueError):  # a change that this workload cannot have
        return None
    select, expected = steps.part.of_rows if name == "dq" else steps.part.of_keys, reference.tensors[name]
    mine, exact, tau = (select(t).to(value.device) for t in (got, expected.value, expected.tau))
    faulty = None if bad is None else select(bad).to(value.device)
    if mine.shape != value.shape or (faulty is not None and not explains_most(mine, value, exact, faulty)):
        return None
    return unexplained(mine, value, steps.variance(name, value), exact, tau, faulty)
