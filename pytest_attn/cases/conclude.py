"""How each judgment ends, whatever is judged and wherever it runs: judge, then record, then end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, cast

import pytest

from pytest_attn.backends.raised import EndsTestError, RemoteRaisedError, ending_no_test, message_of
from pytest_attn.backends.subject import RefusedError, Subject, name_of
from pytest_attn.cases.case_records import RECORDS, facts_of
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.evaluator import Evaluator, Refusal
from pytest_attn.cases.judgment import FailureEvidence, Judgment, Result
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.known_pair import JudgeChangedError, judge_kept, require_unchanged
from pytest_attn.reports.lines import labeled, taken_apart
from pytest_attn.reports.records import new_record
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.deadline import DeadlineError
from pytest_attn.session.kinds import id_from_root

__tracebackhide__ = True  # a failure is raised in the test's own frame


def conclude(context: CaseContext, evaluator: Evaluator[Result]) -> Result:
    """Have an evaluator judge; return the result of what passed, and end the test of anything else.

    A terminal says what takes long; a record is left. The test goes on, is skipped, fails as expected (xfail), or fails with
    its text and the command that repeats it.
    """
    __tracebackhide__ = True
    if context.session.kernels.judges_nothing:
        evaluator = context.session.kernels.asking(evaluator)
    context.is_judged, context.question = True, evaluator.question
    if (elsewhere := context.session.registrations.named) and not isinstance(evaluator, Refusal):
        elsewhere.require_contained(evaluator.subject, context.executor)
    found = _judged(context, evaluator)
    if context.session.settings.declines == "fail" and context.session.kernels.are_tested:
        found = found.failing_if_declined()
    if found.is_recorded:
        _leave_record(context, evaluator, found)
    if found.text or found.skip or found.error:
        _end(context, name_of(evaluator.subject), found)
    return cast(Result, found.result)


def skip_unless_runnable(context: CaseContext, subject: Subject | None, backward: bool = False) -> None:
    """Skip the test, with the reason, where the device or the subject cannot take the case; as `CaseContext.refusal` says."""
    __tracebackhide__ = True
    if refusal := context.refusal(subject, backward):
        conclude(context, Refusal(context.workload, context.executor.asked(subject), refusal))


def skip(context: CaseContext, subject: Subject | None, reason: str) -> NoReturn:
    """Skip the test, with a record. subject: None where the reason is none of its own."""
    __tracebackhide__ = True
    conclude(context, Refusal(context.workload, subject, Judgment.refused(subject, reason)))
    raise AssertionError("a refusal skips its test")


def require_judge(item: pytest.Item) -> None:
    """End the run where the judge of this process was changed, at the end of a test."""
    try:
        require_unchanged()
    except JudgeChangedError as error:
        if not item.session.shouldfail:  # which its judgment has said
            _end_run(item, error)


def _end_run(item: pytest.Item, error: JudgeChangedError) -> NoReturn:
    """Fail a test, and have no other one run; `pytest.exit` would leave xdist's controller without the test's result."""
    item.session.shouldfail = str(error).partition(":")[0]
    raise pytest.fail.Exception(str(error), pytrace=False) from None


# -- judge -------------------------------------------------------------------------------------------------------------


def _judged(context: CaseContext, evaluator: Evaluator[Result]) -> Judgment[Result]:
    """Return what an evaluator finds, or what the error says of its subject that ended it."""
    __tracebackhide__ = True
    name, progress = name_of(evaluator.subject), context.session.progress.during(evaluator.doing, evaluator.on)
    kept: AbstractContextManager[None] = nullcontext()
    if evaluator.doing:  # else nothing is called, and its device may not be there
        kept = judge_kept(
            f"{name_of(evaluator.subject)} on {evaluator.on}", context.session.machines.device(context.mark.device)
        )
    try:
        with ending_no_test(name, calls=False), progress, kept:
            return evaluator.judge(context)
    except RefusedError as error:
        if isinstance(evaluator.evidence, FailureEvidence) and evaluator.evidence.subject is evaluator.subject:
            context.remember_refusal(evaluator.evidence.subject, evaluator.evidence.spec, str(error))
        return evaluator.ended(error)
    except (ContractError, DeadlineError, EndsTestError, RemoteRaisedError) as error:
        return evaluator.ended(error)
    except JudgeChangedError as error:
        _end_run(context.item, error)
    except Exception as error:
        if not ("out of memory" in message_of(error) and context.session.take_whole_memory()):
            _note(context, evaluator, error)
            raise
    finally:
        context.asked = evaluator.subject if isinstance(evaluator.subject, Subject) else context.asked
    return _judged(context, evaluator)  # once more, as the other workers of the GPU took the memory


def _note(context: CaseContext, evaluator: Evaluator[Any], error: Exception) -> None:
    """Say beneath what a callable raised what it was given, and how to repeat it; Python 3.10 has no notes."""
    if getattr(error, "__notes__", ()) or not hasattr(error, "add_note"):
        return
    given = ""
    if isinstance(evaluator.subject, Subject) and evaluator.subject.user_function:
        given = f", given layout {'thd' if context.workload.is_packed else context.mark.declared.layout}"
    lines = [labeled("by", f"{name_of(evaluator.subject)} on {evaluator.on}{given}")]
    if context.machine.device == "cpu" and any(words in message_of(error) for words in _MISSES_CUDA):
        here = "the tensors of this case are on the cpu: compute where q is, q.device"
        lines.append(labeled("device", f"{here}; a test for GPUs alone has @pytest.mark.attention_requires(gpus=1)"))
    if context.backend and f"{type(context.backend).__name__!r} object is not callable" in message_of(error):
        lines.append(
            labeled("backend", "attn_backend is not a function of (q, k, v): hand it over itself, attn.check(attn_backend)")
        )
    error.add_note("\n".join([*lines, labeled("reproduce", context.command())]))


#: what torch says of CUDA that is not there, and of tensors on two devices
_MISSES_CUDA = ("not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available", "at least two devices")


# -- record ------------------------------------------------------------------------------------------------------------


def _leave_record(context: CaseContext, evaluator: Evaluator[Any], found: Judgment[Any]) -> None:
    subject, backward = evaluator.subject, context.mark.backward
    is_known = bool(found.known_defects)
    fields = {
        "question": evaluator.question,
        "direction": "forward+backward" if backward else "forward",
        "backward": backward,
        "verdict": (Verdict.KNOWN_DEFECT if is_known else found.verdict).value,
        "reason": found.known_defects or found.reason,
        "explanation": taken_apart("\n".join([found.text, *found.remedies]), found.width) if found.text else (),
        "test": id_from_root(context.item),
        "command": context.command(found.rows),
    }
    facts = facts_of(context.session, found.workload or evaluator.workload, subject, context.mark.device)
    left = context.item.stash.setdefault(RECORDS, [])
    left.append(new_record(**{**facts, **fields, **evaluator.fields, **found.fields}))


# -- end ---------------------------------------------------------------------------------------------------------------


def _end(context: CaseContext, name: str, found: Judgment[Any]) -> NoReturn:
    """End the test as a judgment says that has not passed."""
    __tracebackhide__ = True
    if found.skip:
        pytest.skip(found.skip)
    if found.known_defects:
        pytest.xfail(f"known defect {found.known_defects}")
    if found.error is not None:
        # its own code, which said what it is, may have made it another exception
        with ending_no_test(name):
            raise found.error
    reproduce = [labeled("reproduce", context.command(found.rows), found.width)] if found.says_command else []
    text = "\n".join([found.text, *reproduce, *found.remedies])
    raise AssertionError("\n".join([text, *(line for said in context.failing for line in said(context, text, found))]))
