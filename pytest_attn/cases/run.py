"""One case in a run: whose test it is, what it asks, and what every judgment of it has in common."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import pytest

from pytest_attn.cases.outcome import Outcome
from pytest_attn.session.items import CaseParameter, typed_name
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.session import AttentionSession
from pytest_attn.verdict import Cause, Verdict

if TYPE_CHECKING:
    from pytest_attn.backends.backend import Backend
    from pytest_attn.backends.known_defect import KnownDefect
    from pytest_attn.backends.machine import Machine
    from pytest_attn.backends.subject import Dequantizer, Subject
    from pytest_attn.cases.saving import FailureSaver
    from pytest_attn.correctness.contract import ContractError
    from pytest_attn.correctness.spec import CheckSpec
    from pytest_attn.session.kernels import Target

_Judged = TypeVar("_Judged")


class CaseRun:
    """One workload in one test, with one backend where the test takes one. asked: what was judged last."""

    def __init__(
        self, request: pytest.FixtureRequest, parameter: CaseParameter, mark: AttentionMark, session: AttentionSession
    ) -> None:
        self.request, self.mark, self.session = request, mark, session
        self.item: pytest.Item = request.node
        self.workload, name = parameter
        self.backend: Backend | None = session.kernels.backend_named(name) if name else None
        self.asked: Subject | None = None
        self._callables: dict[str, list[Callable[..., object]]] = {}

    @property
    def has_processes_to_lose(self) -> bool:
        """Whether invariants that may end CUDA are asked in a process of their own."""
        return True

    @property
    def machine(self) -> Machine:
        """The device, described."""
        return self.session.machines.machine(self.mark.device)

    @property
    def outcome(self) -> Outcome:
        """What ends a judgment."""
        mark = self.mark
        return Outcome(self.session, self.item, self.workload, mark.device, mark.backward, self.command)

    @property
    def command(self) -> str:
        """The shell command that runs exactly this case again."""
        settings = self.session.settings
        given = {k: v for k, v in settings.given.items() if k not in ("backends", "workloads")}
        if self.backend is not None:
            given["backends"] = self.backend.name
        if settings.workloads and self.workload.name:
            given["workloads"] = self.workload.name
        given.setdefault("device", str(self.session.machines.device(self.mark.device)))
        options = [f"--attn-{stem}={shlex.quote(text)}" for stem, text in given.items()]
        return " ".join(["pytest", shlex.quote(typed_name(self.item)), *options])

    def subject(
        self,
        target: Target,
        name: str | None,
        spec: CheckSpec,
        backward: bool = False,
        dequantized: Dequantizer | None = None,
    ) -> Subject:
        """Return what a test handed over, behind its one type; skips the test where a backend cannot take the case.

        backward: whether gradients are needed although the marker does not ask for them. dequantized: what a callable that
        quantizes makes of q, k and v. Raises as `Registry.subject` does.
        """
        test = getattr(getattr(self.item, "function", None), "__qualname__", "")
        subject = self._told_apart(self.session.kernels.subject(target, name, spec, self.backend, test, dequantized))
        is_unasked = isinstance(target, str) or (backward and not self.mark.backward)
        if subject.is_backend and is_unasked and self.session.kernels.are_tested:
            self.skip_unless_runnable(subject, backward)
        return subject

    def _told_apart(self, subject: Subject) -> Subject:
        """Number the callables of a test that reports would call alike, unless the test itself has named them so."""
        function = subject.user_function
        if function is None or subject.given_name:
            return subject
        from pytest_attn.backends.subject import identity_of

        # kept alive: another callable may get the identity of a deleted one
        alike = self._callables.setdefault(subject.name, [])
        if identity_of(function) not in map(identity_of, alike):
            alike.append(function)
        number = list(map(identity_of, alike)).index(identity_of(function)) + 1
        if number > 1:
            subject.name = f"{subject.name} #{number}"
        return subject

    def skip_unless_runnable(self, subject: Subject | None, backward: bool = False) -> None:
        """Skip the test, with the reason, where the device or the subject cannot take the case."""
        from pytest_attn.backends.subject import obstacle_of_any
        from pytest_attn.correctness.parameters import parameters_of

        wanted = parameters_of(self.workload, self.mark.parameters)
        if subject is not None and subject.is_backend and wanted:
            named = ", ".join(wanted)
            self.outcome.skip(subject, f"the marker asks for a gradient of {named}, which a callable has, and no backend")
        obstacle = subject.obstacle if subject else obstacle_of_any
        if reason := obstacle(self.workload, self.machine, backward or self.mark.backward):
            is_missing = subject is not None and subject.unavailable_because(self.machine) == reason
            self.outcome.skip(subject, reason, cause=Cause.NOT_HERE.value if is_missing else "")

    def judged(self, doing: str, subject: Subject, spec: CheckSpec, question: str, judge: Callable[[], _Judged]) -> _Judged:
        """Return what `judge` returns; a broken contract or a late end fails the test, a late refusal skips it.

        doing: what a terminal says meanwhile.
        """
        __tracebackhide__ = True
        from pytest_attn.backends.subject import RefusedError
        from pytest_attn.correctness.contract import ContractError
        from pytest_attn.session.deadline import DeadlineError

        self.asked = subject
        try:
            with self.session.progress.during(f"{doing} {subject.name}", self.workload.id):
                return judge()
        except (ContractError, DeadlineError, RefusedError) as error:
            ended = error
        if isinstance(ended, RefusedError):
            self.outcome.skip(subject, str(ended), question)
        verdict = Verdict.BROKEN if question == "invariants" else Verdict.MISMATCH
        if isinstance(ended, DeadlineError):
            verdict = Verdict.NO_RESULT
        self.outcome.record(subject, verdict, question=question, reason=str(ended).splitlines()[0].rstrip(":"))
        if isinstance(ended, ContractError):
            self.fail_of_contract(ended, subject, spec)
        raise AssertionError(str(ended))

    def fail_of_contract(self, error: ContractError, subject: Subject | None, spec: CheckSpec) -> NoReturn:
        """Fail the test, as what a kernel returned cannot be compared."""
        __tracebackhide__ = True
        from pytest_attn.messages.mismatch import describe_contract

        saver = self.saver(subject, spec)
        self.outcome.fail(describe_contract(error), saver.save if saver else None)

    def saver(self, subject: Subject | None, spec: CheckSpec) -> FailureSaver | None:
        """Return what saves a failure, None where failures are not saved."""
        folder = self.session.settings.save_failures
        if folder is None or not self.session.kernels.are_tested:
            return None
        from pytest_attn.cases.saving import FailureSaver

        return FailureSaver(folder, self.session, self.item, spec, subject, self.command)

    def deadline(self, subject: Subject) -> Callable[[], AbstractContextManager[object]]:
        """Return what makes the context of one call, which must end in time."""
        return lambda: self.session.deadline.around(f"{subject.name} on {self.workload.id}, {self.item.nodeid}")

    def defects_of(self, subject: Subject) -> list[KnownDefect]:
        """List the known defects that have this case in their reach."""
        return subject.defects_on(self.workload, self.machine, self.mark.backward)
