"""Hold a kernel's tensors against the reference: residual over budget, at three levels, and the usual figures beside it.

z = (tensor - exact) / tau is dimensionless. A fault-free kernel's z looks the same for every shape, dtype and value scale,
and each kind of fault shows at its own level: one wrong element (max |z|), one wrong key or row (RMS of z over a row), a
small error everywhere (RMS of z over a head). What is found is a `Comparison`: a row per tensor and distribution of inputs,
and all that explains the first that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from pytest_attn.backends.compiled import Compilation
from pytest_attn.correctness.reference import Expected, Reference, as_compared
from pytest_attn.workloads.parameters import PARAMETERS, is_of_parameter
from pytest_attn.workloads.workload import Workload

# -- limits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The largest |z| of an element, and the largest RMS of z over a row and over a head."""

    element: float
    row: float
    head: float

    def excess(self, element: float, row: float, head: float) -> float:
        """Return how far the worst level is over its limit, as a ratio (at most 1 passes; NaN counts as infinite)."""
        worst = max(element / self.element, row / self.row, head / self.head)
        return math.inf if math.isnan(element) or math.isnan(row) or math.isnan(head) else worst


#: limits by name: (for out, for gradients). The calibration behind them is docs/results/calibration.md.
LIMITS = {
    "default": (Limits(8, 4, 1.5), Limits(8, 4, 1.5)),
    "strict": (Limits(6, 2, 1), Limits(8, 4, 1.5)),
}


def limits_named(name: str) -> tuple[Limits, Limits]:
    """Return limits (out, gradients) by name; raise ValueError for an unknown one."""
    if name not in LIMITS:
        raise ValueError(f"unknown limits {name!r}; known: {', '.join(LIMITS)}")
    return LIMITS[name]


# -- what a comparison says --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorComparison:
    """One tensor of one draw of inputs against the exact one.

    z_element, z_row, z_head: the largest |z| and RMS of z. absmax, mean_abs, mse, relative_l2, cosine: of the residual,
    over elements that are finite in both. alpha: slope of the tensor over the exact one, 1 where it is right.
    worst: index (batch, head, row, dim) of the largest |z|. exceeding: number of elements over the limit.
    wrong_positions: number of elements whose NaN or infinity is not where the exact result has one.
    """

    name: str
    distribution: str
    passed: bool
    z_element: float
    z_row: float
    z_head: float
    absmax: float
    mean_abs: float
    mse: float
    relative_l2: float
    cosine: float
    alpha: float
    elements: int
    exceeding: int
    wrong_positions: int
    worst: tuple[int, ...]
    found: float
    exact: float
    budget: float
    limits: Limits

    @property
    def excess(self) -> float:
        """How far over its limit the worst level is, as a ratio."""
        return math.inf if self.wrong_positions else self.limits.excess(self.z_element, self.z_row, self.z_head)


class Members(NamedTuple):
    """Which of `size` positions of a tensor's dimension hold a fault, in ascending order."""

    found: tuple[int, ...]
    size: int


class Location(NamedTuple):
    """Where the faults of one tensor lie. length: of the sequence, of which a sampled reference looked at fewer rows."""

    rows: Members
    heads: Members
    batches: Members
    length: int


class Hint(NamedTuple):
    """One line that says why a tensor is wrong, or what was noticed beside.

    fault: the identity of what went wrong, of `diagnosis/faults.py`; "" where the line names no fault. label: with which the
    line begins. That is "suggests", "strides" where the way in which tensors lay in memory makes the difference, "state" where
    other calls do, "rerun" where equal calls differ, "ranks" or "left out".
    """

    fault: str
    words: str
    label: str = "suggests"


class Returned(NamedTuple):
    """What a callable returned on one distribution: its tensors by name, in native layout, and what they should have been."""

    distribution: str
    reference: Reference
    tensors: dict[str, torch.Tensor]


class Evidence(NamedTuple):
    """All that a judgment has seen of a callable that is wrong.

    failed: what it returned where a tensor was wrong first. returned: on every distribution. limits: of out and lse, and of
    gradients.
    """

    workload: Workload
    failed: Returned
    returned: Sequence[Returned]
    limits: tuple[Limits, Limits]


@dataclass(frozen=True)
class Mismatch:
    """The first tensor that is wrong: where, and why, most telling first.

    evidence: for a diagnosis; None once there is one, unless it was asked for.
    """

    row: TensorComparison
    location: Location
    hints: tuple[Hint, ...] = ()
    evidence: Evidence | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Comparison:
    """The judgment of one callable on one workload.

    Args:
        workload: its id.
        subject: what reports call the callable.
        tensors: a row per tensor and input distribution.
        is_sampled: only some rows were compared with exact attention, as all would take too long.
        is_approximate: the callable quantizes its inputs, and was compared with exact attention on the quantized ones.
        mismatch: of the first row that did not pass.
        changes: inputs that it changed in place, and by how much at most.
        compilation: what torch.compile took, where the callable was compiled.
        sampled: how many "rows" and "keys" of how many were compared with exact attention, where only some were.
    """

    workload: str
    subject: str
    tensors: tuple[TensorComparison, ...]
    is_sampled: bool = False
    is_approximate: bool = False
    mismatch: Mismatch | None = None
    changes: Mapping[str, float] = field(default_factory=dict)
    compilation: Compilation | None = None
    sampled: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every tensor is within its budget and every input as it was."""
        return not self.changes and all(tensor.passed for tensor in self.tensors)

    @property
    def faults(self) -> tuple[str, ...]:
        """The identities of the faults that explain the first tensor that is wrong, most telling first."""
        hints = self.mismatch.hints if self.mismatch else ()
        return tuple(dict.fromkeys(hint.fault for hint in hints if hint.fault))

    @property
    def changed(self) -> tuple[str, ...]:
        """The inputs that the callable changed in place."""
        return tuple(self.changes)

    @property
    def worst(self) -> TensorComparison:
        """The tensor that comes closest to its limits, or exceeds them most."""
        return max(self.tensors, key=lambda tensor: tensor.excess)

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types only, for reports."""
        tensors = [{**asdict(t), "worst": list(t.worst)} for t in self.tensors]
        return {"workload": self.workload, "subject": self.subject, "passed": self.passed, "tensors": tensors}


# -- comparing ---------------------------------------------------------------------------------------------------------


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
    z = residual / tau
    return torch.where(tau > 0, z, torch.where(residual == 0, 0.0, math.inf))


def _residual(got: torch.Tensor, expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual in float64, zero at non-finite places, and where NaN or infinity is not as expected.

    An exact value beyond the dtype's largest number is expected to be infinite.
    """
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


# -- where it is wrong -------------------------------------------------------------------------------------------------


#: sizes of tiles, after the last full one of which a tail begins
_TILES = (128, 64, 32, 16)


def looked_at(name: str, tensor: torch.Tensor, expected: Expected, workload: Workload) -> torch.Tensor:
    """Return those rows of a native result, heads-first, which the reference has."""
    got = as_compared(name, tensor.detach(), workload)
    return got if expected.rows is None else got[:, :, expected.rows.to(got.device)]


def wrong_rows(row: TensorComparison, got: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Return (batch, heads, rows): True where a row of a heads-first tensor holds a fault."""
    value = expected.value
    if row.wrong_positions:
        rounded = value.to(got.dtype)
        wrong = ~((got.isfinite() & rounded.isfinite()) | (got == rounded))
        return wrong.any(-1) if wrong.dim() == 4 else wrong
    if row.name in ("lse", "max"):
        return (got.double() - value).abs() > row.budget
    z = residual_over_budget(got.double() - value, expected.tau)
    bad = (z.abs().amax(-1) > row.limits.element) | (z.square().mean(-1).sqrt() > row.limits.row)
    return bad if bool(bad.any()) else z.square().mean(-1).sqrt() > 1


def location_of(bad: torch.Tensor, sampled: torch.Tensor | None) -> Location:
    """Return where (batch, heads, rows) is True; sampled: the positions of the rows, None where all are there."""
    batch, heads, rows = bad.shape
    positions = bad.any(0).any(0).nonzero().flatten()
    if sampled is not None:
        positions = sampled.to(positions.device)[positions]
    at_heads = bad.any(-1).any(0).nonzero().flatten().tolist()
    at_batches = bad.any(-1).any(-1).nonzero().flatten().tolist()
    return Location(
        rows=Members(tuple(positions.tolist()), rows),
        heads=Members(tuple(at_heads), heads),
        batches=Members(tuple(at_batches), batch),
        length=rows if sampled is None else int(sampled[-1]) + 1,
    )


def describe_rows(members: Members, length: int) -> str:
    """Describe which rows are wrong: all, one, a tail after the last full tile, every n-th, a range, or their number."""
    rows, looked_at = members
    of = f"of {length}" if looked_at == length else f"of {looked_at} looked at"
    if len(rows) == looked_at:
        return f"all {looked_at}"
    if len(rows) == 1:
        return f"only {rows[0]} {of}" + (" (the last)" if rows[0] == length - 1 else "")
    is_range = looked_at == length and rows == tuple(range(rows[0], rows[-1] + 1))
    for tile in _TILES:
        if is_range and rows[-1] == length - 1 and rows[0] == length // tile * tile and length % tile:
            return f"{rows[0]} to {rows[-1]} {of}, the tail after the last full tile of {tile}"
        residues = {row % tile for row in rows}
        if len(residues) == 1 and len(rows) >= 2 and not is_range:
            return f"{len(rows)} {of}, every one at {residues.pop()} modulo {tile}"
    if is_range:
        return f"{rows[0]} to {rows[-1]} {of}"
    return f"{len(rows)} {of}, first {rows[0]}, last {rows[-1]}"
