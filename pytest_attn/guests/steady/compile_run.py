"""--attn-compile-only: each kernel of a run is called once per case, so that what it compiles is kept; none is judged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pytest_attn.backends.raised import message_of
from pytest_attn.backends.subject import Subject
from pytest_attn.cases.case_records import fields_of_case
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.evaluator import Evaluator, Refusal
from pytest_attn.cases.judgment import FailureEvidence, Judgment
from pytest_attn.guests.steady.compilations import watching
from pytest_attn.guests.steady.steady_case import called
from pytest_attn.guests.steady.steady_guest import COMPILE_ONLY
from pytest_attn.invariants.invariant import Probe
from pytest_attn.latency.work import PeakMemory
from pytest_attn.reports.lines import count, raised_words
from pytest_attn.reports.records import Record, is_wrong, new_record
from pytest_attn.reports.terminal import Line
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.kinds import id_from_root, parameter_of
from pytest_attn.session.progress import Progress
from pytest_attn.session.selection import SelectedKernels
from pytest_attn.workloads.inputs import draw_inputs

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours
_QUESTION = "compile"
_CALLED = "called once"
_NOT_CALLED = {"verdict": Verdict.SKIPPED.value, "reason": f"not called: {COMPILE_ONLY} calls kernels that are handed to attn"}
_SLOWEST = 5


class CompiledOnly(SelectedKernels):
    """The kernels of the tests, each of which is called once in a case. What follows in a test is not its kernel's doing."""

    untimed_because = judges_nothing = f"{COMPILE_ONLY} calls each kernel once"
    are_tested = False
    section = "attention compiled"

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self._called: set[tuple[str, str, bool]] = set()  # by test, kernel, and whether it was called backward

    @classmethod
    def summary(cls, records: Sequence[Record], verbose: bool) -> Iterator[Line]:
        made = [one for one in records if one["question"] == _QUESTION and one["reason"].startswith(_CALLED)]
        seconds = {one["test"]: one["compile_seconds"] for one in made if one["compile_seconds"] is not None}
        tests, kernels = ({one[key] for one in made} for key in ("test", "subject"))
        words = f"{count(len(tests), 'case')} of {count(len(kernels), 'kernel')} called once"
        yield f"{words}, {len(seconds)} compiled; none was judged", {}
        slowest = sorted(seconds, key=lambda test: -seconds[test])
        yield from ((f"{seconds[test]:7.2f} s  {test}", {}) for test in (slowest if verbose else slowest[:_SLOWEST]))

    def asking(self, evaluator: Evaluator[Any]) -> Evaluator[Any]:
        return evaluator if isinstance(evaluator, Refusal) else CallOnce(evaluator, self._called)

    def settle(self, item: pytest.Item, report: pytest.TestReport, progress: Progress) -> None:
        """Skip a test whose kernels were called, however it went on without their judgment, and one that has called none."""
        made = [one for one in getattr(report, "attn", ()) if one["question"] == _QUESTION]
        if report.when == "call" and report.passed and not made:
            made = [
                new_record(**fields_of_case(parameter_of(item)), test=id_from_root(item), question=_QUESTION, **_NOT_CALLED)
            ]
        if report.when != "call" or not made or any(map(is_wrong, made)):
            return
        path, line, _ = item.location
        telling = max(made, key=lambda one: one["compile_seconds"] or 0.0)
        report.outcome, report.longrepr = "skipped", (path, (line or 0) + 1, f"Skipped: {telling['reason']}")
        report.attn = made  # type: ignore[attr-defined]
        vars(report).pop("wasxfail", None)  # which says that a kernel failed as expected


class CallOnce(Evaluator[Any]):
    """Calls the subject of another evaluator, unless its test has had that called, and judges nothing."""

    question = _QUESTION
    doing = ""  # as a judge is neither needed nor there under torch's FakeTensorMode

    def __init__(self, asked: Evaluator[Any], called_before: set[tuple[str, str, bool]]) -> None:
        self.subject, self.workload, self.on = asked.subject, asked.workload, asked.on
        self._evidence, self._called_before = asked.evidence, called_before

    def judge(self, context: CaseContext) -> Judgment[Any]:
        __tracebackhide__ = True
        known, subject = self._evidence, self.subject
        if not isinstance(known, FailureEvidence) or not isinstance(subject, Subject) or not _is_here(context, subject):
            return Judgment(Verdict.SKIPPED, reason=_NOT_CALLED["reason"])
        spec = known.spec.for_subject(subject)
        this = context.item.nodeid, subject.name, spec.backward
        if this in self._called_before:
            return Judgment(Verdict.SKIPPED, is_recorded=False)
        self._called_before.add(this)
        inputs = draw_inputs(spec.workload, spec.inputs[0], spec.seed, spec.device)
        probe = Probe(subject, spec, inputs, context.deadline(subject))
        peak, start = PeakMemory(spec.device), time.perf_counter()
        with watching() as watch:
            given = probe.handed()
            try:
                with peak:
                    called(probe, given, watch)
            except Exception as error:
                if type(error).__module__.startswith("pytest_attn."):
                    raise
                reason = raised_words(type(error).__name__, message_of(error))
                return Judgment(Verdict.RAISED, reason=reason, error=error)
            made = watch.taken()
        seconds = time.perf_counter() - start
        reason = f"{_CALLED} in {seconds:.2f} s and not judged: {'; '.join(made) or 'nothing compiled'}"
        fields = {"compile_seconds": seconds if made else None, "memory": peak.bytes}
        return Judgment(Verdict.SKIPPED, reason=reason, fields=fields)


def _is_here(context: CaseContext, subject: Subject) -> bool:
    executor = context.executor.of(subject)
    return not (executor.elsewhere or executor.is_expendable)
