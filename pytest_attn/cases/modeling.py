"""`attn_model.check`: judge a model's attention, leave its record, and let the outcome end the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_attn.cases.outcome import Outcome
from pytest_attn.cases.run import CaseRun
from pytest_attn.models.check import Target, judge_model
from pytest_attn.models.comparison import CallComparison, ModelComparison
from pytest_attn.models.message import headline
from pytest_attn.models.replacing import replacement
from pytest_attn.verdict import Verdict
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


def check_model(
    run: CaseRun,
    model: torch.nn.Module,
    step: Callable[[], Any],
    target: Target | None,
    functions: tuple[Callable[..., Any] | str, ...],
    scatter: int,
) -> ModelComparison:
    """Judge a model; return the comparison of one that is right, and end the test of another."""
    __tracebackhide__ = True
    subject = None if target is None else replacement(target, run.session.registrations.registry)
    name, limits, backward = type(model).__name__, run.session.settings.limits, run.mark.backward
    with run.session.progress.during(f"checking {subject.name if subject else 'the attention'}", name):
        found = judge_model(model, step, subject, backward, functions=functions, limits=limits, scatter=scatter)
    outcome = _outcome(run, name, found)
    whose = subject or "model"
    if subject is not None and found.refused and not any(call.is_replaced for call in found.calls):
        outcome.skip(subject, "; ".join(dict.fromkeys(refused.reason for refused in found.refused)))
    verdict = Verdict.PASSED if found.passed else Verdict.MISMATCH
    reason = "" if found.passed else headline(found)
    worst = found.worst
    comparison = worst.comparison if worst else None
    details = {"calls": [_facts(call) for call in found.calls], "ratios": dict(found.ratios)}
    outcome.record(whose, verdict, comparison, reason=reason, **details)
    if not found.passed:
        outcome.fail(found.message)
    return found


def _outcome(run: CaseRun, name: str, found: ModelComparison) -> Outcome:
    """Return what ends the judgment: in reports the model's name stands for the workload of its worst call."""
    worst = found.worst
    workload = replace(worst.workload if worst else Workload(1), name=name)
    mark = run.mark
    return Outcome(run.session, run.item, workload, mark.device, mark.backward, run.command)


def _facts(call: CallComparison) -> dict[str, Any]:
    """Return what a record says of one call, as builtin types."""
    worst = call.comparison.worst if call.comparison else None
    return {
        "module": call.label,
        "function": call.function,
        "workload": call.workload.id,
        "passed": call.passed,
        "backward": call.has_gradients,
        "tensor": worst.name if worst else "",
        **{name: getattr(worst, name) if worst else None for name in ("z_element", "z_row", "z_head")},
        "reason": call.fault,
    }
