"""Findings of a judgment: a row per tensor and distribution of inputs, and all that explains the first that is wrong.

z = (tensor - exact) / tau is dimensionless. A fault-free kernel's z looks the same for every shape, dtype and value scale,
and each kind of fault shows at its own level: one wrong element (max |z|), one wrong key or row (RMS of z over a row), a
small error everywhere (RMS of z over a head), a factor where budgets are wide (the slope of a head over the exact one).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from pytest_attn.backends.subject import Compilation
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.reference import Expected, Reference, as_compared
from pytest_attn.workloads.workload import Workload

# -- what a comparison says --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorComparison:
    """One tensor of one draw of inputs against the exact one.

    z_element, z_row, z_head: the largest |z| and RMS of z. z_slope: the largest |slope - 1| of a head, in units of what
    `head_slopes` allows; slope, slope_error, slope_head: of that head, and its (batch, head).
    absmax, mean_abs, mse, relative_l2, cosine: of the residual, over elements that are finite in both.
    alpha: slope of the tensor over the exact one, 1 where it is right.
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
    z_slope: float = 0.0
    slope: float = 1.0
    slope_error: float = 0.0
    slope_head: tuple[int, ...] = ()

    @property
    def levels(self) -> tuple[float, float, float, float]:
        """Its element, row, head and slope, in the order of `Limits`."""
        return self.z_element, self.z_row, self.z_head, self.z_slope

    @property
    def excess(self) -> float:
        """Ratio of the worst level to its limit."""
        return math.inf if self.wrong_positions else self.limits.excess(*self.levels)


class Members(NamedTuple):
    """Positions that hold a fault, of `size` of a tensor's dimension, in ascending order."""

    found: tuple[int, ...]
    size: int


class Location(NamedTuple):
    """Places of the faults of one tensor. length: of the sequence, of which a sampled reference looked at fewer rows."""

    rows: Members
    heads: Members
    batches: Members
    length: int


class Hint(NamedTuple):
    """One line that says why a tensor is wrong, or what was noticed beside.

    fault: the identity of what went wrong, of `diagnosis/faults.py`; "" where the line names no fault. label: with which the
    line begins. That is "suggests", "strides" where the way in which tensors lay in memory makes the difference, "state" where
    other calls do, "rerun" where equal calls differ, "unread" where a tensor of the case was not asked for, "scope" where it
    may be no attention, "left out", or a guest's word.
    """

    fault: str
    words: str
    label: str = "suggests"


class Returned(NamedTuple):
    """Results of a callable on one distribution: its tensors by name, in native layout, and what they should have been."""

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

    drawn: some of its rows, where none that is wrong is looked at each time: they were drawn for this call, or asked for.
    evidence: for a diagnosis; None once there is one, unless it was asked for.
    """

    row: TensorComparison
    location: Location
    hints: tuple[Hint, ...] = ()
    drawn: tuple[int, ...] = ()
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
        untested: what nothing of this would have shown: options without which exact attention passes as well, and "long sums"
            in a half precision over fewer keys than show it.
        unjudged: gradients of sinks, bias or ALiBi's slopes that were not compared, or rows of dq and dk, each with why:
            "dsinks: ...".
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
    untested: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True where every tensor is within its budget and every input as it was."""
        return not self.changes and all(tensor.passed for tensor in self.tensors)

    @property
    def faults(self) -> tuple[str, ...]:
        """The identities of the faults that explain the first tensor that is wrong, most telling first."""
        if self.mismatch is None:
            return ()
        return tuple(dict.fromkeys(hint.fault for hint in self.mismatch.hints if hint.fault))

    @property
    def drawn(self) -> tuple[int, ...]:
        """Wrong rows that this call alone was asked about, as `Mismatch.drawn`."""
        return self.mismatch.drawn if self.mismatch else ()

    @property
    def changed(self) -> tuple[str, ...]:
        """The inputs that the callable changed in place."""
        return tuple(self.changes)

    @property
    def worst(self) -> TensorComparison:
        """The tensor that comes closest to its limits, or exceeds them most."""
        return max(self.tensors, key=attrgetter("excess"))

    @property
    def reported(self) -> TensorComparison:
        """The tensor that is reported: the first that is over its limits, which a failure is about, else `worst`."""
        return next((tensor for tensor in self.tensors if not tensor.passed), self.worst)

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types only, for reports."""
        tensors = [{**asdict(t), "worst": list(t.worst)} for t in self.tensors]
        return {"workload": self.workload, "subject": self.subject, "passed": self.passed, "tensors": tensors}


# -- where it is wrong -------------------------------------------------------------------------------------------------

#: sizes of tiles, after the last full one of which a tail begins
_TILES = (128, 96, 80, 64, 48, 32, 16)


def looked_at(name: str, tensor: torch.Tensor, expected: Expected, workload: Workload) -> torch.Tensor:
    """Return those rows of a native result, heads-first, which the reference has."""
    got = as_compared(name, tensor.detach(), workload)
    return got if expected.rows is None else got[:, :, expected.rows.to(got.device)]


def wrong_rows(row: TensorComparison, got: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Return (batch, heads, rows): True where a row of a heads-first tensor holds a fault."""
    value = expected.value
    if row.wrong_positions:
        rounded = value.to(got.dtype)
        wrong = ~((got.isfinite() & rounded.isfinite()) | (got == rounded)) & expected.tau.isfinite()
        return wrong.any(-1) if wrong.dim() == 4 else wrong
    if row.name in ("lse", "max"):
        return (got.double() - value).abs() > row.budget
    z = residual_over_budget(got.double() - value, expected.tau)
    bad = (z.abs().amax(-1) > row.limits.element) | (z.square().mean(-1).sqrt() > row.limits.row)
    if bool(bad.any()):
        return bad
    if row.z_head <= row.limits.head and row.z_slope > row.limits.slope:
        steep = head_slopes(z, expected).off.abs() > abs(row.slope - 1) / 2
        return steep.unsqueeze(-1).expand_as(bad)
    return z.square().mean(-1).sqrt() > 1


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
    if looked_at == length and rows == tuple(range(rows[0], rows[-1] + 1)):
        return f"{rows[0]} to {rows[-1]} {of}{_tail(rows[0], length) if rows[-1] == length - 1 else ''}"
    for tile in _TILES:
        if len({row % tile for row in rows}) == 1:
            return f"{len(rows)} {of}, every one at {rows[0] % tile} modulo {tile}"
    return f"{len(rows)} {of}, first {rows[0]}, last {rows[-1]}"


def _tail(start: int, length: int) -> str:
    """Return of which tiles rows up to the last are the tail; no size where several sizes have that tail."""
    tiles = [tile for tile in _TILES if length % tile and start == length // tile * tile]
    return "" if not tiles else ", the tail" + (f" after the last full tile of {tiles[0]}" if len(tiles) == 1 else "")


def residual_over_budget(residual: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Return z: 0 where nothing is off, whatever may be, as of gradients of a dout that holds NaN."""
    return (residual / tau).masked_fill_(residual == 0, 0.0)


class HeadSlopes(NamedTuple):
    """Slopes of heads over the exact ones, all (batch, heads).

    off: slope - 1, 0 where nothing is known of it. error: its standard error. allowed: what |off| may be.
    """

    off: torch.Tensor
    error: torch.Tensor
    allowed: torch.Tensor


#: One rounding to bfloat16 at most. Where a kernel cuts off P, or all P of a row round alike, it is a factor of a whole head.
#: In half precision and float32 a factor below it shows in the RMS of z over a head.
_SLOPE_BIAS = 2.0**-8
#: standard errors by which a slope may be off beside
_SLOPE_ERRORS = 5.0
#: half a step of numbers in standard errors of rounding to them, and the mean x^2 of a head below which some are such steps
_HALF_STEP, _FEW_STEPS = 3**0.5, 200.0


def head_slopes(z: torch.Tensor, expected: Expected) -> HeadSlopes:
    """Return the slope of each head over the exact one by weighted least squares, with weights 1 / tau^2.

    With x the exact value in budgets, off = sum(z x) / sum(x^2). Its standard error is 1 / sqrt(sum(x^2)) if all errors are
    independent. Those of a row may be shared, so it is at least the jackknife's over rows (MacKinnon and White, Some
    heteroskedasticity-consistent covariance matrix estimators, 1985: HC3). Noise of scores moves P by a part of its square
    always in one direction: the mean of 1 / x^2, twice. Up to four steps, as of half precision's smallest number, neighbors
    are rounded in one direction, by at most half of one.

    z and expected: (batch, heads, rows, dim).
    """
    x = (expected.value / expected.tau).nan_to_num_(0, 0, 0)
    overlaps, squares = torch.linalg.vecdot(z, x), torch.linalg.vecdot(x, x)
    total = squares.sum(-1)
    off = (overlaps.sum(-1) / total).nan_to_num_(0, 0, 0)
    left = (overlaps - off.unsqueeze(-1) * squares) / (1 - squares / total.unsqueeze(-1))
    error = total.rsqrt().maximum(left.norm(dim=-1) / total)
    allowed = error.square().mul_(_SLOPE_ERRORS**2).add_(_SLOPE_BIAS**2).sqrt_().add_(2 * x.shape[-2:].numel() / total)
    if bool((total < _FEW_STEPS * x.shape[-2:].numel()).any()):
        below = x.abs().masked_fill_(x.abs() > 8 * _HALF_STEP, 0)
        allowed += _HALF_STEP * below.sum((-2, -1)) / total
    return HeadSlopes(off, error, allowed)
