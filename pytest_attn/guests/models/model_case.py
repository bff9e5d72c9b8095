"""What a test of a model touches: `attn_model`, which judges the attention calls of a model, and times its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import pytest
import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import Subject
from pytest_attn.cases.case import AttentionCase, context_of
from pytest_attn.cases.case_records import figures_of
from pytest_attn.cases.conclude import conclude, skip
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.evaluator import Evaluator, Refusal
from pytest_attn.cases.judgment import Judgment
from pytest_attn.cases.latency import Measuring
from pytest_attn.cases.measurement import WAITING_SECONDS, Measurement
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.models.check_model import Target, judge_model, module_step
from pytest_attn.guests.models.compiled import compilations, is_compiled
from pytest_attn.guests.models.interception import as_functions
from pytest_attn.guests.models.model_comparison import CallComparison, ModelComparison
from pytest_attn.guests.models.step import untouched
from pytest_attn.guests.models.step_timing import StepWork, attention_share, optimizer_untouched, substituted
from pytest_attn.guests.models.substitution import (
    BackendSubstitute,
    ModelAttention,
    Substitute,
    SubstitutionError,
    replacement,
)
from pytest_attn.guests.models.token_invariants import judge_model_invariants
from pytest_attn.guests.models.token_model import TokenStep
from pytest_attn.invariants.report import INVARIANT_WIDTH, InvariantReport, describe_invariants
from pytest_attn.latency.baseline_file import case_key
from pytest_attn.latency.result import Latency
from pytest_attn.latency.timer import Mode
from pytest_attn.latency.work import StaleError
from pytest_attn.reports.records import LEVELS
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.session.kinds import CaseParameter
from pytest_attn.workloads.functions import type_name
from pytest_attn.workloads.workload import Workload

__tracebackhide__ = True  # pytest shows a model's own frames, not ours

#: in place of what --attn-save-failures saves
_NOT_SAVED = "a model's own tensors are not kept; attn.check on the workload of a call, and the kernel, saves them"
#: what need not fail the test of a model
Excuse: TypeAlias = Literal["refusals", "known defects"]


class AttentionModel:
    """The attention of a model, on one device, with one backend where the test takes one."""

    def __init__(self, context: CaseContext) -> None:
        self._context = context
        self._measuring = Measuring(context.item.config)
        self._checked: tuple[object, ...] = ()  # the model, step and backend that were right, and what was found
        self._comparison: ModelComparison | None = None

    @property
    def backend(self) -> Backend | None:
        """The backend of the item, None where the test takes none."""
        return self._context.backend

    @property
    def device(self) -> torch.device:
        """The torch device."""
        return self._context.session.machines.device(self._context.mark.device)

    @property
    def is_judged(self) -> bool:
        """True where the test has judged something, or tried to."""
        return self._context.is_judged

    def check(
        self,
        model: torch.nn.Module,
        step: Callable[[], Any],
        backend: Target | None = None,
        *,
        functions: Iterable[Callable[..., Any] | str] = (),
        inline: Iterable[str] | str = (),
        scatter: int = 4,
        precision: str | Precision | None = None,
        excused: Iterable[Excuse] = (),
    ) -> ModelComparison:
        """Hold every attention call of `step` against exact attention on its own tensors; the marker says whether backward.

        step: a function without arguments that can be repeated; returns a tensor, a mapping of tensors or a model's output.
        backend: what computes the calls, by default the model itself. functions: attention of your own, as for
        `pytest_attn.capture`. inline: names of modules that write attention out, as "blocks.*.attn": not judged.
        scatter: runs with exact attention and random rounding, which `ratios` are made of; 0 for none.
        precision: where a function of yours says it rounds, as in the marker `attention`; a backend says it itself.
        excused: what else does not fail the test. "refusals" skips it where the backend refuses some of the calls and computes
        the others right. "known defects" expects those of what the model itself chose.

        Returns the comparison. Raises AssertionError where a call is wrong, was not read or not replaced, and where none was
        caught, or attention is written out. Skips where the backend refuses every call; a known defect of the backend is an
        expected failure. The model is left as it was.
        """
        __tracebackhide__ = True
        options: Any = {"functions": functions, "inline": inline, "scatter": scatter, "precision": precision}
        found = conclude(self._context, ModelEvaluator(self._context, model, step, backend, tuple(excused), **options))
        self._checked, self._comparison = (model, step, backend), found
        return found

    def measure(
        self,
        model: torch.nn.Module,
        step: Callable[[], Any],
        backend: Target | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        functions: Iterable[Callable[..., Any] | str] = (),
        inline: Iterable[str] | str = (),
    ) -> Latency:
        """Check the model, time its step, and compare the p50 with the baseline of this test, backend and machine.

        A step is forward and backward, or forward without autograd where the marker says backward=False; with an optimizer its
        step as well. Gradients are dropped before each. Reported beside the time: the first call, peak memory (of a GPU), and
        what attention takes of a step. So it says how much a faster kernel can speed up the step at most.

        Returns the latency. Raises AssertionError as `check` does, where the step became slower than recorded, where it is not
        repeatable, and where torch.compile compiles it again while it is timed. Skips where nothing can be timed. Model and
        optimizer are left as they were.
        """
        __tracebackhide__ = True
        context, functions = self._context, as_functions(functions)
        subject = ModelAttention() if backend is None else replacement(backend, context.session.registrations.registry)
        if optimizer is not None and not context.mark.backward:
            raise ValueError("attn_model.measure: an optimizer needs gradients; leave out backward=False of the marker")
        self._measuring.prepare(self.device)
        if self._measuring.mode.checks_first and self._checked != (model, step, backend):
            # not yet compiled, so that the first call is timed with what the compiler takes
            options: Any = {"functions": functions, "inline": inline, "scatter": 0, "compiled": False}
            evaluator = ModelEvaluator(context, model, step, backend, **options)
            self._checked, self._comparison = (model, step, backend), conclude(context, evaluator)
        found = self._comparison
        workload = _workload_of(type_name(model), found)
        if backend is not None and is_compiled(model):
            reason = "a compiled model is timed with its own attention; to replace that, pass the model before it is compiled"
            conclude(context, Refusal(workload, subject, Judgment.refused(subject, reason), question="latency"))
        measurement = ModelMeasurement(
            session=context.session,
            item=context.item,
            spec=CheckSpec(workload, self.device, backward=context.mark.backward),
            subject=subject,
            direction="forward+backward" if context.mark.backward else "forward",
            comparison=found.worst.comparison if found and found.worst else None,
            model=model,
            step=step,
            optimizer=optimizer,
            functions=functions,
            asks=tuple(call.workload.id for call in found.calls) if found else (),
        )
        return conclude(context, self._measuring.evaluator(measurement))

    def check_invariants(
        self,
        model: torch.nn.Module,
        batch: Any,
        *,
        only: Iterable[str] | str | None = None,
        skip: Iterable[str] | str | None = None,
        causal: bool | None = None,
        step: TokenStep | None = None,
    ) -> InvariantReport:
        """Ask a model what must hold whatever its weights, without any reference: most of one of tokens.

        batch: token ids (batch, tokens), or a mapping with input_ids; with decoder_input_ids the tokens are the decoder's; or
        what a model takes that takes no tokens, as images, the batch first. only, skip: names of invariants: future, field,
        padded-left, padded-right, packed, dynamic, static, sliding, shifted, order, decoding, chunks, warm. causal: whether a
        token sees only those before it, by default what the model's configuration, modules and calls say. step: a function of
        ids and positions, (batch, tokens), and a state, None to begin anew, that runs these tokens through a cache of the
        model's own, and returns (logits, state): decoding, chunks and warm compare that with one pass over all tokens.

        Returns the report. Raises AssertionError where an invariant is broken, DropoutError for a model that drops at random,
        ValueError for a compiled mixture of experts. Skips where no invariant applies. The model is left as it was.
        """
        __tracebackhide__ = True
        return conclude(self._context, ModelInvariantEvaluator(model, batch, only, skip, causal, step))

    def check_module(
        self, module: torch.nn.Module, inputs: Any = None, backend: Target | None = None, **options: Any
    ) -> ModelComparison:
        """Call one attention layer, and judge what its attention core gets and returns, as `check` does.

        inputs: a tensor, a tuple of positional or a mapping of keyword arguments; by default hidden states are drawn, as
        `pytest_attn.check_module` says. options: functions, inline, scatter, precision and excused, as for `check`. Raises
        ValueError where no hidden states can be drawn.
        """
        __tracebackhide__ = True
        return self.check(module, module_step(module, inputs), backend, **options)


def make_model_case(request: pytest.FixtureRequest, parameter: CaseParameter) -> AttentionModel:
    """Make the case of a model's test; skips the test where its device or backend is not there."""
    context = CaseContext.of_item(request, parameter)
    backend = context.backend
    if backend is not None and (reason := backend.unavailable_because(context.machine) or backend.broken_because()):
        skip(context, backend, reason)
    return AttentionModel(context)


class ModelEvaluator(Evaluator[ModelComparison]):
    """Holds every attention call of a step against exact attention.

    target: what computes the calls, None for the model itself. options: as of `judge_model`. Raises ValueError for an
    excuse that is none.
    """

    def __init__(
        self,
        context: CaseContext,
        model: torch.nn.Module,
        step: Callable[[], Any],
        target: Target | None,
        excused: tuple[Excuse, ...] = (),
        **options: Any,
    ) -> None:
        if unknown := sorted(set(excused) - set(get_args(Excuse))):
            raise ValueError(f"unknown excuse {unknown[0]!r}; known: {', '.join(get_args(Excuse))}")
        self._model, self._step, self._excused, self._options = model, step, excused, options
        registry, precision = context.session.registrations.registry, options.get("precision")
        self._replaced = None if target is None else replacement(target, registry, precision)
        self.subject: Subject | str = self._replaced or "model"
        self.on = type_name(model)
        self.fields = {"model": self.on}
        self._who = self._replaced.name if self._replaced else "the attention"
        self.doing, self.workload = f"checking {self._who}", _workload_of(self.on, None)

    def judge(self, context: CaseContext) -> Judgment[ModelComparison]:
        __tracebackhide__ = True
        subject, session = self._replaced, context.session
        case = f"{self._who} of {self.on}, {context.item.nodeid}"
        options = {
            **self._options,
            "limits": session.settings.limits,
            "context": replace(
                context.judging(self._who), deadline=lambda: session.deadline.around(case), keeps_evidence=False
            ),
        }
        found = judge_model(self._model, self._step, subject, context.mark.backward, **options)
        workload = _workload_of(self.on, found)
        if subject is not None and found.refused and self._is_refused(found):
            reasons = "; ".join(dict.fromkeys(refused.reason for refused in found.refused))
            return Judgment.refused(subject, reasons, Cause.DECLINED, workload=workload)
        comparison = found.worst.comparison if found.worst else None
        fields = {
            **figures_of(comparison),
            "direction": "forward+backward" if found.backward else "forward",  # a step in inference mode has no gradients
            "backward": found.backward,
            "untested": found.untested,
            "calls": [_facts(call) for call in found.calls],
            "ratios": dict(found.ratios),
            "notes": list(found.notes),
            "compiled": found.compiled.to_dict() if found.compiled else None,
        }
        facts: Any = {"workload": workload, "fields": fields}
        if found.passed:
            return Judgment(Verdict.PASSED, found, **facts)
        is_excused = subject is not None or "known defects" in self._excused
        known = "; ".join(found.known_defects) if is_excused else ""
        facts |= {"rows": comparison.drawn if comparison else (), "evidence": _NOT_SAVED, "known_defects": known}
        return Judgment(Verdict.MISMATCH, reason=found.message.splitlines()[0], text=found.message, **facts)

    def _is_refused(self, found: ModelComparison) -> bool:
        """Return whether all calls were refused, or some, where that is excused and the others are right."""
        refuses_all = not any(call.is_replaced for call in found.calls)
        lacks_these_only = replace(found, refused=()).is_complete and found.explained
        return refuses_all or ("refusals" in self._excused and lacks_these_only)


class ModelInvariantEvaluator(Evaluator[InvariantReport]):
    """Tries what must hold of a model of tokens whatever its weights."""

    question, wrong, subject = "invariants", Verdict.BROKEN, "model"

    def __init__(self, model: torch.nn.Module, *asked: Any) -> None:
        self._asked = model, *asked
        self.doing, self.on = "trying the invariants of", type_name(model)
        self.fields = {"model": self.on}
        self.workload = _workload_of(self.on, None)

    def judge(self, context: CaseContext) -> Judgment[InvariantReport]:
        __tracebackhide__ = True
        with context.session.deadline.around(f"{self.doing} {self.on}, {context.item.nodeid}"):
            report = judge_model_invariants(*self._asked)
        if not report.applied:
            reasons = "; ".join(f"{finding.invariant}: {finding.evidence}" for finding in report.findings)
            return Judgment.refused(None, f"none of the requested invariants applies: {reasons}")
        reason = ", ".join(finding.invariant for finding in report.broken) or "; ".join(report.notes)
        verdict, width = Verdict.HELD if report.passed else Verdict.BROKEN, INVARIANT_WIDTH
        text, evidence = describe_invariants(report), "" if report.passed else _NOT_SAVED
        fields = {"inapplicable": report.inapplicable}
        return Judgment(verdict, report, reason, text=text, evidence=evidence, width=width, fields=fields)


def _workload_of(name: str, found: ModelComparison | None) -> Workload:
    """Return what stands for a model in records: what its first call asks, whoever computes it, under the model's name."""
    return replace(found.calls[0].workload if found and found.calls else Workload(1), name=name)


def _facts(call: CallComparison) -> dict[str, Any]:
    reported = call.comparison.reported if call.comparison else None
    return {
        "module": call.label,
        "function": call.function,
        "kernel": call.kernel,
        "workload": call.workload.id,
        "passed": call.passed,
        "backward": call.has_gradients,
        "tensor": reported.name if reported else "",
        **{name: getattr(reported, name) if reported else None for name in (*LEVELS, "z_slope")},
        "reason": call.fault,
        "faults": call.comparison.faults if call.comparison else (),
    }


#: steps before the first that is timed, in which torch.compile may still compile
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class ModelMeasurement(Measurement):
    """A step of a model. asks: what its calls ask, as far as it was checked. found: what its record says beside the time."""

    model: torch.nn.Module
    step: Callable[[], Any]
    optimizer: torch.optim.Optimizer | None = None
    functions: tuple[Callable[..., Any] | str, ...] = ()
    asks: tuple[str, ...] = ()
    is_of_one_kernel = False
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"a step of {type_name(self.model)} with {self.subject.name}, {self.direction}{self._with_optimizer}"

    @property
    def key(self) -> str:
        test = f"{self.test}{self._with_optimizer}{f' #{self.number}' if self.number > 1 else ''}"
        return case_key(test, self.subject.name, self.direction, "warm", threads=self.threads)

    @property
    def kind(self) -> tuple[str, ...]:
        return *super().kind, self._optimizer_name

    @property
    def shape(self) -> str:
        """The model in numbers: another one in the same test is another case."""
        parameters = list(self.model.parameters())
        dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
        size = f"{type_name(self.model)}, {sum(p.numel() for p in parameters):,} parameters, {dtypes}"
        return "; ".join([size, *dict.fromkeys(self.asks)])

    def record_fields(self) -> dict[str, Any]:
        return {"model": type_name(self.model), "step": {"optimizer": self._optimizer_name, **self.found}}

    def _take(self, mode: Mode | None) -> Latency:
        """Time the step by the host's clock, device included: a training loop waits for both."""
        with ExitStack() as stack:
            stack.enter_context(untouched(self.model))
            stack.enter_context(optimizer_untouched(self.optimizer))
            case = f"timing {self.name}, {self.item.nodeid}"
            with self.session.deadline.around(case):
                substitutes, work = self._prepared(stack)
                with work.context():
                    for _ in range(_WARM_UP):
                        work.stage()()
            before = compilations()
            stopwatch = self.stopwatch
            with self.session.deadline.around(case, beyond=WAITING_SECONDS) as work.on_call:
                latency = stopwatch.measure(work, self.spec.workload.id, self.subject.name, "host")
            if graphs := (compilations() - before)["graphs"]:
                times = "once" if graphs == 1 else f"{graphs} times"
                why = "while it was timed; TORCH_LOGS=recompiles says why"
                raise StaleError(f"torch.compile compiled parts of the step again, {times}, {why}")
        if self.session.worker is None:
            self.found["attention"] = self._attention(substitutes)
        return latency

    def _prepared(self, stack: ExitStack) -> tuple[list[Substitute] | None, StepWork]:
        """Return what computes the calls, None for the model itself, and the step as it is timed."""
        before = compilations()
        timed = self.model, self.step, self.direction
        if isinstance(self.subject, ModelAttention):
            substitutes, work = None, StepWork(*timed, self.optimizer)
        else:
            backend = BackendSubstitute(self.subject, self.direction != "forward")
            try:
                work, _ = stack.enter_context(substituted(backend, *timed, self.functions, self.optimizer))
            except SubstitutionError as error:
                raise StaleError(f"{self.subject.name} cannot take the place of the model's attention: {error}") from None
            substitutes = backend.substitutes
        compiled = compilations() - before
        self.found.update(first_call=work.first_seconds, graphs=compiled["graphs"], graph_breaks=compiled["breaks"])
        return substitutes, work

    def _attention(self, substitutes: list[Substitute] | None) -> dict[str, Any]:
        if is_compiled(self.model) or self.found["graphs"]:
            return {"unknown": "torch.compile may fuse attention with its neighbors; measure the eager model"}
        with untouched(self.model), optimizer_untouched(self.optimizer):
            share = attention_share(self.model, self.step, self.direction, self.functions, self.optimizer, substitutes)
        return {"unknown": share} if isinstance(share, str) else share.to_dict()

    @property
    def _optimizer_name(self) -> str:
        return "" if self.optimizer is None else type(self.optimizer).__name__

    @property
    def _with_optimizer(self) -> str:
        return f" with {self._optimizer_name}" if self.optimizer is not None else ""


def check_module(
    case: AttentionCase,
    module: torch.nn.Module,
    inputs: Any = None,
    backend: Target | None = None,
    *,
    functions: Iterable[Callable[..., Any] | str] = (),
    scatter: int = 4,
) -> ModelComparison:
    """Call one attention layer, and judge what its attention core gets and returns, as `attn_model.check_module` does.

    Hidden states that are drawn have the workload's batch and q_len; heads, mask and dtype are the module's own.
    """
    __tracebackhide__ = True
    context = context_of(case)
    step = module_step(module, inputs, (case.workload.batch, case.workload.q_len))
    return conclude(context, ModelEvaluator(context, module, step, backend, functions=functions, scatter=scatter))
