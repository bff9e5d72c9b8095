"""What one judgement leaves behind: builtin types only, so that it travels from an xdist worker on the test report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_attn.correctness.compare import Comparison


@dataclass(frozen=True)
class CaseRecord:
    """One callable or backend on one workload.

    Verdicts: passed, mismatch, known defect, expected, skipped, raised; of invariants held and broken.
    A measurement of latency has a record of its own, with the gate's verdict: passed, regressed, inconclusive, no baseline,
    recorded, untimed.
    """

    test: str
    workload: str
    subject: str
    verdict: str
    backward: bool
    reason: str = ""
    name: str = ""  # of the workload, whatever its dtype
    tensor: str = ""
    distribution: str = ""
    z_element: float | None = None
    z_row: float | None = None
    z_head: float | None = None
    is_sampled: bool = False
    is_approximate: bool = False
    compile_seconds: float | None = None
    graph_breaks: int = 0
    profiles: tuple[dict[str, Any], ...] = ()
    latency: dict[str, Any] | None = None  # of a measurement, whose verdict is the gate's

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
            is_sampled=comparison.is_sampled,
            is_approximate=comparison.is_approximate,
            compile_seconds=comparison.compilation.seconds if comparison.compilation else None,
            graph_breaks=comparison.compilation.graph_breaks if comparison.compilation else 0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types."""
        return asdict(self)


RECORD = pytest.StashKey[list[CaseRecord]]()
