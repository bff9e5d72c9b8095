"""Put something else in the place of a step's attention calls at next to no cost, so that the step can be timed with it.

A first run with everything caught plans the calls: what each asks, what computes it. From then on the n-th call of a step is
handed to the n-th plan: no masks are recognized, nothing is copied, no mode of torch is entered.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.attention_args import AttentionArguments, AttentionFunction, UnreadableError
from pytest_attn.backends.subject import Subject
from pytest_attn.models.catching import Caught, catching, wrappers_of
from pytest_attn.models.interfaces import is_of_transformers, transformers_caught
from pytest_attn.models.patching import replaced
from pytest_attn.models.recognition import to_inputs

if TYPE_CHECKING:
    import torch

#: computes one call: of q, k and v as the model's function takes them, to what that returns
Planned = Callable[..., Any]


class SwapError(Exception):
    """A step's attention cannot be swapped for a timed run; the text says why."""


class BackendPlan:
    """Plans every call of a step as a subject's. backward: whether the step needs gradients."""

    def __init__(self, subject: Subject, backward: bool) -> None:
        self.planned: list[Planned] = []
        self._subject, self._backward = subject, backward

    def handle(self, caught: Caught) -> Any:
        """Prepare the subject for one call, and let it compute it."""
        try:
            arguments = caught.read()
            inputs = to_inputs(arguments)
        except UnreadableError as error:
            raise SwapError(f"{caught.module}: {error}") from None
        # a bias or sinks that are learned get no gradient: that of a planned step would be of the run that planned it
        held = {name: t.detach() for name, t in vars(inputs).items() if hasattr(t, "detach")}
        kernel = self._subject.prepare(dataclasses.replace(inputs, **held), self._backward)
        self.planned.append(_as_the_function(arguments, kernel))
        return self.planned[-1](*caught.tensors)

    def unread(self, module: str, function: str, reason: str) -> None:
        """Refuse."""
        raise SwapError(f"{module}: a call of {function}: {reason}")


def _as_the_function(arguments: AttentionArguments, kernel: Callable[..., Any]) -> Planned:
    to_native, to_result = arguments.to_native, arguments.to_result

    def compute(*tensors: torch.Tensor) -> Any:
        out = kernel(*(to_native(t) for t in tensors))
        return to_result(out[0] if isinstance(out, tuple | list) else out)

    return compute


class CostlessPlan:
    """Plans every call as what it returned, and its gradients as those that it gave, at no cost; no value changes."""

    def __init__(self) -> None:
        self.planned: list[Planned] = []

    def handle(self, caught: Caught) -> Any:
        """Compute one call, and keep what it gives forward and backward."""
        aliases: list[Any] = [t.view_as(t) for t in caught.tensors]
        result = caught.with_tensors(*aliases).compute()
        out, *others = result if isinstance(result, tuple) else (result,)
        kept: list[Any] = [None, None, None]

        def keeps(place: int) -> Callable[[torch.Tensor], None]:
            def hook(gradient: torch.Tensor) -> None:
                kept[place] = gradient.detach().clone()

            return hook

        for place, alias in enumerate(aliases):
            if alias.requires_grad:
                alias.register_hook(keeps(place))
        rest = [t.detach() if hasattr(t, "detach") else t for t in others]
        self.planned.append(_kept_result(out.detach().clone(), kept, rest if isinstance(result, tuple) else None))
        return result

    def unread(self, module: str, function: str, reason: str) -> None:
        """Refuse."""
        raise SwapError(f"{module}: a call of {function}: {reason}")


def _kept_result(out: torch.Tensor, gradients: list[Any], others: list[Any] | None) -> Planned:
    """Return what gives `out` without computing it, and `gradients` in the backward pass. others: further results."""
    import torch

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            return out.detach()

        @staticmethod
        def backward(ctx: Any, *dout: Any) -> Any:
            return tuple(None if g is None else g.detach() for g in gradients)

    def compute(*tensors: torch.Tensor) -> Any:
        apply: Any = Kept.apply
        result = apply(*tensors)
        return result if others is None else (result, *others)

    return compute


def plan_step(
    plan: BackendPlan | CostlessPlan,
    step: Callable[[], Any],
    model: torch.nn.Module,
    functions: Iterable[Callable[..., Any] | str],
) -> list[Planned]:
    """Run a step once with every call caught, and return how each is computed. Raises SwapError for one that cannot be."""
    replaces = isinstance(plan, BackendPlan) and is_of_transformers(model)
    with catching(plan, model, functions, replaces=replaces):
        step()
    if not plan.planned:
        raise SwapError("no attention call was caught")
    return plan.planned


class Swap:
    """The calls of a step, in their order, each computed as one of some plans says; `begin` before every step.

    plans: None stands for what the model calls itself. `choose` says which counts; the first one does at the start.
    """

    def __init__(self, *plans: Sequence[Planned] | None) -> None:
        self._plans = plans
        self._next, self._is_inside = 0, False
        self.choose(0)

    def choose(self, number: int) -> None:
        """Have calls computed by one of the plans from now on."""
        self._planned = self._plans[number]

    def begin(self) -> None:
        """Start with the first call again."""
        self._next = 0

    def require_complete(self, run: Callable[[], Any]) -> None:
        """Run a step as now chosen. Raises SwapError where a call of the plan went another way, and so was not swapped."""
        self.begin()
        run()
        planned = len(self._planned or ())
        if self._planned is not None and self._next != planned:
            raise SwapError(
                f"{planned - self._next} of {planned} attention calls are made through no name that can be replaced for a"
                " timed run"
            )

    def wrap(self, entry: AttentionFunction, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for a function."""

        @functools.wraps(original)
        def swapped(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or self._planned is None:
                return original(*args, **kwargs)
            return self._compute(self._planned, entry, args, kwargs)

        return swapped

    @contextmanager
    def applied(self, model: torch.nn.Module, functions: Iterable[Callable[..., Any] | str]) -> Iterator[Swap]:
        """Have the model's calls computed as planned for a while."""
        with ExitStack() as stack:
            stack.enter_context(replaced(wrappers_of(self.wrap, functions), model))
            stack.enter_context(transformers_caught(self.wrap, model, replaces=False))
            yield self

    def _compute(
        self, planned: Sequence[Planned], entry: AttentionFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._next += 1
        if self._next > len(planned):
            raise SwapError(f"the step made more than the {len(planned)} attention calls of its first run")
        arguments = entry.bind(args, kwargs)
        tensors = [arguments[name] for name in entry.tensors]
        self._is_inside = True
        try:
            return planned[self._next - 1](*tensors)
        finally:
            self._is_inside = False
