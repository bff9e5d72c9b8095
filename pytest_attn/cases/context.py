"""One case in a run: whose test it is, and what its judgments may use. Nothing here ends a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pkgutil import resolve_name

import pytest

from pytest_attn.backends.backend import Backend, FunctionBackend
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import Dequantizer, Subject, identity_of, name_of, obstacle_of_any
from pytest_attn.cases.executor import Executor
from pytest_attn.cases.judgment import Judgment
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis.diagnose import Context
from pytest_attn.reports.verdict import Cause
from pytest_attn.session.kinds import CaseParameter, made_items, marker_of, typed_name
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.selection import Target
from pytest_attn.session.session import AttentionSession, session_of
from pytest_attn.workloads.functions import shell_word


def mark_of(item: pytest.Item, session: AttentionSession) -> AttentionMark:
    """Read the marker of a test."""
    mark: AttentionMark = made_items(item).read(marker_of(item), session)
    return mark


class CaseContext:
    """One workload in one test, with one backend where the test takes one.

    executor: where what the test hands over runs. asked, question: of the last judgment, its subject and its
    question. is_judged: whether anything was judged, or was tried to be.
    """

    def __init__(
        self,
        request: pytest.FixtureRequest,
        parameter: CaseParameter,
        mark: AttentionMark,
        session: AttentionSession,
        executor: Executor,
    ) -> None:
        self.request, self.mark, self.session, self.executor = request, mark, session, executor
        self.item: pytest.Item = request.node
        self.workload, name = parameter.workload, parameter.backend
        self.backend: Backend | None = session.kernels.backend_named(name) if name else None
        self.asked: Subject | None = None
        self.is_judged, self.question = False, "check"
        self._callables: dict[str, dict[object, Callable[..., object]]] = {}

    @classmethod
    def of_item(cls, request: pytest.FixtureRequest, parameter: CaseParameter) -> CaseContext:
        """Return that of an item whose callables compute in this process; skips the test where it has lost its device."""
        item: pytest.Item = request.node
        session = session_of(item.config)
        mark = mark_of(item, session)
        if session.cuda.lost_because and session.machines.device(mark.device).type == "cuda":
            pytest.skip(session.cuda.lost_because)
        return cls(request, parameter, mark, session, Executor(parameter.workload))

    # -- what is judged ------------------------------------------------------------------------------------------------

    def subject(self, target: Target, name: str | None, spec: CheckSpec, dequantized: Dequantizer | None = None) -> Subject:
        """Return what a test handed over, or what this run tests in its place, behind its one type.

        dequantized: what a callable that quantizes makes of q, k and v. Raises as `Registry.subject` does.
        """
        __tracebackhide__ = True
        if self.backend is not None and (other := self.session.kernels.in_place_of(self.backend, spec)):
            return other
        test = getattr(getattr(self.item, "function", None), "__qualname__", "")
        registry = self.session.registrations.registry
        return self._told_apart(spec.adapted(registry.subject(target, name, spec.declared, test, dequantized)))

    def _told_apart(self, subject: Subject) -> Subject:
        """Number the callables of a test that reports would call alike, unless the test itself has named them so."""
        function = subject.user_function
        if function is None or subject.given_name:
            return subject
        alike = self._callables.setdefault(subject.name, {})
        alike.setdefault(identity_of(function), function)  # kept alive: another may get the identity of a deleted one
        if (number := [*alike].index(identity_of(function)) + 1) > 1:
            subject.name = f"{subject.name} #{number}"
        return subject

    def refusal(self, subject: Subject | None, backward: bool = False) -> Judgment[object] | None:
        """Return that the device, or the subject, cannot take the case, and why; None where both can.

        subject: None where none is known yet. backward: whether gradients are needed although the marker asks for none.
        """
        subject = self.executor.asked(subject)
        asked = self.workload, self.machine, backward or self.mark.backward
        if obstruction := (subject.obstacle if subject else obstacle_of_any)(*asked):
            # what cannot be imported is not tried for what it declares to refuse
            missing = subject and (
                subject.unavailable_because(self.machine)
                or (subject.broken_because() if subject.claims(self.workload, asked[2]) else None)
            )
            is_missing = subject is not None and obstruction == missing
            is_own = subject is not None and not is_missing and subject.declines(*asked) == obstruction
            return Judgment.refused(subject, obstruction, Cause.NOT_HERE if is_missing else Cause.DECLINED if is_own else None)
        if subject is not None and (said := self.session.refused.get((subject, self.workload, asked[2], self.machine))):
            return Judgment.refused(subject, said, Cause.DECLINED)
        return None

    def remember_refusal(self, subject: Subject | None, spec: CheckSpec, reason: str) -> None:
        """Keep what a backend has said when it compiled, so that no other test of the workload compiles to hear it again.

        Not what a user's own function says, which may depend on what its test has set.
        """
        if subject is not None and subject.is_backend and subject.library != FunctionBackend.library:
            self.session.refused[subject, spec.workload, spec.backward, self.machine] = reason

    # -- what a judgment may use ---------------------------------------------------------------------------------------

    def judging(self, subject: Subject | str) -> Context:
        """Return what a comparison of a subject may use, and what is to be kept of it, as this run is set."""
        name, seconds = name_of(subject), self.session.settings.diagnosis_timeout
        return Context(
            references=self.session.references,
            deadline=nullcontext if isinstance(subject, str) else self.deadline(subject),
            diagnosis_timeout=seconds,
            diagnosing=lambda: self.session.progress.during(f"diagnosing {name}", self.workload.id, seconds),
            keeps_evidence=bool(self.failing),
            locate=self.executor.locate,
        )

    def deadline(self, subject: Subject) -> Callable[[], AbstractContextManager[object]]:
        """Return what makes the context of one call, which must end in time."""
        executor = self.executor.of(subject)
        case = f"{subject.name} on {self.workload.id}, {self.item.nodeid}"
        limited: Callable[[], AbstractContextManager[object]] = nullcontext
        if self.session.deadline.seconds and not executor.has_deadline:
            limited = partial(self.session.deadline.around, case)
        if executor.elsewhere or not subject.compiles:
            return limited
        doing = iter([f"compiling {subject.name}"])  # in the first call

        @contextmanager
        def around() -> Iterator[None]:
            with self.session.progress.during(next(doing, ""), self.workload.id), limited():
                yield

        return around

    def defects_of(self, subject: Subject) -> list[KnownDefect]:
        """List the known defects that have this case in their reach."""
        return subject.defects_on(self.workload, self.machine, self.mark.backward)

    @property
    def machine(self) -> Machine:
        """The device, described."""
        return self.session.machines.machine(self.mark.device)

    @property
    def failing(self) -> list[Callable[..., Iterable[str]]]:
        """What guests do with a failure of what is tested."""
        named = self.session.settings.asked["failing"] if self.session.kernels.are_tested else {}
        return [resolve_name(name) for name in named.values()]

    def command(self, rows: tuple[int, ...] = ()) -> str:
        """Return the shell command that runs exactly this case again. rows: drawn by a judgment, at which it is to look."""
        settings = self.session.settings
        given = dict(settings.given)
        for selected in ("backends", "workloads"):
            given.pop(selected, None)
        if self.backend is not None:
            given["backends"] = self.backend.name
        if settings.workloads and self.workload.name:
            given["workloads"] = self.workload.name
        if rows:
            given["rows"] = ",".join(map(str, rows))
        given.setdefault("device", str(self.session.machines.device(self.mark.device)))
        for name in settings.asked["elsewhere"]:
            given[name] = settings.more[name]
        typed = [self.session.options[stem].typed(text) for stem, text in given.items()]
        return " ".join(["pytest", shell_word(typed_name(self.item)), *typed])
