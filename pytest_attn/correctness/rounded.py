"""The judgment of what stands beside attention: exact but for the roundings that a kernel declares, `assert_rounded`.

The caller has the exact result in float64 and knows where the kernel rounds. The variances of these roundings add up to the
budget of an element; z and its levels are those of attention, with the whole tensor in place of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pytest_attn.backends.precision import TINY
from pytest_attn.correctness.comparison import (
    Members,
    TensorComparison,
    describe_rows,
    head_slopes,
    residual_over_budget,
    wrong_rows,
)
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import compare_rows, unraveled
from pytest_attn.correctness.limits import Limits, limits_named
from pytest_attn.correctness.mismatch_text import CLEAR, describe_row
from pytest_attn.correctness.reference import Expected
from pytest_attn.reports.lines import labeled
from pytest_attn.workloads.dtypes import FLOATING_DTYPES, dtype_name
from pytest_attn.workloads.workload import Workload

#: In shorter rows the RMS adds nothing to the largest element.
_SHORT = 4
#: Fewer rounded numbers, or values that differ, do not average out over the whole: equal numbers are rounded alike.
_FEW = 16
#: part of the variance from which on one of several roundings decides over that
_SHOWN = 0.1


@dataclass(frozen=True, eq=False)
class Rounded:
    """Rounding to the nearest number of a dtype, at one place of a kernel.

    Args:
        dtype: to which it rounds, "bfloat16", "float16", "float32" or "float8_e4m3fn", or torch's own.
        of: what is rounded there, as a float64 tensor that broadcasts to the exact result's shape: (rows, 1) where all of a
            row share a rounded number.
        times: how many such roundings add up, each of `of` or less. A sum of K terms rounds K times; `of` is then the sum of
            their magnitudes. Whoever cuts off instead of rounding counts four times.
        by: what the rounded number is multiplied by until it is the result.
    """

    dtype: str | torch.dtype
    of: torch.Tensor
    times: float = 1.0
    by: float | torch.Tensor = 1.0

    @property
    def variance(self) -> torch.Tensor:
        """The mean square of its errors, evenly spread up to the largest that rounding to nearest makes."""
        dtype = FLOATING_DTYPES[dtype_name(self.dtype)]
        power_of_2 = (self.of / (2 * torch.frexp(self.of).mantissa)).nan_to_num_(0)  # the next below; 0 of 0
        largest = (power_of_2 * dtype.spacing).clamp_(min=max(dtype.floor, TINY)).where(self.of.isfinite(), math.inf)
        return (largest * self.by).square_() * (self.times / 3)


@dataclass(frozen=True, eq=False)
class Quantized:
    """Rounding to a multiple of a step, as to an integer times a scale.

    Args:
        step: a number, or a float64 tensor that broadcasts to the exact result's shape. A tie may go either way.
    """

    step: float | torch.Tensor

    @property
    def variance(self) -> torch.Tensor:
        """The mean square of its errors, evenly spread over a step."""
        return torch.as_tensor(self.step, dtype=torch.float64).square() / 12


def assert_rounded(
    out: torch.Tensor, exact: torch.Tensor, roundings: Sequence[Rounded | Quantized | torch.Tensor], *, name: str = "out"
) -> TensorComparison:
    """Hold any result against the exact one: it may differ by the roundings that are declared.

    Args:
        out: what the kernel returned.
        exact: the result in float64, of the numbers that the kernel was given.
        roundings: where the kernel rounds; a float64 tensor is the standard error of a rounding of another kind.
        name: what messages call the result.

    Returns:
        The comparison: z_element, z_row, z_head (of the whole tensor), limits, and the usual figures.

    Raises:
        AssertionError: it is off by more.
        ContractError: `out` is not a tensor of real numbers, or its shape is not that of `exact`.
        TypeError: an argument is of another type.
        ValueError: `exact` or a rounding is not in float64, not finite, of another shape, or there is none.
    """
    __tracebackhide__ = True
    _require_result(out, exact, name)
    variances = _variances(roundings, exact)
    total = sum(variances, torch.zeros_like(exact))
    tau = total.sqrt().masked_fill_(~exact.isfinite(), 1.0)
    rows = (1, 1, -1, exact.shape[-1] if exact.dim() else 1)
    got = out.detach().to(exact.device)
    got = (got.float() if got.element_size() == 1 else got).reshape(rows)
    expected = Expected(exact.detach().reshape(rows), tau.reshape(rows))
    shown = [one for one, variance in zip(roundings, variances, strict=True) if float((variance / total).nanmean()) > _SHOWN]
    limits = _limits(expected.value, [one.of for one in shown if isinstance(one, Rounded)])
    row = compare_rows("out", "", got, expected, Workload(1), limits)
    place = row.worst[-2] * expected.value.shape[-1] + row.worst[-1]
    row = replace(row, name=name, limits=limits, worst=unraveled(place, exact.shape))
    row = replace(row, passed=row.excess <= 1)
    if not row.passed:
        raise AssertionError(_describe(row, got, expected, out, roundings))
    return row


# -- what is handed in -------------------------------------------------------------------------------------------------


def _require_result(out: object, exact: object, name: str) -> None:
    __tracebackhide__ = True
    if not isinstance(exact, torch.Tensor):
        raise TypeError(f"exact is of type {type(exact).__name__}, expected a float64 tensor")
    if exact.dtype != torch.float64:
        raise ValueError(f"exact is {exact.dtype}, expected torch.float64: compute it from inputs.double()")
    if not exact.numel() or bool(exact.isnan().all()):
        raise ValueError(f"exact of shape {tuple(exact.shape)} has no number, so nothing can be judged")
    if not isinstance(out, torch.Tensor) or out.is_complex() or out.dtype == torch.bool:
        kind = out.dtype if isinstance(out, torch.Tensor) else f"of type {type(out).__name__}"
        raise ContractError(f"{name} is {kind}, expected a tensor of real numbers")
    if out.shape != exact.shape:
        raise ContractError(f"{name} has shape {tuple(out.shape)}, expected that of exact, {tuple(exact.shape)}")


def _variances(roundings: Sequence[Rounded | Quantized | torch.Tensor], exact: torch.Tensor) -> list[torch.Tensor]:
    __tracebackhide__ = True
    if not isinstance(roundings, (list, tuple)) or not roundings:
        raise ValueError('roundings is empty or no list: name where the kernel rounds, as [Rounded("bfloat16", of=exact)]')
    return [_variance(rounding, f"roundings[{at}]", exact) for at, rounding in enumerate(roundings)]


def _variance(rounding: Rounded | Quantized | torch.Tensor, name: str, exact: torch.Tensor) -> torch.Tensor:
    __tracebackhide__ = True
    if not isinstance(rounding, (Rounded, Quantized, torch.Tensor)):
        kind = type(rounding).__name__
        raise TypeError(f"{name} is of type {kind}, expected Rounded(dtype, of), Quantized(step) or a standard error")
    of: object = rounding
    if isinstance(rounding, Rounded):
        dtype_name(rounding.dtype, f"dtype of {name}")
        name, of = f"{name}.of", rounding.of
        if not 0 < rounding.times < math.inf:
            raise ValueError(f"times of {name[:-3]} is {rounding.times!r}, expected a number above 0, as the terms of a sum")
    elif isinstance(rounding, Quantized):
        name, of = f"{name}.step", rounding.step
    is_number = isinstance(rounding, Quantized) and isinstance(of, (int, float))
    if not is_number and getattr(of, "dtype", None) != torch.float64:
        raise ValueError(f"{name} is {getattr(of, 'dtype', type(of).__name__)}, expected a float64 tensor")
    try:
        found = rounding.square() if isinstance(rounding, torch.Tensor) else rounding.variance
        found = found.detach().to(exact.device).expand_as(exact)
    except RuntimeError as error:
        raise ValueError(f"{name} does not broadcast to exact's shape, {tuple(exact.shape)}: {error}") from None
    if bad := int((exact.isfinite() & ~found.isfinite()).sum()):
        raise ValueError(f"{name} is NaN or infinite at {bad:,} elements where exact is finite")
    return found


def _limits(exact: torch.Tensor, rounded: list[torch.Tensor]) -> Limits:
    """Return the limits of a result of rows: a level has the limit of that above it where it has too little to average."""
    limits, _ = limits_named("default")
    row = limits.element if exact.shape[-1] < _SHORT else limits.row
    return Limits(limits.element, row, row if min(map(_values, (exact, *rounded))) < _FEW else limits.head)


def _values(rounded: torch.Tensor) -> float:
    """Return how many magnitudes there are but 0, told apart by 8 bits: the reciprocal of Simpson's index."""
    counts = rounded.detach().abs().bfloat16().view(torch.int16).flatten().int().bincount().double()
    counts[0] = 0
    return float(counts.sum().square() / counts.square().sum().clamp(min=1))


# -- what is said ------------------------------------------------------------------------------------------------------


def _describe(
    row: TensorComparison,
    got: torch.Tensor,
    expected: Expected,
    out: torch.Tensor,
    roundings: Sequence[Rounded | Quantized | torch.Tensor],
) -> str:
    """Return the text of a mismatch, in the words of attention's."""
    lines = describe_row(row, row.name, "", _where(wrong_rows(row, got, expected), out.shape[:-1]), whole="the whole")
    z = residual_over_budget(got.double() - expected.value, expected.tau)
    slopes = head_slopes(z, expected)
    off, error = float(slopes.off), float(slopes.error)
    if abs(off) > CLEAR * error:
        size = f"{abs(off):.2%} too {'large' if off > 0 else 'small'}".replace("%", " %")
        lines.append(labeled("factor", f"{row.name} is {size}: slope {1 + off:.4f} ± {error:.4f}"))
    declared = {dtype_name(one.dtype) for one in roundings if isinstance(one, Rounded)}
    if (own := str(out.dtype).removeprefix("torch.")) in FLOATING_DTYPES.keys() - declared - {"float32"}:
        lines.append(labeled("suggests", f"{row.name} is {own}, and no rounding to it is declared"))
    return "\n".join(lines)


def _where(wrong: torch.Tensor, shape: torch.Size) -> str:
    """Return which rows are wrong, along each dimension but the last."""
    wrong, said = wrong.reshape(shape), []
    for dim, size in enumerate(shape):
        found = wrong.movedim(dim, 0).reshape(size, -1).any(-1).nonzero().flatten().tolist()
        said.append(f"dimension {dim}: {describe_rows(Members(tuple(found), size), size)}")
    return "; ".join(said) or "the only row"
