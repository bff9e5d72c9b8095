"""What a test touches: `attn`, one case of a marked test, with its tensors and its judgements."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import pytest

from pytest_attn.session.fresh import is_fresh_process
from pytest_attn.session.marker import AttentionMark
from pytest_attn.session.parametrize import CaseParameter, id_under
from pytest_attn.session.record import RECORD, CaseRecord
from pytest_attn.session.store import AttentionSession
from pytest_attn.session.tensors import CaseTensors

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.backend import Backend, KnownDefect
    from pytest_attn.correctness.compare import Comparison
    from pytest_attn.correctness.question import Question
    from pytest_attn.invariants.report import InvariantReport
    from pytest_attn.latency.protocol import Latency
    from pytest_attn.profiling.profiler import Profile
    from pytest_attn.session.latency import Measurement
    from pytest_attn.session.saving import FailureSaver

_Judged = TypeVar("_Judged")


class AttentionCase(CaseTensors):
    """One workload, on one device, with one backend where the test takes one.

    Tensors (q, k, v, bias, ...) are those of the first input distribution, in the layout that the marker names; `check`
    draws every distribution anew and hands each callable its own copy.
    """

    def __init__(
        self, request: pytest.FixtureRequest, parameter: CaseParameter, mark: AttentionMark, session: AttentionSession
    ) -> None:
        super().__init__(parameter.workload, mark, session)
        self.backend: Backend | None = session.backend_named(parameter.backend) if parameter.backend else None
        self._request, self._item = request, request.node
        self.asked = "-"  # the callable or backend that was last judged
        self._checked: Any = None
        self._comparison: Comparison | None = None
        self._measured: Counter[tuple[str, str]] = Counter()

    def check(self, fn: Callable[..., Any] | Backend | str) -> Comparison:
        """Hold `fn` against exact attention: a callable of (q, k, v), the backend of the case, or a backend's name.

        Returns the comparison; raises AssertionError where fn is wrong, with the diagnosis as its text.
        """
        __tracebackhide__ = True
        return self._check(fn, self._mark.backward)

    def _check(self, fn: Callable[..., Any] | Backend | str, backward: bool) -> Comparison:
        __tracebackhide__ = True
        from pytest_attn.correctness.judge import judge
        from pytest_attn.correctness.question import subject_name

        subject = self._resolved(fn)
        name = subject_name(subject)
        question = self._question if backward == self._mark.backward else replace(self._question, backward=backward)
        self._checked, self._comparison = subject, None
        saver = self._saver(subject, question)
        deadline = partial(self._deadline, name)
        asked = partial(judge, subject, question, self._session.references, deadline, self.command(), saver.see)
        comparison = self._judged(name, "check", saver.watching(asked))
        defects = self._known_defects(subject)
        if comparison.passed:
            self._comparison = comparison
            self._record(name, "passed", comparison, "; ".join(f"{d.issue} did not show: {d.summary}" for d in defects))
            if self._session.settings.profile:
                self._add_profiles(subject)
            return comparison
        self._xfail_if_known(name, (d for d in defects if d.explains(comparison, self.workload)), comparison)
        self._record(name, "mismatch", comparison)
        raise AssertionError(saver.told(comparison.message, comparison))

    def check_invariants(
        self,
        fn: Callable[..., Any] | Backend | str,
        only: Iterable[str] | str | None = None,
        skip: Iterable[str] | str | None = None,
    ) -> InvariantReport:
        """Ask `fn` what needs no tolerance: poisoned memory, odd strides, leaks, reruns, state, equivalences, algebra.

        only, skip: names of invariants (docs/strength.md). Returns the report; raises AssertionError where an invariant is
        broken, with the smallest evidence as its text, ValueError for an unknown name, and where none is left. Skips where
        none applies.
        """
        __tracebackhide__ = True
        from pytest_attn.correctness.question import subject_name
        from pytest_attn.invariants.check import judge_invariants

        subject = self._resolved(fn)
        name = subject_name(subject)
        thorough = self._session.settings.thorough
        saver = self._saver(subject, self._question)
        deadline = partial(self._deadline, name)
        asked = partial(judge_invariants, subject, self._question, only, skip, thorough, deadline, self.command())
        report = self._judged(name, "invariants", saver.watching(asked))
        if not report.applied:
            reasons = "; ".join(f"{finding.invariant} {finding.evidence}" for finding in report.findings)
            self._skip(name, f"no invariant that was asked for applies: {reasons}", "invariants")
        if report.passed:
            self._record(name, "held", question="invariants")
            return report
        broken = {finding.invariant for finding in report.broken}
        self._xfail_if_known(name, self._breaking(subject, broken), question="invariants")
        self._record(name, "broken", reason=", ".join(sorted(broken)), question="invariants")
        raise AssertionError(saver.told(report.message, broken=tuple(sorted(broken))))

    def measure(self, fn: Callable[..., Any] | Backend | str, backward: bool | Literal["both"] = False) -> Latency:
        """Check `fn`, time it, and hold its p50 against the baseline of this machine.

        backward: False times the forward pass as in inference, True the backward pass alone, "both" one after the other.
        Returns the latency, whose `verdict` is "passed", "inconclusive" or "no baseline". Raises AssertionError where fn is
        wrong, where its results are not those of its data when it is called again, and where it became slower, less accurate
        or takes more memory than recorded. Skips where nothing can be timed.
        """
        __tracebackhide__ = True
        from pytest_attn.correctness.question import subject_name
        from pytest_attn.latency.measure import direction_of
        from pytest_attn.session.latency import Measurement

        direction = direction_of(backward)
        subject = self._resolved(fn, backward=bool(backward))
        is_checked = self._checked is subject and self._comparison is not None and (self._mark.backward or not backward)
        if not is_checked and not is_fresh_process():
            self._check(subject, self._mark.backward or bool(backward))
        name = subject_name(subject)
        self._measured[name, direction] += 1
        numbers = (self._measured[name, direction], sum(self._measured.values()))
        measurement = Measurement(self._session, self._item, self._question, subject, direction, self._comparison, *numbers)
        if reason := measurement.untimed_because():
            self._record_latency(measurement, "untimed", reason)
            if self._session.settings.latency == "require":
                raise AssertionError(f"not timed, which --attn-latency=require asks for: {measurement.name}: {reason}")
            pytest.skip(f"{name} is right, but was not timed: {reason}")
        latency, failure = self._timed(measurement)
        if failure or latency is None:
            raise AssertionError(failure)
        return latency

    def _timed(self, measurement: Measurement) -> tuple[Latency | None, str]:
        """Take a measurement and leave its record; return it, or the text with which the test fails."""
        __tracebackhide__ = True
        from pytest_attn.correctness.question import subject_name
        from pytest_attn.latency.verdict import change_words, regression_text
        from pytest_attn.latency.work import StaleError
        from pytest_attn.session.deadline import DeadlineError

        try:
            with self._session.progress.during(f"timing {subject_name(measurement.subject)}", self.workload.id):
                latency = measurement.take()
        except (StaleError, DeadlineError) as error:
            self._record_latency(measurement, "raised", str(error))
            return None, f"cannot be timed: {measurement.name}: {error}"
        except Exception as error:
            self._record_latency(measurement, "raised", f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        decision = latency.decision
        if is_fresh_process() or decision is None:
            return latency, ""
        if self._session.settings.cupti:
            latency = replace(latency, cupti=self._cupti(measurement))
        self._record_latency(measurement, decision.verdict, decision.reason, latency)
        self._show_to_benchmark(latency)
        if decision.verdict == "regressed" and (baseline := measurement.recorded):
            return latency, regression_text(decision, baseline, latency, self._session.selected, self.command())
        if decision.verdict == "unconfirmed":
            return latency, f"looks slower: {measurement.name}: {change_words(decision)}\n  but        {decision.reason}"
        if self._session.settings.latency == "require" and decision.verdict in ("no baseline", "inconclusive"):
            from pytest_attn.reports.latency import is_to_be_recorded

            remedy = f'  record     {self.command()} --attn-update-baselines "first recording"\n'
            return latency, (
                f"{decision.verdict}: {measurement.name}: {decision.reason}\n"
                f"{remedy if decision.verdict == 'inconclusive' or is_to_be_recorded(decision.reason) else ''}"
                "  or         --attn-latency=auto, which only says so"
            )
        return latency, ""

    def assert_close(self, out: torch.Tensor) -> None:
        """Compare `out`, computed from attn.q, attn.k and attn.v, with the reference; AssertionError where it is wrong."""
        __tracebackhide__ = True
        from pytest_attn.correctness.compare import ContractError
        from pytest_attn.correctness.judge import judge_output

        failure = None
        saver = self._saver(None, self._question)
        try:
            comparison = judge_output(out, self._question, self._reference, self.command(), saver.see)
        except ContractError as error:
            failure = saver.told(str(error))
        if failure is not None:
            self._record("out", "mismatch", reason=failure.splitlines()[0])
            raise AssertionError(failure)
        self._record("out", "passed" if comparison.passed else "mismatch", comparison)
        if not comparison.passed:
            raise AssertionError(saver.told(comparison.message, comparison))

    def assert_launched(self, *words: str, fn: Callable[..., Any] | Backend | str | None = None) -> list[Profile]:
        """Assert that `fn`, by default what `check` was last given, launches a kernel that answers to all of `words`.

        Words are parts of what --attn-profile prints or of the kernel's symbol, whatever the case: "sm90", "flash".
        Copies and elementwise kernels do not count. Returns the profiles; raises AssertionError listing what ran instead.
        """
        __tracebackhide__ = True
        from pytest_attn.correctness.question import subject_name
        from pytest_attn.profiling.kernels import answers_to, may_answer

        if self._session.settings.mutants:
            return []
        if not words or not all(isinstance(word, str) and word.strip() for word in words):
            raise ValueError(f'assert_launched needs words: attn.assert_launched("sm90", "flash"), got {words!r}')
        subject = self._checked if fn is None else self._resolved(fn)
        if subject is None:
            raise ValueError("assert_launched needs a callable: call attn.check(fn) first, or say fn=...")
        profiles = self._profiles(subject, with_ceilings=False)
        for profile in profiles:
            if not any(answers_to(words, symbol) for symbol in profile.symbols):
                wanted = ", ".join(map(repr, words))
                missed = f"no kernel that answers to {wanted} was launched in the {profile.direction} pass"
                self._record(subject_name(subject), "mismatch", reason=missed)
                ran = [f"  {x.words}: {x.symbol[:120]}" for x in profile.launches if may_answer(x.symbol)]
                raise AssertionError("\n".join([f"{missed}; these were:", *ran] if ran else [f"{missed}, and none at all"]))
        return profiles

    def _resolved(self, fn: Callable[..., Any] | Backend | str, backward: bool = False) -> Any:
        """Return a callable or backend as it is, and a backend by its name; skips where that cannot take the case."""
        from pytest_attn.backends.backend import Backend

        if self._session.settings.mutants:
            return self.backend
        subject = self._session.registry[fn] if isinstance(fn, str) else fn
        if isinstance(subject, Backend) and (isinstance(fn, str) or (backward and not self._mark.backward)):
            self._skip_unless_runnable(subject, backward)
        return subject

    def command(self) -> str:
        """Return the shell command that runs exactly this case again."""
        given = {k: v for k, v in self._session.settings.given.items() if k not in ("backends", "workloads")}
        if self.backend is not None:
            given["backends"] = self.backend.name
        if self._session.settings.workloads and self.workload.name:
            given["workloads"] = self.workload.name
        given.setdefault("device", str(self.device))
        options = [f"--attn-{stem}={shlex.quote(text)}" for stem, text in given.items()]
        return " ".join(["pytest", shlex.quote(_runnable(self._item)), *options])

    def skip_unless_runnable(self) -> None:
        """Skip the test, with the reason, where the device or the case's backend cannot take it."""
        self._skip_unless_runnable(self.backend)

    # -- details -------------------------------------------------------------------------------------------------------

    def _saver(self, subject: object, question: Question) -> FailureSaver:
        from pytest_attn.session.saving import FailureSaver

        return FailureSaver(self._session, self._item, question, subject, self.command())

    def _deadline(self, name: str) -> AbstractContextManager[None]:
        return self._session.deadline.around(f"{name} on {self.workload.id}, {self._item.nodeid}")

    def _judged(self, name: str, question: str, judge: Callable[[], _Judged]) -> _Judged:
        """Return what `judge` returns; a broken contract fails the test, a late refusal skips it."""
        __tracebackhide__ = True
        from pytest_attn.backends.backend import RefusedError
        from pytest_attn.correctness.compare import ContractError
        from pytest_attn.session.deadline import DeadlineError

        doing = "trying the invariants of" if question == "invariants" else "checking"
        self.asked = name
        try:
            with self._session.progress.during(f"{doing} {name}", self.workload.id):
                return judge()
        except (ContractError, DeadlineError) as error:
            failure, refusal = str(error), ""
        except RefusedError as error:
            failure, refusal = "", str(error)
        if refusal:
            self._skip(name, refusal, question)
        verdict = "broken" if question == "invariants" else "mismatch"
        self._record(name, verdict, reason=failure.splitlines()[0], question=question)
        raise AssertionError(failure)

    def _skip(self, name: str, reason: str, question: str) -> NoReturn:
        self._record(name, "skipped", reason=reason, question=question)
        pytest.skip(f"{name}: {reason}")

    def _xfail_if_known(
        self, name: str, defects: Iterable[KnownDefect], comparison: Comparison | None = None, question: str = "check"
    ) -> None:
        if known := "; ".join(f"{defect.issue}: {defect.summary}" for defect in defects):
            reason = f"known defect {known}"
            self._record(name, "known defect", comparison, reason, question)
            pytest.xfail(reason)

    def _profiles(self, subject: Callable[..., Any] | Backend, with_ceilings: bool = True) -> list[Profile]:
        from pytest_attn.correctness.question import subject_name
        from pytest_attn.profiling.subject import profile_subject

        with self._deadline(subject_name(subject)):
            return profile_subject(subject, self._question, with_ceilings)

    def _add_profiles(self, subject: Callable[..., Any] | Backend) -> None:
        """Put the profiles of the case on its last record."""
        records = self._item.stash[RECORD]
        try:
            profiles = self._profiles(subject)
        except Exception as error:
            reason = f"while it was profiled, {type(error).__name__}: {error}".splitlines()[0]
            records[-1] = replace(records[-1], verdict="raised", reason=reason)
            raise
        records[-1] = replace(records[-1], profiles=tuple(profile.to_dict() for profile in profiles))

    def _skip_unless_runnable(self, backend: Backend | None, backward: bool = False) -> None:
        from pytest_attn.backends.backend import obstacle

        reason = obstacle(backend, self.workload, self._session.machine(self._mark.device), backward or self._mark.backward)
        if reason:
            self._record(backend.name if backend else "-", "skipped", reason=reason)
            pytest.skip(f"{backend.name}: {reason}" if backend else reason)

    def _known_defects(self, subject: object) -> list[KnownDefect]:
        """List those that a check of this case may show."""
        from pytest_attn.workloads.inputs import distribution_names

        names = distribution_names(self._mark.inputs)
        shown = (d for d in self._spoiling(subject) if d.tensors or d.changes_input)
        return [d for d in shown if d.inputs is None or d.inputs in names]

    def _breaking(self, subject: object, broken: set[str]) -> list[KnownDefect]:
        """List those that together explain every broken invariant; none, where one is left."""
        found = [d for d in self._spoiling(subject) if not d.invariants or broken & set(d.invariants)]
        explained = {name for d in found for name in d.invariants or broken}
        return found if broken <= explained else []

    def _spoiling(self, subject: object) -> list[KnownDefect]:
        """List those that have this case in their reach."""
        from pytest_attn.backends.backend import Backend

        if not isinstance(subject, Backend):
            return []
        return subject.defects_on(self.workload, self._session.machine(self._mark.device), self._mark.backward)

    def _cupti(self, measurement: Measurement) -> float | None:
        """Return the device seconds of one call by torch's profiler, None where it has no such direction or device."""
        from pytest_attn.profiling.subject import profile_subject

        if measurement.direction == "forward+backward" or self.device.type != "cuda":
            return None
        question = replace(self._question, backward=measurement.direction == "backward", inputs=("randn",))
        return profile_subject(measurement.subject, question, with_ceilings=False)[-1].seconds

    def _show_to_benchmark(self, latency: Latency) -> None:
        """Hand the samples to pytest-benchmark, where it is there, enabled, and asked for."""
        from pytest_attn.session.bridge import is_asked_for, record_samples

        if is_asked_for(self._item.config):
            facts = {key: value for key, value in latency.to_dict().items() if key != "samples"}
            record_samples(self._request, latency.samples, facts)

    def _record_latency(self, measurement: Measurement, verdict: str, reason: str, latency: Latency | None = None) -> None:
        from pytest_attn.correctness.question import subject_name

        subject, direction = subject_name(measurement.subject), measurement.direction
        taken = latency.to_dict() if latency else {}
        baseline = {"baseline": recorded.to_report()} if (recorded := measurement.recorded) else {}
        record = CaseRecord(
            **self._facts(subject),
            verdict=verdict,
            question="latency",
            direction=direction,
            backward=direction != "forward",
            reason=reason,
            latency={**taken, **baseline, "direction": direction, "key": measurement.key},
        )
        self._item.stash.setdefault(RECORD, []).append(record)
        if latency is not None:
            self._item.user_properties.append((f"attn_p50_{subject}_{direction}", f"{latency.p50:.6g}"))

    def _facts(self, subject: str) -> dict[str, Any]:
        from pytest_attn.session.facts import facts_of

        facts = facts_of(self._session, self.workload, subject, self._mark.device)
        return {"test": self._item.nodeid, "command": self.command(), **facts}

    def _record(
        self,
        subject: str,
        verdict: str,
        comparison: Comparison | None = None,
        reason: str | None = None,
        question: str = "check",
    ) -> None:
        backward = self._mark.backward
        record = CaseRecord.from_comparison(
            **self._facts(subject),
            verdict=verdict,
            question=question,
            direction="forward+backward" if backward else "forward",
            backward=backward,
            comparison=comparison,
            reason=_wrong(comparison) if verdict == "mismatch" and comparison else reason or "",
        )
        self._item.stash.setdefault(RECORD, []).append(record)
        if comparison is not None:
            worst = comparison.worst
            self._item.user_properties.append((f"attn_z_{subject}", f"{worst.z_element:.4g} ({worst.name})"))


def _wrong(comparison: Comparison) -> str:
    """Say in a few words what is wrong: of the first tensor that is, which the diagnosis is about."""
    from pytest_attn.correctness.words import verdict

    row = next((t for t in comparison.tensors if not t.passed), None)
    if row is None:
        return f"changed its input {comparison.changed[0]} in place"
    return f"{row.name} {verdict(row)} (inputs {row.distribution})"


def _runnable(item: pytest.Item) -> str:
    """Return a node id that can be typed from the invocation directory, or with --pyargs for an installed suite."""
    import os
    from pathlib import Path

    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    shown = str(item.path) if path.startswith("..") else str(Path(path).as_posix())
    return id_under(shown, item)
