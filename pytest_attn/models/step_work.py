"""A step of a model as what is timed: its forward pass, or a training step with or without an optimizer's."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_attn.latency.work import LatencyDirection, StaleError, Work, wait
from pytest_attn.models.step import StepResult, backpropagate, finish_backward, named_tensors, watching_backward

if TYPE_CHECKING:
    import torch

#: by how much of its value the loss, or the norm of the first output, may differ from one repetition to the next
_SAME = 0.05


class StepWork(Work):
    """A step that is repeated on the batch that it has. begin: what is done, untimed, before each.

    direction: "forward" (without autograd), or "forward+backward", which drops all gradients before each step. optimizer: its
    step is part of the time; then the loss of each step is another one, and is not looked at.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        step: Callable[[], Any],
        direction: LatencyDirection,
        optimizer: torch.optim.Optimizer | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._step, self.direction, self._optimizer, self._begin = model, step, direction, optimizer, begin
        self._parameters = list(model.parameters())
        self._first: torch.Tensor | None = None
        self.sets = [[]]
        self._runs_backward = False
        #: wall seconds of the first step: compiling, and whatever else is done once
        self.first_seconds = self._take_first_step()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        import torch

        tensor = next(iter((*self._parameters, *self._model.buffers())), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def nbytes(self) -> int:
        """The bytes of its parameters."""
        return sum(p.nbytes for p in self._parameters)

    def rotate_over(self, number: int) -> None:
        """Stay with the one batch: a step's own data fill the caches, as in a training run."""

    def move(self) -> None:
        """Stay with the one batch."""

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Without autograd, where only the forward pass is timed."""
        import torch

        return torch.no_grad() if self.direction == "forward" else contextlib.nullcontext()

    def stage(self, replayed: bool = False) -> Callable[[], Any]:
        """Drop the gradients, and return one step."""
        del replayed
        self.on_call()
        for parameter in self._parameters:
            parameter.grad = None
        self._begin()
        return self._one

    def refresh(self) -> None:
        """Leave the batch as it is: a model is linear in none of its tensors."""

    def result(self, value: Any) -> torch.Tensor:
        """Return what `verify` looks at: the loss, or the norm of the first output."""
        found: torch.Tensor = value.detach().double().norm()
        return found

    def verify(self, what: str, *results: torch.Tensor) -> None:
        """Raise StaleError where repetitions of the same step give something else."""
        del what
        if self._optimizer is not None:
            return
        if self._first is None:
            self._first = results[0].clone()
        expected = float(self._first)
        for found in map(float, results):
            if not abs(found - expected) <= _SAME * abs(expected) and not found == expected:
                raise StaleError(f"the step is not repeatable: its result was {expected:.4g}, then {found:.4g}")

    def _one(self) -> torch.Tensor:
        result = named_tensors(self._step())
        if self._runs_backward:
            backpropagate(result)
        if self._optimizer is not None:
            self._optimizer.step()
        return _looked_at(result)

    def _take_first_step(self) -> float:
        """Run the step once, see whether it runs the backward pass itself, and return how long it took."""
        self.stage()
        wait(self.device)
        begun = time.perf_counter()
        with self.context():
            with watching_backward() as runs:
                returned = self._step()
            if self.direction != "forward":
                self._runs_backward = finish_backward(returned, self._model, bool(runs))
        wait(self.device)
        return time.perf_counter() - begun


def _looked_at(result: StepResult) -> torch.Tensor:
    return next(iter(result.outputs.values())) if result.loss is None else result.loss


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
