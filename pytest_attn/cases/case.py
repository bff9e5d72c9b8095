"""What a test touches: `attn`, one case of a marked test, with its tensors and its judgments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any, Literal

import pytest
import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import eager_because
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.streams import leave_memory
from pytest_attn.backends.subject import Dequantizer, Subject
from pytest_attn.cases.conclude import CaseRun, mark_of
from pytest_attn.cases.executor import OnRanks
from pytest_attn.cases.judgment import Evaluator, FailureToSave, Judgment
from pytest_attn.cases.latency import Measuring
from pytest_attn.cases.measurement import Measurement
from pytest_attn.cases.model import ModelEvaluator
from pytest_attn.cases.on_rank import RankCase
from pytest_attn.cases.records import figures_of, z_property
from pytest_attn.cases.tensors import CaseTensors
from pytest_attn.correctness import mismatch_text
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.judge import judge, judge_output
from pytest_attn.correctness.reference import Reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.models.check import Target, module_step
from pytest_attn.guests.models.comparison import ModelComparison
from pytest_attn.guests.ranks.rank_server import rank_of
from pytest_attn.invariants.check import Names, chosen, judge_invariants
from pytest_attn.invariants.report import INVARIANT_WIDTH, Finding, InvariantReport, describe_invariants
from pytest_attn.isolation.function import isolated_of
from pytest_attn.latency.profiler import Profile, answers_to, may_answer, profile_subject
from pytest_attn.latency.result import Latency
from pytest_attn.latency.work import direction_of, measured_peak
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.session.kinds import CaseParameter, name_for_processes, test_of
from pytest_attn.session.session import WorkerContext, session_of
from pytest_attn.session.worker_pool import Isolated, run_isolated
from pytest_attn.workloads.sharding import Sharding

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


def make_case(request: pytest.FixtureRequest, parameter: CaseParameter) -> AttentionCase | RankCase:
    """Make the case of a kernel's test; skips the test where it cannot run, or need not any more.

    On a rank it is the rank's part, in the process that judges what the ranks compute one whose callables run there.
    """
    __tracebackhide__ = True
    item: pytest.Item = request.node
    session = session_of(item.config)
    if rank := rank_of(request.config):
        return RankCase(rank, parameter, mark_of(item, session), session)
    if parameter.backend and (reason := session.kernels.skipped_because(test_of(item), parameter.backend)):
        pytest.skip(reason)
    if parameter.ranks and session.kernels.are_tested:
        mark = mark_of(item, session)
        executor = OnRanks(item, Sharding(parameter.workload, mark.shard, parameter.ranks), mark.device, session)
        request.addfinalizer(executor.finish)
        run = CaseRun(request, parameter, mark, session, executor)
        if reason := executor.skip_reason():
            run.skip(None, reason)
    else:
        run = CaseRun.of_item(request, parameter)
    run.skip_unless_runnable(run.backend)
    return AttentionCase(run)


class AttentionCase(CaseTensors):
    """One workload, on one device, with one backend where the test takes one.

    Tensors (q, k, v, bias, ...) are those of the first input distribution, in the layout that the marker names. `check`
    draws every distribution anew and hands each callable its own copy.
    """

    def __init__(self, run: CaseRun) -> None:
        super().__init__(run.workload, run.mark, run.session, run.executor)
        self._run = run
        self._checked: Subject | None = None
        self._comparison: Comparison | None = None
        self._measuring = Measuring(self._run)

    @property
    def backend(self) -> Backend | None:
        """The backend of the case, None where the test takes none."""
        self._looked_at.add("backend")
        return self._run.backend

    def check(
        self, fn: Callable[..., Any] | Backend | str, name: str | None = None, dequantized: Dequantizer | None = None
    ) -> Comparison:
        """Hold `fn` against exact attention on every input distribution of the marker.

        Skips the test where a backend cannot take the case or fn declines it; expects its failure (xfail) where a known defect
        of the backend explains all that is wrong.

        Args:
            fn: a callable of (q, k, v), the backend of the case, or a backend's name.
            name: what reports call a callable, by default its qualified name with what it closes over.
            dequantized: of a callable that quantizes inside, a function of (q, k, v) that returns what it makes of them, as
                float tensors: exact attention is that of these values.

        Returns:
            The comparison of an fn that is right.

        Raises:
            AssertionError: fn is wrong; the text is the diagnosis, with the command that repeats the case.
            TypeError: fn is none of the three.
            ValueError: no backend has the name.
        """
        __tracebackhide__ = True
        run = self._run
        subject = run.place(run.subject(fn, name, self._spec, dequantized=dequantized))
        self._checked, self._comparison = subject, None
        comparison = self._comparison = run.conclude(KernelEvaluator(run, subject, self._spec))
        run.executor.leave(comparison)
        return comparison

    def check_invariants(
        self,
        fn: Callable[..., Any] | Backend | str,
        only: Iterable[str] | str | None = None,
        skip: Iterable[str] | str | None = None,
        name: str | None = None,
        dequantized: Dequantizer | None = None,
    ) -> InvariantReport:
        """Check what holds of every attention kernel: poisoned memory, odd strides, leaks, reruns, state, equivalences.

        Skips the test where no invariant applies, or fn declines the case itself; an invariant whose variant fn declines does
        not apply. Expects the failure (xfail) where a known defect explains what is broken.

        Args:
            fn: as for `check`.
            only: names of the invariants to run (docs/reference/invariants.md).
            skip: names of invariants to leave out.
            name: as for `check`.
            dequantized: as for `check`.

        Returns:
            The report of an fn that breaks none.

        Raises:
            AssertionError: an invariant is broken; the text is the smallest evidence.
            ValueError: no invariant has the name, or none is left.
        """
        __tracebackhide__ = True
        run = self._run
        subject = run.place(run.subject(fn, name, self._spec, dequantized=dequantized))
        report = run.conclude(InvariantEvaluator(run, subject, self._spec, only, skip))
        run.executor.leave(report)
        return report

    def check_module(
        self,
        module: torch.nn.Module,
        inputs: Any = None,
        backend: Target | None = None,
        *,
        functions: Iterable[Callable[..., Any] | str] = (),
        scatter: int = 4,
    ) -> ModelComparison:
        """Call one attention layer, and judge what its attention core gets and returns, as `attn_model.check_module` does.

        Hidden states that are drawn have the workload's batch and q_len; heads, mask and dtype are the module's own.
        """
        __tracebackhide__ = True
        step = module_step(module, inputs, (self._workload.batch, self._workload.q_len))
        return self._run.conclude(ModelEvaluator(self._run, module, step, backend, functions, scatter))

    def measure(
        self, fn: Callable[..., Any] | Backend | str, backward: bool | Literal["both"] = False, name: str | None = None
    ) -> Latency:
        """Check `fn`, time it, and compare its p50 with the baseline of this machine.

        Skips the test where nothing can be timed, where nothing can be decided, and where `check` would.

        Args:
            fn: as for `check`.
            backward: False times the forward pass as in inference, True the backward pass alone, "both" one after the other.
            name: as for `check`; it also names the baseline of a callable.

        Returns:
            The latency, in seconds; its `verdict` is "passed", "inconclusive", "no baseline" or "recorded".

        Raises:
            AssertionError: fn is wrong, left results that are not those of its data when called again, or became slower, less
                accurate or larger in memory than recorded.
            ValueError: `backward` is none of the three.
        """
        __tracebackhide__ = True
        direction, needs_gradients = direction_of(backward), self._mark.backward or bool(backward)
        run, measuring = self._run, self._measuring
        subject = run.subject(fn, name, self._spec, backward=bool(backward))
        measuring.prepare(self._spec.device)
        subject = run.place(subject)
        if measuring.mode.checks_first and not self._is_checked(subject, needs_gradients):
            self._checked, self._comparison = subject, None
            self._comparison = run.conclude(KernelEvaluator(run, subject, spec_with(self._spec, needs_gradients)))
        known = run.session, run.item, self._spec, subject, direction, self._comparison
        latency = measuring.measure(Measurement(*known, number=1, place=run.timing(subject)))
        run.executor.leave(latency)
        return latency

    def assert_close(self, out: torch.Tensor) -> None:
        """Compare an output that the test computed from attn.q, attn.k and attn.v with the reference.

        Args:
            out: (batch, heads, q_len, v_head_dim) in the marker's layout, of the workload's dtype.

        Raises:
            AssertionError: out is wrong; the text is the diagnosis.
        """
        __tracebackhide__ = True
        if not self._executor.is_here:
            raise ValueError(
                "a test with ranks compares with attn.check(fn); leave out ranks to compare an output of one process"
            )
        self._run.conclude(OutputEvaluator(self._run, out, self._spec, self._reference))

    def assert_launched(self, *words: str, fn: Callable[..., Any] | Backend | str | None = None) -> list[Profile]:
        """Assert that `fn` launches a kernel that answers to all of `words`; copies and elementwise kernels do not count.

        Args:
            words: parts of what --attn-profile prints or of the kernel's symbol, whatever the case: "sm90", "flash".
            fn: by default what `check` was last given.

        Returns:
            The profile of each direction that ran.

        Raises:
            AssertionError: no such kernel ran; the text lists what did.
            ValueError: no word was given, or nothing was checked yet.
        """
        __tracebackhide__ = True
        if not self._session.kernels.are_tested:
            return []
        if not words or not all(isinstance(word, str) and word.strip() for word in words):
            raise ValueError(f'assert_launched needs words: attn.assert_launched("sm90", "flash"), got {words!r}')
        subject = self._checked if fn is None else self._run.subject(fn, None, self._spec)
        if subject is None:
            raise ValueError("assert_launched needs a callable: call attn.check(fn) first, or say fn=...")
        return self._run.conclude(LaunchEvaluator(self._run, subject, self._spec, words))

    @property
    def is_judged(self) -> bool:
        """Whether the test has judged something, or tried to."""
        return self._run.is_judged

    # -- details -------------------------------------------------------------------------------------------------------

    def _is_checked(self, subject: Subject, backward: bool) -> bool:
        """Whether the test has just checked the same subject, with gradients if they are needed."""
        has_gradients = self._mark.backward or not backward
        return self._comparison is not None and has_gradients and subject == self._checked


def backend_of(case: AttentionCase) -> Backend:
    """Return the backend of a case whose test takes one; which does not count as a look at the case."""
    run: CaseRun | None = getattr(case, "_run", None)
    backend = run.backend if run else case.backend  # a rank has no run
    assert backend is not None
    return backend


# -- how a kernel is judged ----------------------------------------------------------------------------------------------


class KernelEvaluator(Evaluator[Comparison]):
    """Holds a subject against exact attention on every input distribution."""

    def __init__(self, run: CaseRun, subject: Subject, spec: CheckSpec) -> None:
        self.subject: Subject = subject
        self._run, self._spec, self.workload = run, spec, run.workload
        self.doing, self.on = f"checking {subject.name}", run.workload.id
        self.evidence: FailureToSave = FailureToSave(spec, subject)

    def judge(self) -> Judgment[Comparison]:
        __tracebackhide__ = True
        run, subject, spec = self._run, self.subject, self._spec
        with measured_peak(spec.device) as peak:
            comparison = judge(subject, spec, run.session.references, run.deadline(subject))
        fields, properties = {**figures_of(comparison), "memory": peak.bytes}, z_property(comparison, subject)
        defects = _shown_by_checks(run.defects_of(subject), spec)
        if comparison.passed and run.session.settings.profile:
            try:
                fields["profiles"] = tuple(one.to_dict() for one in profiles_of(run, subject, spec, with_ceilings=True))
            except Exception as error:
                reason = f"while it was profiled, {type(error).__name__}: {error}".splitlines()[0]
                return Judgment(Verdict.RAISED, reason=reason, error=error, fields=fields, properties=properties)
        if comparison.passed:
            said = [f"{defect.issue} did not show: {defect.summary}" for defect in defects] or [eager_because()]
            fields["cause"] = Cause.DEFECT_NOT_SHOWN.value if defects else ""
            reason = "; ".join(filter(None, said))
            return Judgment(Verdict.PASSED, comparison, reason, fields=fields, properties=properties)
        known = _described(defect for defect in defects if defect.explains(comparison, run.workload))
        if not known:
            sharding = None if run.executor.is_here else run.executor.sharding
            comparison = run.diagnosed(subject.name, comparison, sharding)
            fields["faults"] = comparison.faults
        return Judgment(
            Verdict.MISMATCH,
            reason=mismatch_text.headline(comparison),
            text=mismatch_text.describe(comparison),
            known_defects=known,
            fields=fields,
            properties=properties,
            evidence=replace(self.evidence, comparison=comparison),
        )


class OutputEvaluator(Evaluator[None]):
    """Holds one output that a test computed itself against the reference."""

    subject, doing = "out", "comparing out"

    def __init__(self, run: CaseRun, out: torch.Tensor, spec: CheckSpec, reference: Reference) -> None:
        self._run, self._out, self._spec, self._reference = run, out, spec, reference
        self.workload, self.on = run.workload, run.workload.id
        self.evidence: FailureToSave = FailureToSave(spec, None)

    def judge(self) -> Judgment[None]:
        reference = self._run.session.references.after_call(self._reference)
        comparison = judge_output(self._out, self._spec, reference)
        facts: Any = {"fields": figures_of(comparison), "properties": z_property(comparison, "out")}
        if comparison.passed:
            return Judgment(Verdict.PASSED, **facts)
        comparison = self._run.diagnosed("out", comparison)
        facts["fields"] = figures_of(comparison)
        text, evidence = mismatch_text.describe(comparison), replace(self.evidence, comparison=comparison)
        return Judgment(Verdict.MISMATCH, reason=mismatch_text.headline(comparison), text=text, evidence=evidence, **facts)


class InvariantEvaluator(Evaluator[InvariantReport]):
    """Tries what must hold of a subject without a tolerance; some of it in another process, which CUDA may be lost in."""

    question, wrong = "invariants", Verdict.BROKEN

    def __init__(self, run: CaseRun, subject: Subject, spec: CheckSpec, only: Names, skip: Names) -> None:
        self.subject: Subject = subject
        self._run, self._spec, self.workload = run, spec, run.workload
        is_expendable = run.executor.is_expendable or isolated_of(subject) is not None
        self._here, self._isolated = divided(run, spec, only, skip, is_expendable)
        self.doing, self.on = f"trying the invariants of {subject.name}", run.workload.id
        self.evidence: FailureToSave = FailureToSave(spec, subject)

    def judge(self) -> Judgment[InvariantReport]:
        __tracebackhide__ = True
        worker = self._run.session.worker
        if worker is not None and worker.selected_invariants:  # the process that waits for this one concludes
            return Judgment(Verdict.HELD, judge_isolated(worker, self.subject, self._tried), is_recorded=False)
        report = self._tried(self._here)
        report = replace(report, findings=(*report.findings, *findings_isolated(self._run, self.subject, self._isolated)))
        if not report.applied:
            reasons = "; ".join(f"{finding.invariant} {finding.evidence}" for finding in report.findings)
            return Judgment.refused(self.subject, f"none of the requested invariants applies: {reasons}")
        if report.passed:
            return Judgment(Verdict.HELD, report, "; ".join(filter(None, (*report.notes, eager_because()))))
        broken = tuple(sorted({finding.invariant for finding in report.broken}))
        return Judgment(
            Verdict.BROKEN,
            reason=", ".join(broken),
            text=describe_invariants(report),
            known_defects=_described(_breaking(self._run.defects_of(self.subject), report.broken)),
            evidence=replace(self.evidence, broken=broken),
            width=INVARIANT_WIDTH,
        )

    def _tried(self, names: Names, begin: Callable[[str], None] = lambda name: None) -> InvariantReport:
        __tracebackhide__ = True
        run, subject = self._run, self.subject
        references, thorough, deadline = run.session.references, run.session.settings.thorough, run.deadline(subject)
        total, asked = len(chosen(names, None, thorough)), count()
        with run.session.progress.counting(f"{self.doing} on {self.on}:", total) as progress:

            def begun(name: str) -> None:
                progress(next(asked))
                begin(name)

            return judge_invariants(subject, self._spec, references, names, None, thorough, deadline, begun)


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


def _described(defects: Iterable[KnownDefect]) -> str:
    return "; ".join(f"{defect.issue}: {defect.summary}" for defect in defects)


# -- which kernels are launched: --attn-profile and `attn.assert_launched` ---------------------------------------------


class LaunchEvaluator(Evaluator[list[Profile]]):
    """Whether each direction of a subject launches a kernel that answers to all of some words."""

    def __init__(self, run: CaseRun, subject: Subject, spec: CheckSpec, words: tuple[str, ...]) -> None:
        self.subject: Subject = subject
        self._run, self._spec, self._words, self.workload = run, spec, words, run.workload
        self.doing, self.on = f"profiling {subject.name}", run.workload.id

    def judge(self) -> Judgment[list[Profile]]:
        __tracebackhide__ = True
        profiles = profiles_of(self._run, self.subject, self._spec, with_ceilings=False)
        for profile in profiles:
            if not any(answers_to(self._words, symbol) for symbol in profile.symbols):
                wanted = ", ".join(map(repr, self._words))
                missed = f"no kernel that answers to {wanted} was launched in the {profile.direction} pass"
                ran = [f"  {x.words}: {x.symbol[:120]}" for x in profile.launches if may_answer(x.symbol)]
                text = "\n".join([f"{missed}; these were:", *ran] if ran else [f"{missed}, and none at all"])
                return Judgment(Verdict.MISMATCH, reason=missed, text=text)
        return Judgment(Verdict.PASSED, profiles, is_recorded=False)


def profiles_of(run: CaseRun, subject: Subject, spec: CheckSpec, with_ceilings: bool) -> list[Profile]:
    """Return the profiles of a subject, each direction of which must end in time."""
    __tracebackhide__ = True
    if isolated_of(subject):
        raise ValueError("launches are seen in this process only; leave out --attn-isolated, or attn.assert_launched")
    with run.deadline(subject)():
        return profile_subject(subject, spec, with_ceilings)


#: in place of an outcome, as long as there is none
_BEGUN: Any = "begun"
#: kinds of devices on which a kernel may take all that comes after with it
_ISOLATED_ON = frozenset(("cuda",))


def divided(run: CaseRun, spec: CheckSpec, only: Names, skip: Names, is_expendable: bool) -> tuple[list[str], list[str]]:
    """Return which of the chosen invariants run here, and which in another process: none if these are all.

    is_expendable: whether what computes is in another process already.
    """
    wanted = chosen(only, skip, run.session.settings.thorough)
    may_be_isolated = not is_expendable and spec.device.type in _ISOLATED_ON
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
    leave_memory(torch.device(run.machine.device))
    isolated = run_isolated(run.item.config, name_for_processes(run.item), names)
    mine = {line["invariant"]: line for line in isolated.results if line.get("subject") == subject.name}
    return tuple(_finding(name, mine.get(name), isolated) for name in names)


def _finding(name: str, line: dict[str, Any] | None, isolated: Isolated) -> Finding:
    """Return the finding of an invariant. line: the last that was reported about it."""
    if line is None and isolated.has_left:
        return Finding(name, "broken", f"not run in a process of its own: {isolated.last_words}", 0)
    if line is None or (line["outcome"] == _BEGUN and isolated.is_well):
        return Finding(name, "not applicable", f"not run in a process of its own: {isolated.last_words}", 0)
    if line["outcome"] == _BEGUN:
        evidence = f"the process of its own ended while it ran: {isolated.last_words}"
        line = {**line, "outcome": "broken", "evidence": evidence}
    if line["outcome"] == "broken" and "out of memory" in line["evidence"]:
        return Finding(name, "not applicable", f"not run in a process of its own: {line['evidence']}", 0)
    return Finding(name, line["outcome"], line["evidence"], line["calls"])


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
