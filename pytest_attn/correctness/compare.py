"""Hold a kernel's tensors against the reference: residual over budget, at three levels, and the usual figures beside it.

z = (tensor - exact) / tau is dimensionless. A fault-free kernel's z looks the same for every shape, dtype and value scale,
and each kind of fault shows at its own level: one wrong element (max |z|), one wrong key or row (RMS of z over a row), a
small error everywhere (RMS of z over a head).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_attn.correctness.comparison import TensorComparison
from pytest_attn.correctness.expected import Expected
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.reference import Reference, as_compared
from pytest_attn.workloads.parameters import PARAMETERS, is_of_parameter
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: With fewer rows the RMS over a head adds nothing to that of its rows, and the row's limit applies.
FEW_ROWS = 16
LSE_TOLERANCE = 1e-5  # of 1 + |lse|: float32 sums of exponentials are that good
LSE_BUDGETS = 8.0  # of the scores' noise, where a profile declares it


def compare_all(
    distribution: str,
    tensors: Mapping[str, torch.Tensor],
    reference: Reference,
    workload: Workload,
    limits: tuple[Limits, Limits],
) -> Iterator[TensorComparison]:
    """Compare tensors by their names, native ones. limits: of out and lse, and of gradients."""
    of_results, of_gradients = limits
    for name, tensor in tensors.items():
        of_this = of_gradients if name.startswith("d") else of_results
        yield compare_tensor(name, distribution, tensor, reference, workload, of_this)


def compare_tensor(
    name: str, distribution: str, tensor: torch.Tensor, reference: Reference, workload: Workload, limits: Limits
) -> TensorComparison:
    """Compare one native tensor with the reference's tensor of the same name."""
    expected = reference.tensors[name]
    got, unsampled_faults = _compared_rows(as_compared(name, tensor.detach(), workload), expected)
    if is_of_heads := is_of_parameter(name) and PARAMETERS[name[1:]].is_of_heads:  # an element for each makes no row
        limits = _of_elements(limits)
    if name in ("lse", "max"):
        return _compare_lse(name, distribution, got, expected)
    if got.shape[2] < FEW_ROWS:
        limits = replace(limits, head=limits.row)
    residual, wrong = _residual(got, expected)
    z = residual_over_budget(residual, expected.tau)
    squares = z.square()
    z_element, at = _largest(z.abs())
    rows = squares.mean(-1)
    z_row, z_head = float(rows.max()) ** 0.5, float(rows.mean(-1).max()) ** 0.5
    wrong_count = max(int(wrong.sum()), unsampled_faults)
    if wrong_count and bool(wrong.any()):
        at = _index(int(wrong.flatten().int().argmax()), wrong.shape)
    passed = not wrong_count and limits.excess(z_element, z_row, z_head) <= 1
    return TensorComparison(
        name=name,
        distribution=distribution,
        passed=passed,
        z_element=z_element,
        z_row=z_row,
        z_head=z_head,
        elements=got.numel(),
        exceeding=int((z.abs() > limits.element).sum()),
        wrong_positions=wrong_count,
        worst=at[1:2] if is_of_heads else _true_index(at, expected),
        found=float(got[at]),
        exact=float(expected.value[at]),
        budget=float(expected.tau[at]),
        limits=limits,
        **_familiar_figures(residual, expected.value),
    )


def _compared_rows(got: torch.Tensor, expected: Expected) -> tuple[torch.Tensor, int]:
    """Return the rows that were computed exactly, and how many elements of all rows are not finite, where all should be."""
    if expected.rows is None:
        return got, 0
    looked_through = got.flatten(0, 1) if bool(expected.value.isfinite().all()) else got[:0]
    faults = sum(int((~head.isfinite()).sum()) for head in looked_through)  # one at a time: each takes memory
    return got[:, :, expected.rows.to(got.device)], faults


def _of_elements(limits: Limits) -> Limits:
    """Return limits that hold every level to that of an element."""
    return replace(limits, row=limits.element, head=limits.element)


def residual_over_budget(residual: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Return z; where nothing may be off (tau = 0) it is 0 or infinite."""
    import torch

    z = residual / tau
    return torch.where(tau > 0, z, torch.where(residual == 0, 0.0, math.inf))


def _residual(got: torch.Tensor, expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual in float64, zero at non-finite places, and where NaN or infinity is not as expected.

    An exact value beyond the dtype's largest number is expected to be infinite.
    """
    import torch

    value = expected.value.to(got.device)
    as_dtype = value.to(got.dtype)
    wrong = (got.isnan() != as_dtype.isnan()) | (got.isinf() != as_dtype.isinf()) | (got.isinf() & (got != as_dtype))
    both = got.isfinite() & as_dtype.isfinite()
    return torch.where(both, got.double() - value, 0.0), wrong


def _compare_lse(name: str, distribution: str, got: torch.Tensor, expected: Expected) -> TensorComparison:
    residual, wrong = _residual(got.double(), expected)
    finite = expected.value.isfinite()
    exact = expected.value.where(finite, expected.value.new_zeros(()))
    allowed = LSE_TOLERANCE * (1 + exact.abs()) + LSE_BUDGETS * expected.tau.to(exact.device)
    z = residual / allowed
    z_element, at = _largest(z.abs())
    limits = Limits(1, 1, 1)
    return TensorComparison(
        name=name,
        distribution=distribution,
        passed=not bool(wrong.any()) and z_element <= 1,
        z_element=z_element,
        z_row=z_element,
        z_head=float(z.square().mean(-1).max()) ** 0.5,
        elements=got.numel(),
        exceeding=int((z.abs() > 1).sum()),
        wrong_positions=int(wrong.sum()),
        worst=_true_index(at, expected),
        found=float(got[at]),
        exact=float(expected.value[at]),
        budget=float(allowed[at]),
        limits=limits,
        **_familiar_figures(residual, exact),
    )


def _familiar_figures(residual: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    exact = exact.where(exact.isfinite(), exact.new_zeros(()))
    got = exact + residual
    energy, overlap = float(exact.square().sum()), float((got * exact).sum())
    mse = float(residual.square().mean())
    norms = math.sqrt(energy) * float(got.norm())
    return {
        "absmax": float(residual.abs().max()),
        "mean_abs": float(residual.abs().mean()),
        "mse": mse,
        "relative_l2": math.sqrt(mse * residual.numel() / energy) if energy else 0.0,
        "cosine": overlap / norms if norms else (1.0 if not energy and not float(got.norm()) else 0.0),
        "alpha": overlap / energy if energy else 1.0,
    }


def _largest(magnitude: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    at = _index(int(magnitude.flatten().argmax()), magnitude.shape)
    return float(magnitude[at]), at


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, here = divmod(flat, size)
        index.append(here)
    return tuple(reversed(index))


def _true_index(at: tuple[int, ...], expected: Expected) -> tuple[int, ...]:
    if expected.rows is None:
        return at
    return (*at[:2], int(expected.rows[at[2]]), *at[3:])
