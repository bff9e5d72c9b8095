"""Invariants that may end CUDA, run in a process that may be lost: the test once more, which runs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pytest_attn.backends.subject import Subject
from pytest_attn.cases.run import CaseRun
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.invariants.check import Names
from pytest_attn.invariants.registry import chosen
from pytest_attn.invariants.report import Finding, InvariantReport
from pytest_attn.session.kinds import name_for_processes
from pytest_attn.session.session import WorkerContext
from pytest_attn.session.worker_pool import Isolated, run_isolated

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours
#: in place of an outcome, as long as there is none
_BEGUN: Any = "begun"
#: kinds of devices on which a kernel may take all that comes after with it
_ISOLATED_ON = frozenset(("cuda",))


def divided(run: CaseRun, spec: CheckSpec, only: Names, skip: Names) -> tuple[list[str], list[str]]:
    """Return which of the chosen invariants run here, and which in another process: none if these are all."""
    wanted = chosen(only, skip, run.session.settings.thorough)
    may_be_isolated = not run.executor.is_expendable and spec.device.type in _ISOLATED_ON
    isolated = [one.name for one in wanted if may_be_isolated and one.may_end_cuda]
    here = [one.name for one in wanted if one.name not in isolated]
    return (here, isolated) if here else (isolated, [])


def findings_isolated(run: CaseRun, subject: Subject, names: Sequence[str]) -> tuple[Finding, ...]:
    """Ask these invariants in another process, where there are any.

    One during which the process ended is broken. One that was not run is not applicable: the test did not come so far, or
    this process has left it too little memory.
    """
    if not names:
        return ()
    _leave_memory(run)
    isolated = run_isolated(run.item.config, name_for_processes(run.item), names)
    mine = {line["invariant"]: line for line in isolated.results if line.get("subject") == subject.name}
    return tuple(_finding(name, mine.get(name), isolated) for name in names)


def _finding(name: str, line: dict[str, Any] | None, isolated: Isolated) -> Finding:
    """Return the finding of an invariant. line: the last that was reported about it."""
    if line is None or (line["outcome"] == _BEGUN and isolated.is_well):
        return Finding(name, "not applicable", f"not run in a process of its own: {isolated.last_words}", 0)
    if line["outcome"] == _BEGUN:
        evidence = f"the process of its own ended while it ran: {isolated.last_words}"
        line = {**line, "outcome": "broken", "evidence": evidence}
    if line["outcome"] == "broken" and "out of memory" in line["evidence"]:
        return Finding(name, "not applicable", f"not run in a process of its own: {line['evidence']}", 0)
    return Finding(name, line["outcome"], line["evidence"], line["calls"])


def _leave_memory(run: CaseRun) -> None:
    """Give back what this process holds of the GPU's memory and does not use."""
    import torch

    if run.machine.kind == "cuda":
        torch.cuda.empty_cache()


def judge_isolated(
    worker: WorkerContext, subject: Subject, judged: Callable[[Sequence[str], Callable[[str], None]], InvariantReport]
) -> InvariantReport:
    """Ask what the process that waits for this one wants to know, and hand it over.

    judged: asks invariants by their names, and says of each that it begins.
    """

    def begin(name: str) -> None:
        worker.return_result({"subject": subject.name, **asdict(Finding(name, _BEGUN, "", 0))})

    report = judged(worker.selected_invariants, begin)
    for finding in report.findings:
        worker.return_result({"subject": subject.name, **asdict(finding)})
    return report
