"""`attn.check`, `attn.assert_close` and `attn.check_invariants`: judge, and let the outcome end the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pytest_attn.backends.known_defect import KnownDefect
from pytest_attn.backends.subject import Subject
from pytest_attn.cases.apart import divided, findings_apart, judge_apart
from pytest_attn.cases.run import CaseRun
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import judge, judge_output
from pytest_attn.correctness.reference import Reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.invariants.check import Names, judge_invariants
from pytest_attn.invariants.report import Finding, InvariantReport
from pytest_attn.latency.peak import measured_peak
from pytest_attn.messages import invariants, mismatch
from pytest_attn.verdict import Cause, Verdict

if TYPE_CHECKING:
    import torch


def check(
    run: CaseRun, subject: Subject, spec: CheckSpec, located: Callable[[Comparison], Comparison] | None = None
) -> Comparison:
    """Compare a subject with exact attention; return the comparison if it passed, else end the test.

    located: says more about where a fault lies, from what the judgment has seen.
    """
    __tracebackhide__ = True
    references, deadline = run.session.references, run.deadline(subject)
    saver, outcome = run.saver(subject, spec), run.outcome

    def judged() -> Comparison:
        __tracebackhide__ = True
        return judge(subject, spec, references, deadline)

    with measured_peak(spec.device) as peak:
        comparison = run.judged("checking", subject, spec, "check", judged)
    defects = _shown_by_checks(run.defects_of(subject), spec)
    if comparison.passed:
        unshown = "; ".join(f"{d.issue} did not show: {d.summary}" for d in defects)
        cause = Cause.DEFECT_NOT_SHOWN.value if defects else ""
        outcome.record(subject, Verdict.PASSED, comparison, reason=unshown, cause=cause, memory=peak.bytes)
        return comparison
    if known := [d for d in defects if d.explains(comparison, run.workload)]:
        outcome.xfail(subject, _describe_defects(known), comparison)
    comparison = diagnose(comparison, spec.diagnosis_timeout, keep_evidence=saver is not None or located is not None)
    comparison = located(comparison) if located else comparison
    outcome.record(subject, Verdict.MISMATCH, comparison, memory=peak.bytes)
    outcome.fail(mismatch.describe(comparison), partial(saver.save, comparison=comparison) if saver else None)


def check_output(run: CaseRun, out: torch.Tensor, spec: CheckSpec, reference: Reference) -> None:
    """Compare one output that a test computed itself; end the test where it is wrong."""
    __tracebackhide__ = True
    saver, outcome = run.saver(None, spec), run.outcome
    broken = None
    try:
        comparison = judge_output(out, spec, reference)
    except ContractError as error:
        broken = error
    if broken is not None:
        outcome.record("out", Verdict.MISMATCH, reason=str(broken).splitlines()[0])
        run.fail_of_contract(broken, None, spec)
    comparison = diagnose(comparison, spec.diagnosis_timeout, keep_evidence=saver is not None)
    outcome.record("out", Verdict.PASSED if comparison.passed else Verdict.MISMATCH, comparison)
    if not comparison.passed:
        outcome.fail(mismatch.describe(comparison), partial(saver.save, comparison=comparison) if saver else None)


def check_invariants(run: CaseRun, subject: Subject, spec: CheckSpec, only: Names, skip: Names) -> InvariantReport:
    """Ask a subject every invariant; return the report of one that keeps them, and end the test of another."""
    __tracebackhide__ = True
    references, deadline, thorough = run.session.references, run.deadline(subject), run.session.settings.thorough
    outcome, child = run.outcome, run.session.child
    is_apart = child is not None and bool(child.asked)
    here, apart = divided(run, spec, only, skip)

    def ask(names: Names, begin: Callable[[str], None] = lambda name: None) -> InvariantReport:
        __tracebackhide__ = True
        return judge_invariants(subject, spec, references, names, None, thorough, deadline, begin)

    def judged() -> InvariantReport:
        __tracebackhide__ = True
        if child is not None and is_apart:
            return judge_apart(child, subject, ask)
        report = ask(here)
        return replace(report, findings=(*report.findings, *findings_apart(run, subject, apart)))

    report = run.judged("trying the invariants of", subject, spec, "invariants", judged)
    if is_apart:
        return report
    if not report.applied:
        reasons = "; ".join(f"{finding.invariant} {finding.evidence}" for finding in report.findings)
        outcome.skip(subject, f"no invariant that was asked for applies: {reasons}", "invariants")
    if report.passed:
        outcome.record(subject, Verdict.HELD, question="invariants", reason="; ".join(report.notes))
        return report
    broken = sorted({finding.invariant for finding in report.broken})
    if known := _breaking(list(run.defects_of(subject)), report.broken):
        outcome.xfail(subject, _describe_defects(known), question="invariants")
    outcome.record(subject, Verdict.BROKEN, question="invariants", reason=", ".join(broken))
    width, saver = invariants.LABEL_WIDTH, run.saver(subject, spec)
    save = partial(saver.save, broken=tuple(broken), width=width) if saver else None
    outcome.fail(invariants.describe(report), save, width)


def spec_with(spec: CheckSpec, backward: bool) -> CheckSpec:
    """Return the spec with or without gradients."""
    return spec if spec.backward == backward else replace(spec, backward=backward)


# -- known defects -------------------------------------------------------------------------------------------------------


def _shown_by_checks(defects: Iterable[KnownDefect], spec: CheckSpec) -> list[KnownDefect]:
    """List those that a check may show: not what takes the other calls of an invariant."""
    shown = (d for d in defects if (d.tensors or d.changes_input) and not d.invariants)
    return [d for d in shown if d.inputs is None or d.inputs in spec.inputs]


def _breaking(defects: Sequence[KnownDefect], broken: Iterable[Finding]) -> list[KnownDefect]:
    """List those that together explain every broken invariant; none, where one is left."""
    explaining = [[d for d in defects if d.breaks(one.invariant, one.evidence)] for one in broken]
    return [d for d in defects if any(d in some for some in explaining)] if all(explaining) else []


def _describe_defects(defects: Iterable[KnownDefect]) -> str:
    return "; ".join(f"{defect.issue}: {defect.summary}" for defect in defects)
