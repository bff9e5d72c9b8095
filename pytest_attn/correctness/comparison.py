"""What a judgment finds: a row per tensor and distribution of inputs, and all that explains the first that is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_attn.backends.compiled import Compilation
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.reference import Reference

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


class Suggestion(NamedTuple):
    """One thing that a pattern of faults suggests: its kind, and the facts by which its words are filled in.

    The kinds and their words are in messages/mismatch.py.
    """

    kind: str
    facts: Mapping[str, object]


class Evidence(NamedTuple):
    """The inputs on which a tensor was wrong first, the exact results, and all that the kernel returned, in native layout."""

    distribution: str
    reference: Reference
    results: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Mismatch:
    """The first tensor that is wrong: where, what that suggests, and what else was noticed.

    notes: (what, text): how the tensors lay in memory, or what happened between two calls, where that makes the difference.
    evidence: where it was asked for.
    """

    row: TensorComparison
    location: Location
    suggestions: tuple[Suggestion, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
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
