"""A step of a model as what is timed: its forward pass, or a training step; and what attention costs of it.

For that the step is timed with and without attention, in turn. Without: each call hands back, at no cost, what it gave in a
first run, forward and backward. Everything else, and all values, stay as they are. So the difference is what a kernel that
takes no time would gain, whatever overlaps with what.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from pytest_attn.backends.machine import wait
from pytest_attn.guests.models.call_to_workload import DropoutError
from pytest_attn.guests.models.interception import Named
from pytest_attn.guests.models.step import backpropagate, device_of, finish_backward, named_tensors, watching_backward
from pytest_attn.guests.models.substitution import (
    BackendSubstitute,
    RecordedSubstitute,
    Substitute,
    Substitution,
    SubstitutionError,
    substitutes_of,
)
from pytest_attn.latency.statistics import median_interval
from pytest_attn.latency.work import LatencyDirection, StaleError, Work, WrongResultError

#: by how much of its value the loss, or the norm of the first output, may differ from one repetition to the next
_SAME = 0.05


class StepWork(Work):
    """A step that is repeated on the batch that it has. before_each: what is done before each, at next to no cost.

    look: says how what steps have computed is wrong, "" where it is not; it is given whether it is the last time.

    direction: "forward" (without autograd), or "forward+backward", which drops all gradients before each step. optimizer: its
    step is part of the time; then the loss of each step is another one, and is not looked at.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        step: Callable[[], Any],
        direction: LatencyDirection,
        optimizer: torch.optim.Optimizer | None = None,
        before_each: Callable[[], None] = lambda: None,
        look: Callable[[bool], str] = lambda is_last: "",
    ) -> None:
        self._model, self._step, self.direction = model, step, direction
        self._optimizer, self._before_each, self._look = optimizer, before_each, look
        self._parameters = list(model.parameters())
        self._first: float | None = None
        self.sets = [[]]
        self._runs_backward = False
        #: wall seconds of the first step: compiling, and whatever else is done once
        self.first_seconds = self._take_first_step()

    @property
    def device(self) -> torch.device:
        return device_of(self._model)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self._parameters)

    def rotate_over(self, number: int) -> None:
        """Stay with the one batch: a step's own data fill the caches, as in a training run."""

    def move(self) -> None:
        """Stay with the one batch."""

    def stage(self, replayed: bool = False) -> Callable[[], Any]:
        del replayed
        self.on_call()
        for parameter in self._parameters:
            parameter.grad = None
        return self._one

    def result(self, value: Any) -> torch.Tensor:
        found: torch.Tensor = value.detach().double().norm()
        return found

    def verify_call(self, what: str, call: Callable[[], Any], value: Any) -> None:
        """Raise StaleError where repetitions of the same step give something else."""
        del what, call
        if self._optimizer is not None:
            return
        found = float(self.result(value))
        if self._first is None:
            self._first = found
        if not abs(found - self._first) <= _SAME * abs(self._first) and not found == self._first:
            raise StaleError(f"the step is not repeatable: its result was {self._first:.4g}, then {found:.4g}")

    def verify_kept(self, is_last: bool = False) -> None:
        """Raise WrongResultError where what was computed in a step is wrong."""
        if fault := self._look(is_last):
            raise WrongResultError(f"timed: {fault}")

    def _one(self) -> torch.Tensor:
        self._before_each()  # several steps may be staged at once
        result = named_tensors(self._step())
        if self._runs_backward:
            backpropagate(result)
        if self._optimizer is not None:
            self._optimizer.step()
        return next(iter(result.outputs.values())) if result.loss is None else result.loss

    def _take_first_step(self) -> float:
        """Run the step once, see whether it runs the backward pass itself, and return how long it took."""
        self.stage()
        self._before_each()
        wait(self.device)
        begun = time.perf_counter()
        with self.context():
            with watching_backward() as runs:
                returned = self._step()
            if self.direction != "forward":
                self._runs_backward = finish_backward(returned, self._model, bool(runs))
        wait(self.device)
        return time.perf_counter() - begun


@contextlib.contextmanager
def substituted(
    prepare: BackendSubstitute | RecordedSubstitute,
    model: torch.nn.Module,
    step: Callable[[], Any],
    direction: LatencyDirection,
    functions: Iterable[Named] = (),
    optimizer: torch.optim.Optimizer | None = None,
    *otherwise: Sequence[Substitute] | None,
) -> Iterator[tuple[StepWork, Substitution]]:
    """Have a step's calls computed by what is prepared in a first one; yield the step as what is timed.

    otherwise: other ways, as for `Substitution`. Raises SubstitutionError where a call cannot be replaced.
    """
    first = StepWork(model, step, direction)
    with first.context():
        substitutes = substitutes_of(prepare, first.stage(), model, functions)
    substitution = Substitution(substitutes, *otherwise)
    with substitution.applied(model, functions):
        work = StepWork(model, step, direction, optimizer, substitution.reset, prepare.look)
        with work.context():
            substitution.require_complete(work.stage())
        yield work, substitution


@contextlib.contextmanager
def optimizer_untouched(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Put an optimizer's state back as it was; the parameters are the model's affair."""
    if optimizer is None:
        yield
        return
    state = copy.deepcopy(optimizer.state_dict())
    try:
        yield
    finally:
        optimizer.load_state_dict(state)


def seconds_of(work: StepWork) -> float:
    """Return the wall seconds of one step, its device's work included."""
    call = work.stage()
    wait(work.device)
    begun = time.perf_counter()
    call()
    wait(work.device)
    return time.perf_counter() - begun


#: pairs of steps, with attention and without
_PAIRS = 12
_WARM_UP = 2


@dataclass(frozen=True)
class AttentionShare:
    """seconds: of a step that attention takes, the median of pairs; low, high: in which that median lies with 95 %.

    step: the median step of these pairs. calls: attention calls of a step.
    """

    seconds: float
    low: float
    high: float
    step: float
    calls: int

    @property
    def share(self) -> float:
        """Of the step, from 0 to 1."""
        return min(1.0, max(0.0, self.seconds / self.step))

    @property
    def ceiling(self) -> float:
        """By how much the step gets faster at most, whatever kernel computes attention: Amdahl's law."""
        return self.step / max(self.step - self.seconds, 1e-12) if self.seconds > 0 else 1.0

    @property
    def is_seen(self) -> bool:
        """True where it is more than the scatter of the step."""
        return self.low > 0

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types, as in a record."""
        fields = {name: getattr(self, name) for name in ("seconds", "share", "ceiling", "calls", "is_seen")}
        return {**fields, "interval": [self.low, self.high]}


def attention_share(
    model: torch.nn.Module,
    step: Callable[[], Any],
    direction: LatencyDirection,
    functions: Iterable[Named] = (),
    optimizer: torch.optim.Optimizer | None = None,
    by: Sequence[Substitute] | None = None,
) -> AttentionShare | str:
    """Return what attention takes of a step of a model that runs eagerly, or why that cannot be told.

    by: what computes its calls; None for the model itself.
    """
    recorded = RecordedSubstitute()
    try:
        substituting = substituted(recorded, model, step, direction, tuple(functions), optimizer, by)
        with substituting as (work, substitution), work.context():
            return _share_of(work, substitution, len(recorded.substitutes))
    except (SubstitutionError, DropoutError) as error:
        return str(error)


def _share_of(work: StepWork, substitution: Substitution, calls: int) -> AttentionShare:
    whole, differences = [], []
    for number in range(_PAIRS + _WARM_UP):
        seconds = {}
        for chosen in (0, 1) if number % 2 else (1, 0):  # whichever comes first has the caches of the other
            substitution.choose(chosen)
            seconds[chosen] = seconds_of(work)
        if number >= _WARM_UP:
            whole.append(seconds[1])
            differences.append(seconds[1] - seconds[0])
    low, high, _ = median_interval(differences)
    return AttentionShare(median(differences), low, high, median(whole), calls)
