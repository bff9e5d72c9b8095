"""One `attn_model.measure`: a step of a model, timed as a kernel is, with what attention takes of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_attn.latency.baseline import case_key
from pytest_attn.latency.result import Latency
from pytest_attn.latency.timer import Mode
from pytest_attn.latency.work import StaleError
from pytest_attn.models.compiled import compilations, is_compiled
from pytest_attn.models.replacement import ModelAttention
from pytest_attn.models.step import untouched
from pytest_attn.models.step_timing import StepWork, attention_share, optimizer_untouched
from pytest_attn.models.substitution import BackendSubstitute, Substitute, Substitution, SubstitutionError, substitutes_of
from pytest_attn.session.items import id_from_root
from pytest_attn.timing.measurement import WAITING_SECONDS, Measurement

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a model's own frames, not ours

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
        """What is timed, for messages."""
        return f"a step of {type(self.model).__name__} with {self.subject.name}, {self.direction}{self._with_optimizer}"

    @property
    def key(self) -> str:
        """The key of its baseline: a model belongs to its test."""
        test = f"{id_from_root(self.item)}{self._with_optimizer}{f' #{self.number}' if self.number > 1 else ''}"
        return case_key(test, self.subject.name, self.direction, "warm", threads=self.threads)

    @property
    def kind(self) -> tuple[str, ...]:
        """What a test's measurements are numbered by."""
        return *super().kind, self._optimizer_name

    @property
    def shape(self) -> str:
        """The model in numbers: another one in the same test is another case."""
        parameters = list(self.model.parameters())
        dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
        size = f"{type(self.model).__name__}, {sum(p.numel() for p in parameters):,} parameters, {dtypes}"
        return "; ".join([size, *dict.fromkeys(self.asks)])

    def record_fields(self) -> dict[str, Any]:
        """Return the model's name, and what is reported of the step."""
        return {"model": type(self.model).__name__, "step": {"optimizer": self._optimizer_name, **self.found}}

    def _take(self, mode: Mode | None) -> Latency:
        """Time the step by the host's clock, device included: a training loop waits for both."""
        del mode
        with ExitStack() as stack:
            stack.enter_context(untouched(self.model))
            stack.enter_context(optimizer_untouched(self.optimizer))
            case = f"timing {self.name}, {self.item.nodeid}"
            with self.session.deadline.around(case):
                plan, work = self._prepared(stack)
                with work.context():
                    for _ in range(_WARM_UP):
                        work.stage()()
            before = compilations()
            stopwatch = self.stopwatch
            with self.session.deadline.around(case, beyond=WAITING_SECONDS) as work.on_call:
                latency = stopwatch.measure(work, self.spec.workload.id, self.subject.name, "host")
            self._refuse_recompiled(compilations().since(before).graphs)
        if self.session.worker is None:
            self.found["attention"] = self._attention(plan)
        return latency

    def _prepared(self, stack: ExitStack) -> tuple[list[Substitute] | None, StepWork]:
        """Return what computes the calls, None for the model itself, and the step as it is timed."""
        before = compilations()
        plan: list[Substitute] | None = None
        if isinstance(self.subject, ModelAttention):
            work = StepWork(self.model, self.step, self.direction, self.optimizer)
        else:
            plan, work = self._swapped(stack)
        graphs, breaks = compilations().since(before)
        self.found.update(first_call=work.first_seconds, graphs=graphs, graph_breaks=breaks)
        return plan, work

    def _swapped(self, stack: ExitStack) -> tuple[list[Substitute], StepWork]:
        try:
            first = StepWork(self.model, self.step, self.direction)
            with first.context():
                plan = substitutes_of(
                    BackendSubstitute(self.subject, self.direction != "forward"), first.stage(), self.model, self.functions
                )
            swap = Substitution(plan)
            stack.enter_context(swap.applied(self.model, self.functions))
            work = StepWork(self.model, self.step, self.direction, self.optimizer, swap.reset)
            with work.context():
                swap.require_complete(work.stage())
            return plan, work
        except SubstitutionError as error:
            raise StaleError(f"{self.subject.name} cannot take the place of the model's attention: {error}") from None

    def _attention(self, plan: list[Substitute] | None) -> dict[str, Any]:
        if is_compiled(self.model) or self.found["graphs"]:
            return {"unknown": "torch.compile may join attention with what is around it; measure the model as it is, eagerly"}
        with untouched(self.model), optimizer_untouched(self.optimizer):
            share = attention_share(self.model, self.step, self.direction, self.functions, self.optimizer, plan)
        return {"unknown": share} if isinstance(share, str) else share.to_dict()

    def _refuse_recompiled(self, graphs: int) -> None:
        if graphs:
            times = "once" if graphs == 1 else f"{graphs} times"
            raise StaleError(
                f"torch.compile compiled parts of the step again, {times}, while it was timed; TORCH_LOGS=recompiles says why"
            )

    @property
    def _optimizer_name(self) -> str:
        return "" if self.optimizer is None else type(self.optimizer).__name__

    @property
    def _with_optimizer(self) -> str:
        return f" with {self._optimizer_name}" if self.optimizer is not None else ""
