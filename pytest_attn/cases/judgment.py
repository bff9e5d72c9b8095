"""What was found of a subject, as data, in the terms in which every kind of judgment is concluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.reports.lines import LABEL_WIDTH, labeled
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.workloads.workload import Workload

Result = TypeVar("Result")


@dataclass(frozen=True)
class FailureEvidence:
    """What was judged where a failure was found.

    subject: None where only its output is known. comparison: with the first mismatch, and the tensors that it kept; without
    one, as of a broken contract or of `broken` invariants, the inputs tell all.
    """

    spec: CheckSpec
    subject: Subject | None
    comparison: Comparison | None = None
    broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgment(Generic[Result]):
    """The findings on one subject. They are data: `conclude` reads it, and ends the test.

    Args:
        verdict: of its record.
        result: what the test is given where it passes.
        reason: of the record, in one line; "" where there is nothing to say.
        text: what a failure says; "" where the judgment passed.
        known_defects: those that explain all that is wrong, in words: the failure is an expected one.
        skip: what pytest says where nothing was judged or decided; it does not count as passed.
        fields: further fields of the record; they go before those that all judgments have.
        evidence: what guests are given of a failure; or why nothing can be, "" where nothing need be said of it.
        rows: wrong ones that this judgment has drawn, at which a repeated one is to look.
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
    evidence: FailureEvidence | str = ""
    rows: tuple[int, ...] = ()
    remedies: Sequence[str] = ()
    width: int = LABEL_WIDTH
    error: Exception | None = None
    workload: Workload | None = None
    is_recorded: bool = True
    says_command: bool = True

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
