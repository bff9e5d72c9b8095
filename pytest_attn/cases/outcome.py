"""How one judgment of a case ends: its record, and the failure, skip or expected failure of its test.

What a failing test says is written by messages/; here the command that repeats the case, and where its tensors were saved,
are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_attn.cases.records import facts_of, figures_of, leave_record
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.messages.lines import LABEL_WIDTH, labeled
from pytest_attn.messages.mismatch import headline
from pytest_attn.reports.records import new_record
from pytest_attn.session.session import AttentionSession
from pytest_attn.verdict import Verdict
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from pytest_attn.backends.subject import Subject


class Outcome:
    """Ends the judgments of one case. command: what to type to run it again; backward: whether it asks for gradients."""

    def __init__(
        self,
        session: AttentionSession,
        item: pytest.Item,
        workload: Workload,
        device: str | None,
        backward: bool,
        command: str,
    ) -> None:
        self._session, self._item, self._workload, self._device = session, item, workload, device
        self._backward, self._command = backward, command

    def record(
        self,
        subject: Subject | str,
        verdict: Verdict,
        comparison: Comparison | None = None,
        **known: Any,
    ) -> None:
        """Leave the record of a judgment. subject: or what reports call it; known: more fields, by default a check's."""
        is_wrong = verdict is Verdict.MISMATCH and comparison is not None and not comparison.passed
        reason = headline(comparison) if is_wrong and comparison else ""
        fields: dict[str, Any] = {
            "question": "check",
            "direction": "forward+backward" if self._backward else "forward",
            "backward": self._backward,
            "reason": reason,
            **figures_of(comparison),
            **known,
        }
        facts = facts_of(self._session, self._workload, subject, self._device)
        where = {"test": self._item.nodeid, "command": self._command}
        leave_record(self._item, new_record(verdict=verdict.value, **facts, **where, **fields))
        if comparison is not None:
            worst = comparison.worst
            name = subject if isinstance(subject, str) else subject.name
            self._item.user_properties.append((f"attn_z_{name}", f"{worst.z_element:.4g} ({worst.name})"))

    def fail(self, text: str, save: Callable[[str], str] | None = None, width: int = LABEL_WIDTH, also: str = "") -> NoReturn:
        """Fail the test. save: saves a message, and returns a line about that; width: of labels; also: a line of its own."""
        __tracebackhide__ = True
        message = "\n".join(filter(None, (text, labeled("reproduce", self._command, width), also)))
        raise AssertionError(f"{message}\n{save(message)}" if save else message)

    def skip(self, subject: Subject | None, reason: str, question: str = "check", **known: Any) -> NoReturn:
        """Skip the test, with its record. subject: None where the reason is none of its own. known: more fields."""
        __tracebackhide__ = True
        self.record(subject or "-", Verdict.SKIPPED, reason=reason, question=question, **known)
        pytest.skip(f"{subject.name}: {reason}" if subject else reason)

    def xfail(
        self, subject: Subject | str, known: str, comparison: Comparison | None = None, question: str = "check", **fields: Any
    ) -> NoReturn:
        """Expect the failure of the test, with its record: what is wrong is a known defect. fields: more of the record."""
        __tracebackhide__ = True
        self.record(subject, Verdict.KNOWN_DEFECT, comparison, reason=known, question=question, **fields)
        pytest.xfail(f"known defect {known}")
