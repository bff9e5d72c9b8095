"""One case in a run: whose test it is, and how each of its judgments ends."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, cast

import pytest

from pytest_attn.backends.backend import Backend, FunctionBackend
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.named import is_name
from pytest_attn.backends.raised import EndsTestError, ending_no_test
from pytest_attn.backends.subject import Dequantizer, RefusedError, Subject, identity_of, obstacle_of_any
from pytest_attn.cases.executor import Executor
from pytest_attn.cases.judgment import Evaluator, FailureToSave, Judgment, Refusal, Result, Starting
from pytest_attn.cases.measurement import TimedIsolated, TimingPlace
from pytest_attn.cases.records import facts_of, leave_record
from pytest_attn.cases.saving import FailureSaver
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.correctness.tripwire import functions_kept
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.guests.ranks.rank_group import RankRaisedError
from pytest_attn.isolation.function import isolated_of
from pytest_attn.reports.lines import labeled, taken_apart
from pytest_attn.reports.records import new_record
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.session.deadline import DeadlineError
from pytest_attn.session.kinds import CaseParameter, id_from_root, kind_of, marker_of, typed_name
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.option_types import declared_options
from pytest_attn.session.selection import Target
from pytest_attn.session.session import AttentionSession, session_of
from pytest_attn.workloads.parameters import parameters_of
from pytest_attn.workloads.sharding import Sharding


def mark_of(item: pytest.Item, session: AttentionSession) -> AttentionMark:
    """Read the marker of a test."""
    mark: AttentionMark = kind_of(item).made_items().read(marker_of(item), session)
    return mark


class CaseRun:
    """One workload in one test, with one backend where the test takes one. asked: what was judged last.

    is_judged: whether anything was, or was tried to be. executor: where what the test hands over runs.
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
        self.is_judged = False
        self._drawn: tuple[int, ...] = ()
        self._callables: dict[str, list[Callable[..., object]]] = {}

    @classmethod
    def of_item(cls, request: pytest.FixtureRequest, parameter: CaseParameter) -> CaseRun:
        """Return the run of an item whose callables compute in this process; skips the test where it has lost its device."""
        item: pytest.Item = request.node
        session = session_of(item.config)
        mark = mark_of(item, session)
        if session.cuda.lost_because and session.machines.device(mark.device).type == "cuda":
            pytest.skip(session.cuda.lost_because)
        return cls(request, parameter, mark, session, Executor.in_process(parameter.workload))

    # -- the end of a judgment -----------------------------------------------------------------------------------------

    def conclude(self, evaluator: Evaluator[Result]) -> Result:
        """Have an evaluator judge; return the result of what passed, and end the test of anything else.

        Every judgment ends here, whatever is judged and wherever it runs. A terminal says what takes long; a record is left.
        The test goes on, is skipped, fails as expected (xfail), or fails with its text and the command that repeats it.
        """
        __tracebackhide__ = True
        self.is_judged = True
        self._require_contained(evaluator)
        self.asked = evaluator.subject if isinstance(evaluator.subject, Subject) else self.asked
        try:
            with ending_no_test(evaluator.name, calls=False), self._watched(evaluator):
                found = evaluator.judge()
        except RefusedError as error:
            found = evaluator.ended(error)
            self._remember(evaluator, str(error))
        except (ContractError, DeadlineError, EndsTestError, RankRaisedError) as error:
            found = evaluator.ended(error)
        except Exception as error:
            self._note(evaluator, error)
            raise
        if self.session.settings.declines == "fail" and self.session.kernels.are_tested:
            found = found.failing_if_declined()
        self._drawn = found.evidence.drawn if isinstance(found.evidence, FailureToSave) else ()
        if found.is_recorded:
            self._leave_record(evaluator, found)
        if found.passed:
            return cast(Result, found.result)
        if found.skip:
            pytest.skip(found.skip)
        if found.known_defects:
            pytest.xfail(f"known defect {found.known_defects}")
        if found.error is not None:
            with ending_no_test(evaluator.name):  # its own code, which said what it is, may have made it another exception
                raise found.error
        reproduce = [labeled("reproduce", self.command, found.width)] if found.says_command else []
        text = "\n".join([found.text, *reproduce, *found.remedies])
        raise AssertionError("\n".join([text, *self._saved(text, found)]))

    @contextmanager
    def _watched(self, evaluator: Evaluator[Any]) -> Iterator[None]:
        """Show what is done meanwhile, and put back the functions that a callable replaces."""
        kept = functions_kept(f"{evaluator.name} on {evaluator.on}") if evaluator.doing else nullcontext()
        with self.session.progress.during(evaluator.doing, evaluator.on), kept:
            yield

    def diagnosed(self, subject: str, comparison: Comparison, sharding: Sharding | None = None) -> Comparison:
        """Return a comparison with what explains its mismatch; a terminal says that it is looked for."""
        seconds = self.session.settings.diagnosis_timeout
        with self.session.progress.during(f"diagnosing {subject}", self.workload.id, seconds):
            return diagnose(comparison, seconds, self.saves_failures, sharding)

    def _note(self, evaluator: Evaluator[Any], error: Exception) -> None:
        """Say beneath what a callable raised what it was given, and how to repeat it; Python 3.10 has no notes."""
        if getattr(error, "__notes__", ()) or not hasattr(error, "add_note"):
            return
        given = ""
        if isinstance(evaluator.subject, Subject) and evaluator.subject.user_function:
            given = f", given layout {'thd' if self.workload.is_packed else self.mark.declared.layout}"
        by = labeled("by", f"{evaluator.name} on {evaluator.on}{given}")
        error.add_note("\n".join([by, labeled("reproduce", self.command)]))

    def _remember(self, evaluator: Evaluator[Any], reason: str) -> None:
        """Keep what a backend has said when it compiled, so that no other test of the workload compiles to hear it again.

        Not what a user's own function says, which may depend on what its test has set.
        """
        subject, evidence = self.asked, evaluator.evidence
        if not isinstance(evidence, FailureToSave) or subject is None or subject is not evaluator.subject:
            return
        if subject.is_backend and subject.library != FunctionBackend.library:
            self.session.refused[subject, evidence.spec.workload, evidence.spec.backward, self.machine] = reason

    def _require_contained(self, evaluator: Evaluator[Any]) -> None:
        """Fail under --attn-isolated for anything whose author's code runs in this process."""
        __tracebackhide__ = True
        subject = evaluator.subject
        is_contained = isinstance(evaluator, Refusal) or (isinstance(subject, Subject) and subject.is_contained)
        if self.session.settings.isolated is None or is_contained:
            return
        fn = subject.user_function if isinstance(subject, Subject) else None
        name = f"{getattr(fn, '__module__', None)}:{getattr(fn, '__qualname__', None)}"
        name = name if fn and is_name(name) else "MODULE:FUNCTION"
        shown = subject if isinstance(subject, str) else subject.name
        pytest.fail(
            f"--attn-isolated: {shown} computes in the process that judges it; name a function in its place, as in"
            f' attn.check("{name}"), or leave out --attn-isolated',
            pytrace=False,
        )

    def _leave_record(self, evaluator: Evaluator[Any], found: Judgment[Any]) -> None:
        subject, backward = evaluator.subject, self.mark.backward
        is_known = bool(found.known_defects)
        fields = {
            "question": evaluator.question,
            "direction": "forward+backward" if backward else "forward",
            "backward": backward,
            "verdict": (Verdict.KNOWN_DEFECT if is_known else found.verdict).value,
            "reason": found.known_defects or found.reason,
            "explanation": taken_apart("\n".join([found.text, *found.remedies]), found.width) if found.text else (),
            "test": id_from_root(self.item),
            "command": self.command,
        }
        facts = facts_of(self.session, found.workload or evaluator.workload, subject, self.mark.device)
        leave_record(self.item, new_record(**{**facts, **fields, **evaluator.fields, **found.fields}))
        self.item.user_properties += found.properties.items()

    def _saved(self, message: str, found: Judgment[Any]) -> list[str]:
        """Save a failure where --attn-save-failures asks for it; return a line that says where, or why not."""
        folder = self.session.settings.save_failures
        if folder is None or not self.saves_failures or not found.evidence:
            return []
        if not isinstance(found.evidence, FailureToSave):
            return [labeled("not saved", found.evidence, found.width)]
        unnamed = self.executor.unnamed_because
        saver = FailureSaver(folder, self.session, self.item, found.evidence, message, self.command, unnamed)
        with self.session.progress.during("saving tensors", self.workload.id):
            return [saver.save(found.width)]

    @property
    def saves_failures(self) -> bool:
        """Whether what a judgment saw is saved where it fails."""
        return self.session.settings.save_failures is not None and self.session.kernels.are_tested

    @property
    def command(self) -> str:
        """The shell command that runs exactly this case again."""
        settings = self.session.settings
        given = {k: v for k, v in settings.given.items() if k not in ("backends", "workloads")}
        if self.backend is not None:
            given["backends"] = self.backend.name
        if settings.workloads and self.workload.name:
            given["workloads"] = self.workload.name
        if self._drawn:
            given["rows"] = ",".join(map(str, self._drawn))
        given.setdefault("device", str(self.session.machines.device(self.mark.device)))
        if settings.isolated is not None:
            given["isolated"] = settings.isolated
        options = {one.stem: one for one in declared_options(type(settings))}
        return " ".join(
            ["pytest", shlex.quote(typed_name(self.item)), *(options[stem].typed(text) for stem, text in given.items())]
        )

    # -- what is judged ------------------------------------------------------------------------------------------------

    @property
    def machine(self) -> Machine:
        """The device, described."""
        return self.session.machines.machine(self.mark.device)

    def subject(
        self, target: Target, name: str | None, spec: CheckSpec, backward: bool = False, dequantized: Dequantizer | None = None
    ) -> Subject:
        """Return what a test handed over, behind its one type; skips the test where a backend cannot take the case.

        A workload of a group that drops probabilities is for callables that say which: it skips the others.

        backward: whether gradients are needed although the marker does not ask for them. dequantized: what a callable that
        quantizes makes of q, k and v. Raises as `Registry.subject` does.
        """
        if spec.drops_unseen and self.session.registrations.catalog.group_of(self.workload.name):
            self.skip(None, "has dropout: needs a callable that returns which weights it kept, returns=('out', 'keep')")
        test = getattr(getattr(self.item, "function", None), "__qualname__", "")
        subject = self._told_apart(self.session.kernels.subject(target, name, spec, self.backend, test, dequantized))
        is_unasked = isinstance(target, str) or (backward and not self.mark.backward)
        if subject.is_backend and is_unasked and self.session.kernels.are_tested:
            self.skip_unless_runnable(subject, backward)
        return subject

    def place(self, subject: Subject) -> Subject:
        """Return what computes a subject where the case runs."""
        __tracebackhide__ = True
        if function := isolated_of(subject):
            self.conclude(Starting(subject, self.workload, f"importing {subject.name} in its process", function.start))
        return self.executor.place(subject, self.conclude)

    def timing(self, subject: Subject) -> TimingPlace:
        """Return where a subject is timed that was placed."""
        function = isolated_of(subject)
        return TimedIsolated(function) if function else self.executor.timing

    def _told_apart(self, subject: Subject) -> Subject:
        """Number the callables of a test that reports would call alike, unless the test itself has named them so."""
        function = subject.user_function
        if function is None or subject.given_name:
            return subject
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
        subject = self.executor.asked(subject)
        parameters = parameters_of(self.workload, self.mark.parameters)
        if subject is not None and subject.is_backend and parameters:
            named = ", ".join(parameters)
            reason = f"the marker compares a gradient of {named}, which a callable has, but no backend"
            self.skip(subject, reason, cause=Cause.DECLINED)
        obstacle = subject.obstacle if subject else obstacle_of_any
        asked = self.workload, self.machine, backward or self.mark.backward
        if obstruction := obstacle(*asked):
            is_missing = subject is not None and obstruction == self._missing_because(subject, asked[2])
            is_own = subject is not None and not is_missing and subject.declines(*asked) == obstruction
            self.skip(subject, obstruction, cause=Cause.NOT_HERE if is_missing else Cause.DECLINED if is_own else None)
        if subject is not None and (said := self.session.refused.get((subject, self.workload, asked[2], self.machine))):
            self.skip(subject, said, cause=Cause.DECLINED)

    def _missing_because(self, subject: Subject, backward: bool) -> str | None:
        """Say that it is not here, or cannot be imported, which is not tried for what it declares to refuse."""
        missing = subject.unavailable_because(self.machine)
        return missing or (subject.broken_because() if subject.claims(self.workload, backward) else None)

    def skip(self, subject: Subject | None, reason: str, **fields: Any) -> NoReturn:
        """Skip the test, with a record. subject: None where the reason is none of its own. fields: more of the record."""
        __tracebackhide__ = True
        self.conclude(Refusal(self.workload, subject, reason, **fields))
        raise AssertionError("a refusal skips its test")

    def deadline(self, subject: Subject) -> Callable[[], AbstractContextManager[object]]:
        """Return what makes the context of one call, which must end in time."""
        has_own = self.executor.has_deadline or isolated_of(subject)
        case = f"{subject.name} on {self.workload.id}, {self.item.nodeid}"
        # in the first call; ranks say what they do by themselves
        doing = iter([f"compiling {subject.name}"] if subject.compiles and not self.executor.has_deadline else ())

        @contextmanager
        def around() -> Iterator[None]:
            limited = nullcontext() if has_own else self.session.deadline.around(case)
            with self.session.progress.during(next(doing, ""), self.workload.id), limited:
                yield

        return around

    def defects_of(self, subject: Subject) -> list[KnownDefect]:
        """List the known defects that have this case in their reach."""
        return subject.defects_on(self.workload, self.machine, self.mark.backward)
