"""What a subject is judged on, and what was found, in the terms in which every kind of judgment is concluded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pytest_attn.backends.raised import EndsTestError
from pytest_attn.backends.subject import RefusedError, Subject
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.mismatch_text import describe_contract
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.ranks.rank_group import RankRaisedError
from pytest_attn.reports.lines import LABEL_WIDTH, labeled
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.session.deadline import DeadlineError
from pytest_attn.workloads.workload import Workload

Result = TypeVar("Result")
#: what a kernel may do that does not take a case
_DECLINE = 'raise NotImplementedError("why"), which declines the case'


@dataclass(frozen=True)
class FailureToSave:
    """What --attn-save-failures writes of a failure.

    subject: None where only its output is known. comparison: with the first mismatch, and the tensors that it kept; without
    one, as of a broken contract or of `broken` invariants, the inputs are saved.
    """

    spec: CheckSpec
    subject: Subject | None
    comparison: Comparison | None = None
    broken: tuple[str, ...] = ()

    @property
    def drawn(self) -> tuple[int, ...]:
        """Wrong rows that this call alone was asked about, as `Mismatch.drawn`."""
        mismatch = self.comparison.mismatch if self.comparison else None
        return mismatch.drawn if mismatch else ()


@dataclass(frozen=True)
class Judgment(Generic[Result]):
    """What was found of one subject. It is data: `CaseRun.conclude` reads it, and ends the test.

    Args:
        verdict: of its record.
        result: what the test is given where it passes.
        reason: of the record, in one line; "" where there is nothing to say.
        text: what a failure says; "" where the judgment passed.
        known_defects: those that explain all that is wrong, in words: the failure is an expected one.
        skip: what pytest says where nothing was judged or decided; it does not count as passed.
        fields: further fields of the record; they go before those that all judgments have.
        properties: what is added to the test's report, for JUnit XML and the like.
        evidence: what is saved of a failure; or why nothing can be, "" where nothing need be said of it.
        remedies: lines after the command that repeats the case.
        width: of the labels in `text`.
        error: what the test raises in place of a failure with `text`.
        workload: of the record, where that is known only now.
        is_recorded: whether it leaves a record here.
        says_command: whether the command that repeats the case comes after `text`, which may say it itself.
    """

    verdict: Verdict
    result: Result | None = None
    reason: str = ""
    text: str = ""
    known_defects: str = ""
    skip: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    evidence: FailureToSave | str = ""
    remedies: Sequence[str] = ()
    width: int = LABEL_WIDTH
    error: Exception | None = None
    workload: Workload | None = None
    is_recorded: bool = True
    says_command: bool = True

    @property
    def passed(self) -> bool:
        """Whether the test goes on, with `result`."""
        return not (self.text or self.skip or self.error)

    @classmethod
    def refused(cls, subject: Subject | str | None, reason: str, cause: Cause | None = None, **more: Any) -> Judgment[Result]:
        """Return that a subject, or what it runs on, cannot take the case.

        subject: None where the reason is none of its own. cause: `Cause.DECLINED` where it says so itself.
        """
        name = subject if isinstance(subject, str) else subject.name if subject else ""
        fields = {**more.pop("fields", {}), "cause": cause.value if cause else ""}
        return cls(Verdict.SKIPPED, reason=reason, skip=f"{name}: {reason}" if name else reason, fields=fields, **more)

    def failing_if_declined(self) -> Judgment[Result]:
        """Return the failure that --attn-declines=fail makes of what was declined; anything else as it is."""
        if not self.skip or self.fields.get("cause") != Cause.DECLINED:
            return self
        text = f"declined: {self.skip}\n{labeled('allow', '--attn-declines=skip, which skips what a kernel declines')}"
        return replace(self, verdict=Verdict.NO_RESULT, reason=f"declined: {self.reason}", skip="", text=text)


class Evaluator(ABC, Generic[Result]):
    """Asks one question about one subject. A kind of judgment is a class of these.

    subject: or what reports call it. workload: of the record. doing, on: what a terminal says meanwhile.
    """

    #: what was asked, in records: "check", "invariants", "latency", or the word of a kind of its own
    question = "check"
    #: the verdict over a subject whose result cannot be compared
    wrong = Verdict.MISMATCH
    subject: Subject | str
    workload: Workload
    doing: str
    on: str
    #: fields that each record of this question has
    fields: Mapping[str, Any] = MappingProxyType({})
    #: what is saved of a subject whose result cannot be compared, as `Judgment.evidence`
    evidence: FailureToSave | str = ""

    @abstractmethod
    def judge(self) -> Judgment[Result]:
        """Return what is found.

        ContractError, DeadlineError, RefusedError, RankRaisedError and EndsTestError of the subject may pass through, and are
        concluded as `ended` says. So may what it raises itself, which fails the test as it is.
        """

    @property
    def name(self) -> str:
        """What reports call the subject."""
        return self.subject if isinstance(self.subject, str) else self.subject.name

    def ended(self, error: BaseException) -> Judgment[Result]:
        """Return what an error that ended the judgment says of the subject."""
        if isinstance(error, RefusedError):
            return Judgment.refused(self.subject, str(error), Cause.DECLINED)
        reason = str(error).splitlines()[0].rstrip(":")
        if isinstance(error, ContractError):
            fields = {"faults": (error.fault,)} if error.fault else {}
            text = describe_contract(error)
            return Judgment(self.wrong, reason=reason, text=text, fields=fields, evidence=self.evidence)
        if isinstance(error, EndsTestError):
            where = [labeled("at", error.where)] if error.where else []
            text = "\n".join([str(error), *where, labeled("instead", _DECLINE)])
            return Judgment(Verdict.RAISED, reason=reason, text=text)
        if isinstance(error, RankRaisedError):  # as in one process, where it raises: pytest's report leaves the record
            return Judgment(Verdict.RAISED, text=str(error), is_recorded=False)
        assert isinstance(error, DeadlineError)
        return Judgment(Verdict.NO_RESULT, reason=reason, text=str(error))


class Refusal(Evaluator[Any]):
    """A case that cannot run. subject: None where the reason is none of its own."""

    doing, on = "", ""

    def __init__(self, workload: Workload, subject: Subject | None, reason: str, **fields: Any) -> None:
        self.workload, self.subject, self._refused, self._reason = workload, subject or "-", subject, reason
        self.question, self._cause = fields.pop("question", "check"), fields.pop("cause", None)
        self.fields = fields

    def judge(self) -> Judgment[Any]:
        return Judgment.refused(self._refused, self._reason, self._cause)


class Starting(Evaluator[Result]):
    """Has what computes a subject get ready. start: does so, and returns what the judgment gives."""

    def __init__(self, subject: Subject, workload: Workload, doing: str, start: Callable[[], Result]) -> None:
        self.subject, self.workload, self._start = subject, workload, start
        self.doing, self.on = doing, workload.id

    def judge(self) -> Judgment[Result]:
        """Start it; only what goes wrong leaves a record."""
        return Judgment(Verdict.PASSED, self._start(), is_recorded=False)
