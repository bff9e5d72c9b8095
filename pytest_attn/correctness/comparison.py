"""What a judgment finds: a row per tensor and distribution of inputs, and all that explains the first that is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_attn.backends.compiled import Compilation
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.reference import Reference
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


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
