"""Findings of the invariants: one per invariant, and the report of one workload."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pytest_attn.reports.lines import labeled

Outcome: TypeAlias = Literal["passed", "broken", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """One invariant on one workload.

    evidence: where broken, the smallest thing that shows it; where not applicable, the reason; where passed, what is worth
    knowing of it, if anything. calls: of the kernel.
    """

    invariant: str
    outcome: Outcome
    evidence: str
    calls: int


@dataclass(frozen=True)
class InvariantReport:
    """All invariants of one callable on one workload.

    Args:
        workload: its id.
        subject: what reports call the callable.
        findings: one per invariant: passed, broken, or not applicable and why.
    """

    workload: str
    subject: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True where no invariant is broken, be it that none applies."""
        return not self.broken

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings of invariants that do not hold."""
        return tuple(finding for finding in self.findings if finding.outcome == "broken")

    @property
    def applied(self) -> tuple[Finding, ...]:
        """The findings of invariants that could be tried on this workload and device."""
        return tuple(finding for finding in self.findings if finding.outcome != "not applicable")

    @property
    def inapplicable(self) -> tuple[dict[str, str], ...]:
        """The invariants that could not be tried, each with the reason."""
        left_out = (finding for finding in self.findings if finding.outcome == "not applicable")
        return tuple({"invariant": finding.invariant, "reason": finding.evidence} for finding in left_out)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of invariants that hold, or could not be run."""
        told = (one for one in self.findings if one.outcome == "passed" or one.evidence.startswith("not run"))
        return tuple(f"{one.invariant}: {one.evidence}" for one in told if one.evidence)

    @property
    def calls(self) -> int:
        """Number of calls of the kernel, with the plain one that the others are compared with."""
        return 1 + sum(finding.calls for finding in self.findings)


#: characters of the labels, which are names of invariants
INVARIANT_WIDTH = 12


def describe_invariants(report: InvariantReport) -> str:
    """Return the text of a report with broken invariants, "" where none is."""
    broken = report.broken
    if not broken:
        return ""
    plural = "invariants" if len(broken) > 1 else "invariant"
    headline = f"{len(broken)} {plural} broken by {report.subject} ({report.workload})"
    return "\n".join([headline, *(labeled(one.invariant, one.evidence, INVARIANT_WIDTH) for one in broken)])
