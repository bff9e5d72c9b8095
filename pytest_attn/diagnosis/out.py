"""What out may be instead of what it should be: rows of another attention, and rows in another place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.comparison import Limits
from pytest_attn.correctness.reference import Reference, compute_reference
from pytest_attn.diagnosis.case import Case
from pytest_attn.diagnosis.hypothesis import AttentionFault, FaultHypothesis, Prediction, Tolerance, View

#: wrong rows, and as many right ones, on which a fault is tried: a few first, and these if it fits them
FEW_ROWS, MANY_ROWS = 4, 32


@dataclass(frozen=True, eq=False)
class RowsOfOut:
    """Some rows of out, heads-first, and where they are; None for all. precision: that a kernel is taken to have."""

    view: View
    reference: Reference
    rows: torch.Tensor | None
    precision: Precision

    @classmethod
    def of(cls, got: torch.Tensor, reference: Reference, chosen: torch.Tensor | None) -> RowsOfOut:
        """Return these rows of those that the reference has, which `got` holds; all where None are chosen."""
        expected = reference.tensors["out"]
        if chosen is None:
            return cls(View(got, expected.value, expected.tau), reference, None, reference.precision)
        at = chosen.to(expected.value.device)
        view = View(got[:, :, chosen.to(got.device)], expected.value[:, :, at], expected.tau[:, :, at])
        return cls(view, reference, at if expected.rows is None else expected.rows[at], reference.precision)


def on_rows(fault: AttentionFault, limits: Limits) -> FaultHypothesis[RowsOfOut]:
    """Return what predicts rows of out: another attention has a budget of its own, so the limits are those of a check."""

    def predict(seen: RowsOfOut) -> Prediction:
        inputs, w = fault.attention(seen.reference.inputs)
        expected = compute_reference(inputs, seen.precision, rows=seen.rows, workload=w).tensors["out"]
        return Prediction(expected.value, lambda: expected.tau)

    words = f"it equals attention {fault.words}"
    return FaultHypothesis(fault.fault, words, predict, Tolerance(element=limits.element, row=limits.row))


def worst_rows(got: torch.Tensor, bad: torch.Tensor, reference: Reference, number: int) -> RowsOfOut:
    """Choose some wrong and some right rows; packed sequences are small, all their rows are taken.

    got: out, heads-first, where the reference looked. bad: (batch, heads, rows), True where it is wrong.
    """
    if reference.workload.is_packed:
        return RowsOfOut.of(got, reference, None)
    faulty = bad.any(0).any(0)
    some = [_evenly_spread(rows.nonzero().flatten(), number) for rows in (faulty, ~faulty)]
    return RowsOfOut.of(got, reference, torch.cat(some).sort().values)


def spread_rows(case: Case) -> Iterator[RowsOfOut]:
    """Yield rows of out on each distribution, evenly spread; all of packed sequences."""
    for got, reference in case.of("out"):
        every = torch.arange(got.shape[2], device=got.device)
        yield RowsOfOut.of(got, reference, None if case.workload.is_packed else _evenly_spread(every, MANY_ROWS))


def _evenly_spread(positions: torch.Tensor, number: int) -> torch.Tensor:
    """Return at most so many of the positions, evenly spread, the first and the last among them."""
    last = len(positions) - 1
    return positions if last < number else positions[[i * last // (number - 1) for i in range(number)]]


# -- other places ----------------------------------------------------------------------------------------------------------


def misplaced_rows(shape: torch.Size, is_sampled: bool, limits: Limits) -> Iterator[FaultHypothesis[RowsOfOut]]:
    """Yield right rows in the wrong place, of all rows of an out of this shape."""
    batch, heads, rows, _ = shape

    def fault(name: str, words: str, move: Callable[[torch.Tensor], torch.Tensor]) -> FaultHypothesis[RowsOfOut]:
        return FaultHypothesis(name, words, partial(_moved, move), Tolerance(element=limits.element))

    for shift in range(1, heads):
        words = f"head h holds what belongs to head h - {shift}: heads are swapped"
        yield fault("heads-shifted", words, partial(_rolled, 1, shift))
    for shift in range(1, min(batch, 8)):
        words = f"batch entry b holds what belongs to batch entry b - {shift}: batch entries are swapped"
        yield fault("batch-entries-shifted", words, partial(_rolled, 0, shift))
    if not is_sampled and heads == rows > 1:
        words = "out has its heads and rows swapped, which no shape shows where these are equal"
        yield fault("heads-and-rows-swapped", words, lambda t: t.transpose(1, 2))
    if not is_sampled and batch == heads > 1:
        words = "out has its batch entries and heads swapped, which no shape shows where these are equal"
        yield fault("batch-and-heads-swapped", words, lambda t: t.transpose(0, 1))


def _moved(move: Callable[[torch.Tensor], torch.Tensor], seen: RowsOfOut) -> Prediction:
    return Prediction(move(seen.view.exact), lambda: move(seen.view.std))


def _rolled(dim: int, shift: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(shift, dim)
