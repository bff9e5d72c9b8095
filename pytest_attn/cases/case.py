"""What a test touches: `attn`, one case of a marked test, with its tensors and its judgments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial, wraps
from itertools import count
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar

import pytest
import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import compiling_seconds, eager_because
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.streams import leave_memory
from pytest_attn.backends.subject import Dequantizer, Subject
from pytest_attn.cases.case_records import figures_of
from pytest_attn.cases.conclude import conclude, skip, skip_unless_runnable
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.evaluator import Evaluator
from pytest_attn.cases.judgment import FailureEvidence, Judgment
from pytest_attn.cases.latency import Measuring
from pytest_attn.cases.tensors import CaseTensors
from pytest_attn.correctness import mismatch_text
from pytest_attn.correctness.comparison import Comparison, Hint
from pytest_attn.correctness.judge import Kernel, Output
from pytest_attn.correctness.reference import Reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis.diagnose import judged
from pytest_attn.invariants.all_invariants import chosen, judge_invariants
from pytest_attn.invariants.report import INVARIANT_WIDTH, Finding, InvariantReport, describe_invariants
from pytest_attn.latency.profiler import Profile, answers_to, may_answer
from pytest_attn.latency.result import Latency
from pytest_attn.latency.work import PeakMemory, direction_of
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.seam import added
from pytest_attn.session.cover import enough_because
from pytest_attn.session.kinds import CaseParameter, name_for_processes, test_of
from pytest_attn.session.marks import arguments_of_attention
from pytest_attn.session.session import WorkerContext, session_of
from pytest_attn.session.worker_pool import Isolated, run_isolated
from pytest_attn.workloads.fields import did_you_mean, instead_of
from pytest_attn.workloads.parameters import PARAMETERS

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours
#: with which the names of judgments begin
_JUDGES = ("check", "measure", "assert")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _suggests_arguments(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have a method of `attn` answer a wrong argument by what was meant, or by its place in the marker or workload."""
    known = method.__code__.co_varnames[1 : method.__code__.co_argcount + method.__code__.co_kwonlyargcount]

    @wraps(method)
    def called(*args: _P.args, **given: _P.kwargs) -> _T:
        __tracebackhide__ = True
        if len(args) > method.__code__.co_argcount:
            raise TypeError(f"attn.{method.__name__} takes {', '.join(known)}; q, k, v and exact attention are its own")
        for name in given:
            if name not in known:
                is_of_marker = name in [one.name for one in arguments_of_attention()]
                of_marker = f" the marker takes it: @pytest.mark.attention(..., {name}=...);"
                said = of_marker if is_of_marker else instead_of(name, known)
                raise TypeError(f"attn.{method.__name__} has no argument {name!r};{said} it takes {', '.join(known)}")
        return method(*args, **given)

    return called


def make_case(request: pytest.FixtureRequest, parameter: CaseParameter) -> AttentionCase:
    """Make the case of a kernel's test; skips the test where it cannot run, or need not any more."""
    __tracebackhide__ = True
    item: pytest.Item = request.node
    session = session_of(item.config)
    if parameter.backend and (reason := session.kernels.skipped_because(test_of(item), parameter.backend)):
        pytest.skip(reason)
    if reason := enough_because(item, parameter, session):
        pytest.skip(reason)
    return case_of(CaseContext.of_item(request, parameter))


def case_of(context: CaseContext) -> AttentionCase:
    """Return the case of a test; skips the test where its backend cannot take it."""
    __tracebackhide__ = True
    skip_unless_runnable(context, context.backend)
    return AttentionCase(context)


class AttentionCase(CaseTensors):
    """One workload, on one device, with one backend where the test takes one.

    Tensors (q, k, v, bias, ...) are those of the first input distribution, in the layout that the marker names. `check`
    draws every distribution anew and hands each callable its own copy.
    """

    def __init__(self, context: CaseContext) -> None:
        super().__init__(context.workload, context.mark, context.session, context.executor)
        self._context = context
        self._checked: Subject | None = None
        self._comparison: Comparison | None = None
        self._measuring = Measuring(context.item.config)

    def __getattr__(self, name: str) -> Any:
        """Return a method or an attribute that a guest adds."""
        __tracebackhide__ = True
        methods, attributes = added("methods"), added("attributes")
        if name in methods:
            return partial(resolve_name(methods[name]), self)
        if name in attributes:
            return resolve_name(attributes[name])(self)
        known = sorted(one for one in (*dir(type(self)), *methods, *attributes) if not one.startswith("_"))
        judgments = ", ".join(one for one in known if one.startswith(_JUDGES))
        said = did_you_mean(name, known) or f" its judgments are {judgments}"
        raise AttributeError(f"attn has no attribute {name!r};{said}")

    @property
    def backend(self) -> Backend | None:
        """The backend of the case, None where the test takes none."""
        self._looked_at.add("backend")
        return self._context.backend

    @_suggests_arguments
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
        self._checked, self._comparison = self._subject(fn, name, dequantized), None
        self._comparison = conclude(self._context, KernelEvaluator(self._checked, self._spec, self))
        self._executor.leave(self._comparison)
        return self._comparison

    @_suggests_arguments
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
        names = chosen(only, skip, self._session.settings.thorough, self._mark.invariants)
        subject = self._subject(fn, name, dequantized)
        report = conclude(
            self._context, InvariantEvaluator(subject, spec_of(subject, self._spec), [one.name for one in names])
        )
        self._executor.leave(report)
        return report

    @_suggests_arguments
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
        context, measuring = self._context, self._measuring
        subject = self._subject(fn, name, backward=bool(backward))
        spec = spec_of(subject, self._spec)
        measuring.prepare(spec.device)
        if measuring.mode.checks_first and not self._is_checked(subject, needs_gradients):
            self._checked, self._comparison = subject, None
            self._comparison = conclude(context, KernelEvaluator(subject, replace(spec, backward=needs_gradients)))
        measurement = self._executor.of(subject).measurement(
            session=context.session,
            item=context.item,
            spec=spec,
            subject=subject,
            direction=direction,
            comparison=self._comparison,
        )
        latency = conclude(context, measuring.evaluator(measurement))
        self._executor.leave(latency)
        return latency

    @_suggests_arguments
    def assert_close(self, out: torch.Tensor) -> None:
        """Compare an output that the test computed from attn.q, attn.k and attn.v with the reference.

        Args:
            out: (batch, heads, q_len, v_head_dim) in the marker's layout, of the workload's dtype.

        Raises:
            AssertionError: out is wrong; the text is the diagnosis.
            TypeError: out is a function.
        """
        __tracebackhide__ = True
        if self._executor.elsewhere:
            raise ValueError(self._executor.elsewhere)
        if callable(out):
            raise TypeError("attn.assert_close takes out, a tensor; attn.check(fn) calls fn itself")
        conclude(self._context, OutputEvaluator(out, self._spec, self._reference))

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
        subject = self._checked if fn is None else self._subject(fn)
        if subject is None:
            raise ValueError("assert_launched needs a callable: call attn.check(fn) first, or say fn=...")
        return conclude(self._context, LaunchEvaluator(subject, self._spec, words))

    @property
    def is_judged(self) -> bool:
        """True where the test has judged something, or tried to."""
        return self._context.is_judged

    # -- details -------------------------------------------------------------------------------------------------------

    def _subject(
        self,
        fn: Callable[..., Any] | Backend | str,
        name: str | None = None,
        dequantized: Dequantizer | None = None,
        backward: bool = False,
    ) -> Subject:
        """Return what the test handed over; skips the test where that cannot take the case.

        A workload of a group that drops probabilities is for callables that say which: it skips the others.

        backward: whether gradients are needed although the marker does not ask for them.
        """
        __tracebackhide__ = True
        context, spec = self._context, self._spec
        if spec.drops_unseen and context.session.registrations.catalog.group_of(context.workload.name):
            skip(context, None, "has dropout: needs a callable that returns which weights it kept, returns=('out', 'keep')")
        subject = context.subject(fn, name, spec, dequantized)
        is_unasked = subject is not context.backend or (backward and not self._mark.backward)
        if subject.is_backend and is_unasked and context.session.kernels.are_tested:
            skip_unless_runnable(context, subject, backward)
        subject.closed_over = self._read_parameters
        return subject

    def _is_checked(self, subject: Subject, backward: bool) -> bool:
        """Return whether the test has just checked the same subject, with gradients if they are needed."""
        has_gradients = self._mark.backward or not backward
        return self._comparison is not None and has_gradients and subject == self._checked


def context_of(case: AttentionCase) -> CaseContext:
    """Return what the judgments of a case may use, for methods that guests add."""
    return case._context


def backend_of(case: AttentionCase) -> Backend:
    """Return the backend of a case whose test takes one; which does not count as a look at the case."""
    context: CaseContext | None = getattr(case, "_context", None)
    backend = context.backend if context else case.backend  # a guest's case may have no context
    assert backend is not None
    return backend


# -- how a kernel is judged ----------------------------------------------------------------------------------------------


class KernelEvaluator(Evaluator[Comparison]):
    """Holds a subject against exact attention on every input distribution."""

    def __init__(self, subject: Subject, spec: CheckSpec, tensors: CaseTensors | None = None) -> None:
        """tensors: of the test, which its callable may read."""
        self.subject: Subject = subject
        self._spec, self.workload, self._tensors = spec, spec.workload, tensors
        self.doing, self.on = f"checking {subject.name}", spec.workload.id

    @property
    def evidence(self) -> FailureEvidence:
        return FailureEvidence(self._spec, self.subject)

    def judge(self, context: CaseContext) -> Judgment[Comparison]:
        __tracebackhide__ = True
        executor, spec = context.executor.of(self.subject), self._spec
        subject = self.subject = executor.place(self.subject, context.session.progress)
        defects = self._defects_on(context) if subject.known_defects else []

        def known(comparison: Comparison) -> str:
            return _described(defect for defect in defects if defect.explains(comparison, context.workload))

        by = replace(context.judging(subject), is_known=lambda found: bool(known(found)))
        peak = PeakMemory(spec.device) if spec.device.type == "cuda" else None  # elsewhere nobody counts it
        before = compiling_seconds()
        comparison = judged(Kernel(subject, spec), replace(by, comparing=peak) if peak else by)
        facts: Any = {"fields": {**figures_of(comparison), "memory": peak.bytes if peak else 0}}
        if comparison.compilation is None:  # what a callable compiles by itself
            facts["fields"]["compile_seconds"] = max(0.0, compiling_seconds() - before) or None
        if not comparison.passed:
            is_closed_over = subject.user_function is not None and subject.named is None  # a named function is handed them
            if self._tensors is not None and is_closed_over and not executor.elsewhere:
                comparison = _with_unread(comparison, self._tensors.unread)
            facts |= {"evidence": self._evidence_of(comparison, context), "known_defects": known(comparison)}
            facts |= {"text": mismatch_text.describe(comparison), "rows": comparison.drawn}
            return Judgment(Verdict.MISMATCH, reason=mismatch_text.headline(comparison), **facts)
        if context.session.settings.profile:
            try:
                profiles = _profiles(context, subject, spec, with_ceilings=True)
            except Exception as error:
                reason = f"while it was profiled, {type(error).__name__}: {error}".splitlines()[0]
                return Judgment(Verdict.RAISED, reason=reason, error=error, **facts)
            facts["fields"]["profiles"] = tuple(one.to_dict() for one in profiles)
        if not defects:
            return Judgment(Verdict.PASSED, comparison, eager_because(), **facts)
        facts["fields"]["cause"] = Cause.DEFECT_NOT_SHOWN.value
        unshown = "; ".join(f"{defect.issue} did not show: {defect.summary}" for defect in defects)
        return Judgment(Verdict.PASSED, comparison, unshown, **facts)

    def _evidence_of(self, comparison: Comparison, context: CaseContext) -> FailureEvidence:
        spec = self._spec
        if (parameter := comparison.reported.name[1:]) in PARAMETERS:  # whose gradient was asked for by name
            drawn = context.session.references.inputs_of(spec, spec.inputs[0])
            wanted = {**spec.parameters, parameter: getattr(drawn, PARAMETERS[parameter].tensor)}
            spec = replace(spec, parameters=wanted)
        return FailureEvidence(spec, self.subject, comparison)

    def _defects_on(self, context: CaseContext) -> list[KnownDefect]:
        """List the known defects that this shows, which are not those that take the other calls of an invariant."""
        shown = (d for d in context.defects_of(self.subject) if (d.tensors or d.changes_input) and not d.invariants)
        return [d for d in shown if d.inputs is None or d.inputs in self._spec.inputs]


class OutputEvaluator(Evaluator[None]):
    """Holds one output that a test computed itself against the reference."""

    subject, doing = "out", "comparing out"

    def __init__(self, out: torch.Tensor, spec: CheckSpec, reference: Reference) -> None:
        self._output, self.workload, self.on = Output(out, spec, reference), spec.workload, spec.workload.id

    @property
    def evidence(self) -> FailureEvidence:
        return FailureEvidence(self._output.spec, None)

    def judge(self, context: CaseContext) -> Judgment[None]:
        comparison = judged(self._output, context.judging("out"))
        facts: Any = {"fields": figures_of(comparison)}
        if comparison.passed:
            return Judgment(Verdict.PASSED, **facts)
        text, evidence = mismatch_text.describe(comparison), replace(self.evidence, comparison=comparison)
        facts |= {"text": text, "evidence": evidence, "rows": comparison.drawn}
        return Judgment(Verdict.MISMATCH, reason=mismatch_text.headline(comparison), **facts)


class InvariantEvaluator(Evaluator[InvariantReport]):
    """Tries what must hold of a subject without a tolerance; some of it in another process, which CUDA may be lost in."""

    question, wrong = "invariants", Verdict.BROKEN

    def __init__(self, subject: Subject, spec: CheckSpec, names: Sequence[str]) -> None:
        self.subject: Subject = subject
        self._spec, self._names, self.workload = spec, names, spec.workload
        self.doing, self.on = f"trying the invariants of {subject.name}", spec.workload.id

    @property
    def evidence(self) -> FailureEvidence:
        return FailureEvidence(self._spec, self.subject)

    def judge(self, context: CaseContext) -> Judgment[InvariantReport]:
        __tracebackhide__ = True
        executor = context.executor.of(self.subject)
        self.subject = executor.place(self.subject, context.session.progress)
        worker = context.session.worker
        if worker is not None and worker.selected_invariants:  # the process that waits for this one concludes
            tried = partial(self._tried, context)
            return Judgment(Verdict.HELD, judge_isolated(worker, self.subject, tried), is_recorded=False)
        here, isolated = divided(self._names, self._spec.device, executor.is_expendable)
        report = self._tried(context, here)
        report = replace(report, findings=(*report.findings, *findings_isolated(context, self.subject, isolated)))
        if not report.applied:
            reasons = "; ".join(f"{finding.invariant} {finding.evidence}" for finding in report.findings)
            return Judgment.refused(self.subject, f"none of the requested invariants applies: {reasons}")
        fields = {"inapplicable": report.inapplicable}
        if report.passed:
            said = "; ".join(filter(None, (*report.notes, eager_because())))
            return Judgment(Verdict.HELD, report, said, fields=fields)
        broken = tuple(sorted({finding.invariant for finding in report.broken}))
        return Judgment(
            Verdict.BROKEN,
            fields=fields,
            reason=", ".join(broken),
            text=describe_invariants(report),
            known_defects=_described(_breaking(context.defects_of(self.subject), report.broken)),
            evidence=replace(self.evidence, broken=broken),
            width=INVARIANT_WIDTH,
        )

    def _tried(
        self, context: CaseContext, names: Sequence[str], begin: Callable[[str], None] = lambda name: None
    ) -> InvariantReport:
        __tracebackhide__ = True
        session, asked = context.session, count()
        with session.progress.counting(f"{self.doing} on {self.on}:", len(names)) as progress:

            def begun(name: str) -> None:
                progress(next(asked))
                begin(name)

            def elsewhere(name: str, environment: Mapping[str, str]) -> Finding:
                (finding,) = findings_isolated(context, self.subject, [name], environment)
                return finding

            asked_of = self.subject, self._spec, session.references, names, None, session.settings.thorough
            return judge_invariants(*asked_of, context.deadline(self.subject), begun, elsewhere)


def spec_of(subject: Subject, spec: CheckSpec) -> CheckSpec:
    """Return the spec without the parameters that a test may close over, and a backend does not."""
    return replace(spec, parameters={}) if subject.is_backend else spec


def _with_unread(comparison: Comparison, unread: Sequence[str]) -> Comparison:
    """Say of a wrong result which tensors of the case the test has never asked for."""
    mismatch = comparison.mismatch
    if mismatch is None or not unread:
        return comparison
    words = f"{comparison.subject} never read {' nor '.join(f'attn.{name}' for name in unread)}"
    return replace(comparison, mismatch=replace(mismatch, hints=(*mismatch.hints, Hint("", words, "unread"))))


# -- known defects -------------------------------------------------------------------------------------------------------


def _breaking(defects: Sequence[KnownDefect], broken: Iterable[Finding]) -> list[KnownDefect]:
    """List those that together explain every broken invariant; none, where one is left."""
    explaining = [[d for d in defects if d.breaks(one.invariant, one.evidence)] for one in broken]
    return [d for d in defects if any(d in some for some in explaining)] if all(explaining) else []


def _described(defects: Iterable[KnownDefect]) -> str:
    return "; ".join(f"{defect.issue}: {defect.summary}" for defect in defects)


# -- which kernels are launched: --attn-profile and `attn.assert_launched` ---------------------------------------------


class LaunchEvaluator(Evaluator[list[Profile]]):
    """Looks whether each direction of a subject launches a kernel that answers to all of some words."""

    def __init__(self, subject: Subject, spec: CheckSpec, words: tuple[str, ...]) -> None:
        self.subject: Subject = subject
        self._spec, self._words, self.workload = spec, words, spec.workload
        self.doing, self.on = f"profiling {subject.name}", spec.workload.id

    def judge(self, context: CaseContext) -> Judgment[list[Profile]]:
        __tracebackhide__ = True
        profiles = _profiles(context, self.subject, self._spec, with_ceilings=False)
        for profile in profiles:
            if not any(answers_to(self._words, symbol) for symbol in profile.symbols):
                wanted = ", ".join(map(repr, self._words))
                missed = f"no kernel that answers to {wanted} was launched in the {profile.direction} pass"
                ran = [f"  {x.words}: {x.symbol[:120]}" for x in profile.launches if may_answer(x.symbol)]
                text = "\n".join([f"{missed}; these were:", *ran] if ran else [f"{missed}, and none at all"])
                return Judgment(Verdict.MISMATCH, reason=missed, text=text)
        return Judgment(Verdict.PASSED, profiles, is_recorded=False)


def _profiles(context: CaseContext, subject: Subject, spec: CheckSpec, with_ceilings: bool) -> list[Profile]:
    """Return the profiles of a subject, each direction of which must end in time."""
    __tracebackhide__ = True
    with context.deadline(subject)():
        return context.executor.of(subject).profiles(subject, spec, with_ceilings)


# -- invariants that may take CUDA from this process: in another one ---------------------------------------------------


#: in place of an outcome, as long as there is none
_BEGUN: Any = "begun"
#: kinds of devices on which a kernel may take all that comes after with it
_ISOLATED_ON = frozenset(("cuda",))


def divided(names: Sequence[str], device: torch.device, is_expendable: bool) -> tuple[Sequence[str], Sequence[str]]:
    """Return which invariants run here, and which in another process: none if these are all.

    is_expendable: whether what computes is in another process already.
    """
    if is_expendable or device.type not in _ISOLATED_ON:
        return names, ()
    isolated = [one.name for one in chosen(names, None, thorough=True) if one.may_end_cuda]
    here = [name for name in names if name not in isolated]
    return (here, isolated) if here else (isolated, ())


def findings_isolated(
    context: CaseContext, subject: Subject, names: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
) -> tuple[Finding, ...]:
    """Ask these invariants in another process, where there are any, with some more environment variables.

    One during which the process ended is broken. One that was not run is not applicable: the test did not come so far, or
    this process has left it too little memory.
    """
    if not names:
        return ()
    leave_memory(torch.device(context.machine.device))
    isolated = run_isolated(context.item.config, name_for_processes(context.item), names, environment)
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
    worker: WorkerContext, subject: Subject, tried: Callable[[Sequence[str], Callable[[str], None]], InvariantReport]
) -> InvariantReport:
    """Ask what the process that waits for this one wants to know, and hand it over.

    tried: asks invariants by their names, and says of each that it begins.
    """

    def begin(name: str) -> None:
        worker.return_result({"subject": subject.name, **asdict(Finding(name, _BEGUN, "", 0))})

    report = tried(worker.selected_invariants, begin)
    for finding in report.findings:
        worker.return_result({"subject": subject.name, **asdict(finding)})
    return report
