"""What one judgement leaves behind: builtin types only, so that it travels from an xdist worker on the test report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_attn.correctness.compare import Comparison

_SHOWN = (
    *("name", "distribution", "passed", "z_element", "z_row", "z_head", "absmax", "mean_abs", "mse", "relative_l2", "cosine"),
    *("worst", "found", "exact", "budget", "wrong_positions"),
)


@dataclass(frozen=True)
class CaseRecord:
    """One callable or backend on one workload, and one question; reports/records.py has what the fields mean."""

    test: str
    workload: str
    subject: str
    verdict: str
    backward: bool
    question: str = "check"  # or "invariants", "latency"
    reason: str = ""
    name: str = ""  # of the workload, whatever its dtype
    group: str = ""
    aliases: tuple[str, ...] = ()
    shape: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    version: str = ""
    direction: str = ""
    tensor: str = ""
    distribution: str = ""
    z_element: float | None = None
    z_row: float | None = None
    z_head: float | None = None
    tensors: tuple[dict[str, Any], ...] = ()
    is_sampled: bool = False
    is_approximate: bool = False
    compile_seconds: float | None = None
    graph_breaks: int = 0
    profiles: tuple[dict[str, Any], ...] = ()
    latency: dict[str, Any] | None = None  # of a measurement, whose verdict is the gate's
    machine: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    line: int = 0
    date: str = ""
    seconds: float = 0.0

    @classmethod
    def from_comparison(cls, comparison: Comparison | None, **known: Any) -> CaseRecord:
        """Add the figures of the comparison's worst tensor, where there is one."""
        if comparison is None:
            return cls(**known)
        worst = comparison.worst
        return cls(
            **known,
            tensor=worst.name,
            distribution=worst.distribution,
            z_element=worst.z_element,
            z_row=worst.z_row,
            z_head=worst.z_head,
            tensors=tuple({name: getattr(row, name) for name in _SHOWN} for row in comparison.tensors),
            is_sampled=comparison.is_sampled,
            is_approximate=comparison.is_approximate,
            compile_seconds=comparison.compilation.seconds if comparison.compilation else None,
            graph_breaks=comparison.compilation.graph_breaks if comparison.compilation else 0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types."""
        return asdict(self)


RECORD = pytest.StashKey[list[CaseRecord]]()
