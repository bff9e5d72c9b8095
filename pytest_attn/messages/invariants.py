"""How broken invariants read: a line each, with the smallest evidence."""

from __future__ import annotations

from pytest_attn.invariants.report import InvariantReport
from pytest_attn.messages.lines import labeled

#: characters of the labels, which are names of invariants
LABEL_WIDTH = 12


def describe(report: InvariantReport) -> str:
    """Return the text of a report with broken invariants, "" where none is."""
    broken = report.broken
    if not broken:
        return ""
    plural = "invariants" if len(broken) > 1 else "invariant"
    headline = f"{len(broken)} {plural} broken by {report.subject} ({report.workload})"
    return "\n".join([headline, *(labeled(one.invariant, one.evidence, LABEL_WIDTH) for one in broken)])
