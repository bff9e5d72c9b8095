"""Invariants that may end CUDA, asked in a process that may be lost: the test once more, which asks nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pytest_attn.backends.subject import Subject
from pytest_attn.cases.run import CaseRun
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.invariants.check import Names
from pytest_attn.invariants.registry import chosen
from pytest_attn.invariants.report import Finding, InvariantReport, Outcome
from pytest_attn.session.child import Child
from pytest_attn.session.items import name_for_processes
from pytest_attn.session.processes import asked_apart

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours
#: in place of an outcome, as long as there is none
_BEGUN: Any = "begun"
#: kinds of devices on which a kernel may take all that comes after with it
_APART_ON = frozenset(("cuda",))


def names_apart(spec: CheckSpec, only: Names, skip: Names, thorough: bool) -> tuple[str, ...]:
    """Return which of the chosen invariants are asked in another process: none where nothing else is chosen."""
    wanted = chosen(only, skip, thorough)
    risky = tuple(one.name for one in wanted if one.may_end_cuda and spec.device.type in _APART_ON)
    return risky if len(risky) < len(wanted) else ()


def findings_apart(run: CaseRun, subject: Subject, names: Sequence[str]) -> tuple[Finding, ...]:
    """Ask these invariants in another process, where there are any.

    One during which the process ended is broken. One that it was not asked is not applicable: the test did not come so far.
    """
    if not names:
        return ()
    said, last_words = asked_apart(run.item.config, name_for_processes(run.item), names)
    mine = [line for line in said if line.get("subject") == subject.name]
    found = {line["invariant"]: Finding(line["invariant"], line["outcome"], line["evidence"], line["calls"]) for line in mine}
    if all(line["outcome"] == _BEGUN for line in mine):
        outcome: Outcome = "broken" if mine else "not applicable"
        text = f"asked in a process of its own, which {'it ended' if mine else 'did not come so far'}: {last_words}"
        return tuple(Finding(name, outcome, text, 0) for name in names)
    return tuple(found[name] for name in names)


def judge_apart(child: Child, subject: Subject, judged: Callable[[Sequence[str]], InvariantReport]) -> InvariantReport:
    """Ask what the process that waits for this one wants to know, and hand it over. judged: asks invariants by their names."""
    for name in child.asked:
        child.hand_over({"subject": subject.name, **asdict(Finding(name, _BEGUN, "", 0))})
    report = judged(child.asked)
    for finding in report.findings:
        child.hand_over({"subject": subject.name, **asdict(finding)})
    return report
