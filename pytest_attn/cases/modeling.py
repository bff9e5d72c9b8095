"""`attn_model.check` and `measure`: judge a model's attention, time its step, and let the outcome end the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import Subject
from pytest_attn.cases.measuring import Measuring
from pytest_attn.cases.outcome import Outcome
from pytest_attn.cases.run import CaseRun
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.invariants.report import InvariantReport
from pytest_attn.latency.result import Latency
from pytest_attn.messages import invariants
from pytest_attn.models.check import Target, judge_model
from pytest_attn.models.comparison import CallComparison, ModelComparison
from pytest_attn.models.compiled import is_compiled
from pytest_attn.models.message import headline
from pytest_attn.models.replacement import ModelAttention, replacement
from pytest_attn.models.token_invariants import Names, judge_model_invariants
from pytest_attn.session.deadline import DeadlineError
from pytest_attn.timing.model_measurement import ModelMeasurement
from pytest_attn.verdict import Verdict
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: what need not fail the test of a model
Excuse: TypeAlias = Literal["refusals", "known defects"]


def check_model(
    run: CaseRun,
    model: torch.nn.Module,
    step: Callable[[], Any],
    target: Target | None,
    functions: Iterable[Callable[..., Any] | str],
    scatter: int,
    precision: str | Precision | None = None,
    compiled: bool = True,
    excused: tuple[Excuse, ...] = (),
) -> ModelComparison:
    """Judge a model; return the comparison if it passed, else end the test.

    Raises ValueError for an excuse that is none.
    """
    __tracebackhide__ = True
    if unknown := sorted(set(excused) - set(get_args(Excuse))):
        raise ValueError(f"unknown excuse {unknown[0]!r}; known: {', '.join(get_args(Excuse))}")
    subject = None if target is None else replacement(target, run.session.registrations.registry, precision)
    name, limits, backward = type(model).__name__, run.session.settings.limits, run.mark.backward
    whose, who = subject or "model", subject.name if subject else "the attention"
    try:
        with run.session.progress.during(f"checking {who}", name):
            found = judge_model(
                *(model, step, subject, backward),
                functions=functions,
                limits=limits,
                scatter=scatter,
                precision=precision,
                compiled=compiled,
                deadline=lambda: run.session.deadline.around(f"{who} of {name}, {run.item.nodeid}"),
            )
    except DeadlineError as error:
        _outcome(run, name, None).record(whose, Verdict.NO_RESULT, reason=str(error), model=name)
        raise AssertionError(str(error)) from None
    outcome = _outcome(run, name, found)
    if subject is not None and found.refused and (_refuses_all(found) or ("refusals" in excused and found.lacks_refused_only)):
        outcome.skip(subject, "; ".join(dict.fromkeys(refused.reason for refused in found.refused)), model=name)
    verdict = Verdict.PASSED if found.passed else Verdict.MISMATCH
    reason = "" if found.passed else headline(found)
    worst = found.worst
    comparison = worst.comparison if worst else None
    details: dict[str, Any] = {"calls": [_facts(call) for call in found.calls], "ratios": dict(found.ratios), "model": name}
    details["notes"] = list(found.notes)
    details["compiled"] = found.compiled.to_dict() if found.compiled else None
    if found.known_defects and (subject is not None or "known defects" in excused):
        outcome.xfail(whose, "; ".join(found.known_defects), comparison, **details)
    outcome.record(whose, verdict, comparison, reason=reason, **details)
    if not found.passed:
        outcome.fail(found.message)
    return found


def _refuses_all(found: ModelComparison) -> bool:
    return not any(call.is_replaced for call in found.calls)


def _outcome(run: CaseRun, name: str, found: ModelComparison | None) -> Outcome:
    """Return what ends the judgment: in reports the model's name stands for the workload of its first call."""
    mark = run.mark
    return Outcome(run.session, run.item, workload_of(name, found), mark.device, mark.backward, run.command)


def workload_of(name: str, found: ModelComparison | None) -> Workload:
    """Return what stands for a model in records: what its first call asks, whoever computes it, under the model's name."""
    return replace(found.calls[0].workload if found and found.calls else Workload(1), name=name)


def _facts(call: CallComparison) -> dict[str, Any]:
    """Return what a record says of one call, as builtin types."""
    worst = call.comparison.worst if call.comparison else None
    return {
        "module": call.label,
        "function": call.function,
        "kernel": call.kernel,
        "workload": call.workload.id,
        "passed": call.passed,
        "backward": call.has_gradients,
        "tensor": worst.name if worst else "",
        **{name: getattr(worst, name) if worst else None for name in ("z_element", "z_row", "z_head")},
        "reason": call.fault,
    }


def check_invariants(
    run: CaseRun, model: torch.nn.Module, batch: Any, only: Names, skip: Names, causal: bool | None
) -> InvariantReport:
    """Ask a model every invariant; return the report of one that keeps them, and end the test of another."""
    __tracebackhide__ = True
    name = type(model).__name__
    outcome = _outcome(run, name, None)
    with run.session.progress.during("trying the invariants of", name):
        report = judge_model_invariants(model, batch, only, skip, causal)
    fields: dict[str, Any] = {"question": "invariants", "model": name}
    if not report.applied:
        reasons = "; ".join(f"{finding.invariant}: {finding.evidence}" for finding in report.findings)
        outcome.skip(None, f"no invariant that was asked for applies: {reasons}", **fields)
    verdict = Verdict.HELD if report.passed else Verdict.BROKEN
    outcome.record("model", verdict, reason=", ".join(finding.invariant for finding in report.broken), **fields)
    if not report.passed:
        outcome.fail(invariants.describe(report), width=invariants.LABEL_WIDTH)
    return report


# -- measuring -----------------------------------------------------------------------------------------------------------


class ModelMeasuring:
    """The measurements of one test of a model, each after a check of the same model, step and backend."""

    def __init__(self, run: CaseRun) -> None:
        self._run, self._measuring = run, Measuring(run)
        self._checked: tuple[object, ...] = ()
        self._comparison: ModelComparison | None = None

    def note(self, asked: tuple[object, ...], found: ModelComparison) -> None:
        """Keep that this model, step and backend are right."""
        self._checked, self._comparison = asked, found

    def measure(
        self,
        model: torch.nn.Module,
        step: Callable[[], Any],
        target: Target | None,
        optimizer: torch.optim.Optimizer | None,
        functions: tuple[Callable[..., Any] | str, ...],
    ) -> Latency:
        """Check unless that was just done, then time; end the test of what is wrong, slower, or cannot be timed."""
        __tracebackhide__ = True
        run = self._run
        subject = ModelAttention() if target is None else replacement(target, run.session.registrations.registry)
        if optimizer is not None and not run.mark.backward:
            raise ValueError("attn_model.measure: an optimizer needs gradients; leave out backward=False of the marker")
        self._measuring.expect(run.session.machines.device(run.mark.device))
        is_checked = self._checked == (model, step, target)
        if self._measuring.timekeeper.checks_first and not is_checked:
            # not yet compiled, so that the first call is timed with what the compiler takes
            found = check_model(run, model, step, target, functions, scatter=0, compiled=False)
            self.note((model, step, target), found)
        if target is not None and is_compiled(model):
            reason = "a model that torch.compile made is timed as it is; give measure the model before it is compiled"
            _outcome(run, type(model).__name__, self._comparison).skip(subject, reason, "latency")
        return self._measuring.measure(self._measuring.number(self._measurement(model, step, subject, optimizer, functions)))

    def _measurement(
        self,
        model: torch.nn.Module,
        step: Callable[[], Any],
        subject: Subject,
        optimizer: torch.optim.Optimizer | None,
        functions: tuple[Callable[..., Any] | str, ...],
    ) -> ModelMeasurement:
        run, found = self._run, self._comparison
        name = type(model).__name__
        device = run.session.machines.device(run.mark.device)
        worst = found.worst if found else None
        return ModelMeasurement(
            session=run.session,
            item=run.item,
            spec=CheckSpec(workload_of(name, found), device, backward=run.mark.backward),
            subject=subject,
            direction="forward+backward" if run.mark.backward else "forward",
            comparison=worst.comparison if worst else None,
            number=1,
            model=model,
            step=step,
            optimizer=optimizer,
            functions=functions,
            asks=tuple(call.workload.id for call in found.calls) if found else (),
        )
