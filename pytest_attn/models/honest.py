"""How far fault-free kernels are from exact attention on the tensors of one call, where the budget's assumption fails.

The budget takes rounding errors as independent. In a model whose attention is almost uniform they are not: all rows of out
are nearly equal, are rounded alike, and what D_i inherits of it adds up over the rows. So where a call is beyond the limits,
fault-free kernels are emulated on the same tensors, with the grid of their roundings moved from one to the next; a level may
reach their mean and `DEVIATIONS` standard deviations more. Where errors are independent, their levels hardly differ, and the
limits stay what they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from pytest_attn.correctness.compare import compare_tensor
from pytest_attn.correctness.comparison import TensorComparison
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.reference import Reference, score_elements
from pytest_attn.models.exact import Dithered, Passes
from pytest_attn.workloads.inputs import Inputs

if TYPE_CHECKING:
    import torch

#: emulated kernels, and by how many of their standard deviations a level may exceed their mean
KERNELS, DEVIATIONS = 8, 5.0
#: scores of a call above which none is emulated
_MOST_SCORES = 1 << 28


def with_honest_limits(
    rows: tuple[TensorComparison, ...], tensors: Mapping[str, torch.Tensor], reference: Reference, inputs: Inputs
) -> tuple[TensorComparison, ...]:
    """Return the comparisons, those that failed with the limits that fault-free kernels need on these very tensors."""
    failed = {row.name for row in rows if not row.passed and not row.wrong_positions}
    if not failed or reference.is_sampled or score_elements(inputs.workload) > _MOST_SCORES:
        return rows
    honest = [
        {name: compare_tensor(name, "", twin[name], reference, inputs.workload, rows[0].limits) for name in failed}
        for twin in _twins(inputs, reference, backward=bool(failed - {"out"}))
    ]
    found = []
    for row in rows:
        if row.name in failed:
            limits = _raised(row.limits, [one[row.name] for one in honest])
            passed = limits.excess(row.z_element, row.z_row, row.z_head) <= 1
            row = replace(row, limits=limits, passed=passed)
        found.append(row)
    return tuple(found)


def _raised(limits: Limits, honest: list[TensorComparison]) -> Limits:
    def level(name: str, least: float) -> float:
        found: list[float] = [getattr(one, f"z_{name}") for one in honest]
        if not all(map(math.isfinite, found)):
            return least
        return max(least, fmean(found) + DEVIATIONS * stdev(found))

    return Limits(*(level(name, getattr(limits, name)) for name in ("element", "row", "head")))


def _twins(inputs: Inputs, reference: Reference, backward: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what fault-free kernels return: rounded where the profile says so, or in float32 on values of another scale."""
    import torch

    is_float32 = inputs.workload.dtype == "float32"
    for number in range(1, KERNELS + 1):
        factor = 2.0 ** (number / (KERNELS + 1))
        rounding = None if is_float32 else Dithered(reference.precision, factor)
        scaled = _scaled(inputs, factor if is_float32 else 1.0)
        passes = Passes(scaled, rounding, torch.float32 if is_float32 else None)
        out = passes.forward()
        found = {"out": out}
        if backward:
            found |= dict(zip(("dq", "dk", "dv"), passes.backward(out, scaled.dout), strict=False))  # type: ignore[arg-type]
        if is_float32:
            undo = {"out": factor, "dq": factor, "dk": factor**3, "dv": factor}
            found = {name: (t.double() / undo[name]) for name, t in found.items()}
        yield found


def _scaled(inputs: Inputs, factor: float) -> Inputs:
    """Return inputs in float64 whose scores are the same, and whose every product and sum is rounded elsewhere."""
    scales = {"q": factor, "k": 1 / factor, "v": factor, "dout": factor}
    scaled = {name: getattr(inputs, name).double() * scale for name, scale in scales.items()}
    return dataclasses.replace(inputs, **scaled)
