"""A kind of judgment: it asks one question about one subject, and knows nothing of how a test ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic

from pytest_attn.backends.raised import EndsTestError, RemoteRaisedError
from pytest_attn.backends.subject import RefusedError, Subject
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.judgment import FailureEvidence, Judgment, Result
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.mismatch_text import describe_contract
from pytest_attn.reports.lines import labeled
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.session.deadline import DeadlineError
from pytest_attn.workloads.workload import Workload

#: what a kernel may do that does not take a case
_DECLINE = 'raise NotImplementedError("why"), which declines the case'


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

    @abstractmethod
    def judge(self, context: CaseContext) -> Judgment[Result]:
        """Return what is found. context: the case, and what its judgments may use; nothing of it ends the test.

        ContractError, DeadlineError, RefusedError, RemoteRaisedError and EndsTestError of the subject may pass through, and
        are concluded as `ended` says. So may what it raises itself, which fails the test as it is.
        """

    @property
    def evidence(self) -> FailureEvidence | str:
        """Evidence for guests where a result cannot be compared, as `Judgment.evidence`."""
        return ""

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
        if isinstance(error, RemoteRaisedError):  # as in one process, where it raises: pytest's report leaves the record
            return Judgment(Verdict.RAISED, text=str(error), is_recorded=False)
        assert isinstance(error, DeadlineError)
        return Judgment(Verdict.NO_RESULT, reason=reason, text=str(error))


class Refusal(Evaluator[Any]):
    """A case that cannot run, as `refusal` says. subject: None where the reason is none of its own."""

    doing, on = "", ""

    def __init__(self, workload: Workload, subject: Subject | None, refusal: Judgment[Any], question: str = "check") -> None:
        self.workload, self.subject, self.question, self._refusal = workload, subject or "-", question, refusal

    def judge(self, context: CaseContext) -> Judgment[Any]:
        return self._refusal
