"""Distance of a whole model from itself with exact attention, in units of what honest rounding does to the same model.

For each output, the loss and the gradient of each parameter: |T - T_exact| over the root mean square of |T_k - T_exact|, with
T_k from runs in which attention is exact but rounded at random where the precision profile says that kernels round. About 1
is what a fault-free kernel gives. A fault hidden by the rounding of the rest is not seen here: the calls decide the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from pytest_attn.backends.layouts import first_of
from pytest_attn.backends.precision import Precision, precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Subject
from pytest_attn.guests.models.call_to_workload import to_inputs
from pytest_attn.guests.models.capture import alias, precision_of, without_gradient
from pytest_attn.guests.models.exact_attention import Rounder, SeededGenerators, exact_attention, exact_weights
from pytest_attn.guests.models.interception import NAME, Handler, InterceptedCall, Named, intercept_attention, lacks_masks
from pytest_attn.guests.models.step import StepResult, run_step

#: how a call rounds, by the profile of who computes it and its device
Rounding: TypeAlias = Callable[[Precision, torch.device], Rounder]


def at_random(seed: int) -> Rounding:
    """Return random rounding where kernels round."""
    generators = SeededGenerators(seed)
    return lambda precision, device: Rounder(precision, generators[device])


def to_nearest(precision: Precision, device: torch.device) -> Rounder:
    """Round to nearest where kernels round, as they do."""
    del device
    return Rounder(precision)


@dataclass
class Exact(Handler):
    """Computes every call exactly, but for what `rounding` rounds. subject: whose profile, None for the model's functions.

    precision: the profile of these, where that is said. beside: where the functions are of which the step uses more than out;
    it gets that as well. is_whole: with its gradient, as where nothing is judged. dtypes: gets that of q, call by call. into:
    in which each call is given its tensors, whatever the run that it belongs to computes in.
    """

    subject: Subject | None
    precision: str | Precision | None
    beside: Collection[tuple[str, str]]
    is_whole: bool = False
    rounding: Rounding | None = None
    dtypes: list[torch.dtype] = field(default_factory=list)
    into: Iterator[torch.dtype] | None = None

    def __post_init__(self) -> None:
        self._registry = Registry()

    def handle(self, intercepted: InterceptedCall) -> Any:
        """Return exact attention in the place of a call; an unread call stays the model's own."""
        if self.into is not None:
            dtype = next(self.into)
            intercepted = intercepted.with_tensors(*(t.double().to(dtype) for t in intercepted.tensors))
        intercepted = intercepted.with_tensors(*map(alias, intercepted.tensors))
        self.dtypes.append(intercepted.tensors[0].dtype)
        arguments = intercepted.read()
        inputs = to_inputs(arguments)
        out = exact_attention(inputs, self._rounder(intercepted, inputs.device))
        if not (arguments.asks_more or intercepted.function.place in self.beside):
            return arguments.to_result(out)
        is_of_ours = intercepted.function.shown == f"transformers:{NAME}"  # which returns out alone
        result = (out, exact_weights(inputs).to(out.dtype)) if is_of_ours else intercepted.compute()
        if not self.is_whole:
            result = tree_map_only(torch.Tensor, without_gradient, result)
        replaced = arguments.to_result(out)
        return (first_of(replaced), *result[1:]) if isinstance(result, tuple | list) else replaced

    def _rounder(self, intercepted: InterceptedCall, device: torch.device) -> Rounder | None:
        if self.rounding is None:
            return None
        own = self.subject.precision_on(device.type) if self.subject else self.precision
        return self.rounding(precision_named(own or precision_of(intercepted, self._registry, device.type)), device)


@dataclass(frozen=True)
class RepeatableStep:
    """Runs a step once more, from the state that its model had before the first run.

    again: makes the model what it was. functions: as for `capture`. subject: what computes the calls instead of the model,
    None for itself. precision, beside: as for `Exact`.
    """

    model: torch.nn.Module
    step: Callable[[], Any]
    again: Callable[[], None]
    backward: bool
    functions: Iterable[Named]
    subject: Subject | None
    precision: str | Precision | None
    beside: Collection[tuple[str, str]]

    def as_it_is(self) -> dict[str, torch.Tensor]:
        """Return all that a run gives."""
        self.again()
        return tensors_of(run_step(self.step, self.model, self.backward))

    def exact(self, mode: AbstractContextManager[object] | None = None, **how: Any) -> dict[str, torch.Tensor]:
        """Return all that a run with exact attention gives. mode: surrounds it. how: fields of `Exact`."""
        handler = Exact(self.subject, self.precision, self.beside, **how)
        replaces = lacks_masks(self.model, is_replaced=self.subject is not None)
        self.again()
        with intercept_attention(handler, self.model, self.functions, replaces=replaces), mode or nullcontext():
            return tensors_of(run_step(self.step, self.model, self.backward))


def ratios_of(result: StepResult, repeatable: RepeatableStep, runs: int) -> dict[str, float]:
    """Return the deviation of each tensor of a run, in units of the honest scatter of so many runs."""
    exact = repeatable.exact()
    scatter = scatter_of((repeatable.exact(rounding=at_random(seed)) for seed in range(runs)), exact)
    return {name: far / scatter[name] for name, far in distances(tensors_of(result), exact).items() if scatter[name] > 0}


def tensors_of(result: StepResult) -> dict[str, torch.Tensor]:
    """Name all that a run gave: outputs, loss, gradients."""
    loss = {} if result.loss is None else {"loss": result.loss}
    return {**result.outputs, **loss, **{f"gradient of {name}": t for name, t in result.gradients.items()}}


def scatter_of(runs: Iterable[Mapping[str, torch.Tensor]], exact: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return by how much rounding moves each tensor: the root mean square of its distances from exact attention."""
    found = [distances(one, exact) for one in runs]
    return {name: math.sqrt(sum(one.get(name, 0.0) ** 2 for one in found) / len(found)) for name in exact}


def distances(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the Euclidean distance of the tensors that both have; those that are not finite have none."""
    both = {name: (t, other[name]) for name, t in one.items() if name in other and t.shape == other[name].shape}
    distances = {name: float((a.double() - b.double()).norm()) for name, (a, b) in both.items()}
    return {name: distance for name, distance in distances.items() if math.isfinite(distance)}
