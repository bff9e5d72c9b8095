"""One run of a user's step: what it returned, its loss, its gradients; and a model that is left as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parameter import is_lazy

from pytest_attn.backends.machine import wait

__tracebackhide__ = True  # what it raises is the step's own mistake


@dataclass
class StepResult:
    """Results of one run of a step. outputs: its tensors by name. loss: the scalar among them. gradients: of parameters."""

    outputs: dict[str, torch.Tensor]
    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def infers(self) -> bool:
        """True where it was computed in inference mode, where nothing has a gradient."""
        return any(t.is_inference() for t in (*self.outputs.values(), self.loss) if t is not None)

    def settled(self) -> StepResult:
        """Return it without its graph."""
        return StepResult(
            {name: t.detach() for name, t in self.outputs.items()},
            None if self.loss is None else self.loss.detach(),
            self.gradients,
        )


def device_of(model: torch.nn.Module) -> torch.device:
    """Return where a model's first parameter or buffer is."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def require_arguments(model: object, step: object) -> None:
    """Raise TypeError unless there are a model and a function that runs it."""
    if not isinstance(model, torch.nn.Module):
        swapped = "; model and step are swapped" if isinstance(step, torch.nn.Module) else ""
        raise TypeError(f"model is of type {type(model).__name__}; expected a torch.nn.Module{swapped}")
    if not callable(step):
        raise TypeError(f"step is of type {type(step).__name__}; expected a function without arguments that runs the model")


def refuse_scripted(model: torch.nn.Module) -> None:
    """Raise TypeError for a model that torch.jit made, or with a part that it made and that computes attention."""
    for name, part in model.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            continue
        if not name or "scaled_dot_product_attention" in str(getattr(part, "inlined_graph", "")):
            raise TypeError(
                f"{name or 'the model'} was made by torch.jit ({part.original_name}), which computes outside of Python, where"
                " no attention call can be seen; check the module that was traced or scripted"
            )


def run_step(step: Callable[[], Any], model: torch.nn.Module, backward: bool) -> StepResult:
    """Run a step, and its backward pass unless it has run that itself.

    backward: from the loss; where there is none, from every output that needs a gradient, with gradients of +1 and -1 that are
    the same in every run; none where the step runs in inference mode. Raises ValueError where a backward pass is to run and
    nothing needs a gradient.
    """
    if not backward:
        with torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad():
            returned = step()
        wait(device_of(model))
        return named(returned).settled()
    with watching_backward() as runs:
        returned = step()
    wait(device_of(model))
    result = named(returned)
    if runs or not result.infers:
        finish_backward(returned, model, bool(runs))
    result.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return result.settled()


#: in names of scalars that are added to a loss, and see less than it does: of routers, and of experts that are to be balanced
_AUXILIARY = ("aux", "z_loss", "router", "balanc")


def named(returned: Any) -> StepResult:
    """Name the floating-point tensors of what a step returned: a tensor, a mapping, a sequence, or an object with fields."""
    found: dict[str, Any] = {}
    _collect("output", returned, found)
    loss = found.get("loss")
    if loss is None:
        scalars = (t for name, t in found.items() if t.numel() == 1 and not any(part in name for part in _AUXILIARY))
        loss = next((t for t in scalars if t.requires_grad), None)
    outputs = {name: t for name, t in found.items() if t is not loss}
    return StepResult(outputs, loss)


def named_tensors(returned: Any, otherwise: str = "") -> StepResult:
    """Name the tensors of what a step returned. Raises TypeError where there is none; otherwise: what else is right."""
    result = named(returned)
    if result.loss is None and not result.outputs:
        kind = type(returned).__name__ + (f" of {returned.dtype}" if hasattr(returned, "dtype") else "")
        raise TypeError(
            f"the step returned {kind}; expected a tensor of floating-point numbers, a mapping of such tensors, or a model's"
            f" output{otherwise}"
        )
    return result


def _collect(name: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            found[name] = value
        return
    prefix = "" if name == "output" else f"{name}."
    if isinstance(value, Mapping):
        for key, one in value.items():
            _collect(f"{prefix}{key}", one, found)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _collect(f"{prefix}{number}", one, found)
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            _collect(f"{prefix}{key}", getattr(value, key), found)
    elif isinstance(value, SimpleNamespace):
        _collect(name, vars(value), found)


@contextmanager
def watching_backward() -> Iterator[list[object]]:
    """Yield a list that has an entry per backward pass that ran meanwhile and freed its graph."""
    runs: list[object] = []
    original: Any = getattr(torch.autograd, "_engine_run_backward", None)  # what every way to run one ends in

    def noted(tensors: Any, gradients: Any, keeps_graph: Any, *args: Any, **kwargs: Any) -> Any:
        if not keeps_graph:
            runs.append(tensors)
        return original(tensors, gradients, keeps_graph, *args, **kwargs)

    with patch.object(torch.autograd, "_engine_run_backward", noted) if original else nullcontext():
        yield runs


def finish_backward(returned: Any, model: torch.nn.Module, has_run_one: bool) -> bool:
    """Run the backward pass of what a step returned, unless the step ran it; return whether it was left to us.

    has_run_one: the step ran some backward pass, whether this one or another. Raises TypeError or ValueError as
    `named_tensors` and `backpropagate` do.
    """
    parameters = list(model.parameters())
    if any(p.grad is not None for p in parameters):
        return False
    try:
        backpropagate(named_tensors(returned, ", or a step that runs its backward pass itself; else say backward=False"))
    except (RuntimeError, TypeError, ValueError) as error:
        if not has_run_one or (isinstance(error, RuntimeError) and "a second time" not in str(error)):
            raise
        for parameter in parameters:
            parameter.grad = None  # of what lies before the part of the graph that is gone
        return False
    return True


def backpropagate(result: StepResult) -> None:
    """Run the backward pass of a step, from its loss or from every output. Raises ValueError where none needs a gradient."""
    if result.loss is not None and result.loss.requires_grad:
        torch.autograd.backward(result.loss.sum())
        return
    needing = [t for t in result.outputs.values() if t.requires_grad]
    if not needing:
        raise ValueError(
            "the step returned nothing that needs a gradient, so no backward pass can run; return the loss, or say"
            " backward=False"
        )
    gradients = []
    for tensor in needing:
        generator = torch.Generator().manual_seed(tensor.numel())
        signs = torch.randint(2, tensor.shape, generator=generator, dtype=torch.int8) * 2 - 1
        gradients.append(signs.to(tensor.device, tensor.dtype))
    torch.autograd.backward(needing, gradients)


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Put back all that a step changes of a model; yields a function that does so in between, before another run.

    Gradients are None at the start of every run, and those of before come back at the end.
    """
    put_back_random_numbers, state = _random_numbers(), _ModelState(model)

    def again() -> None:
        state.restore()
        state.drop_gradients()
        put_back_random_numbers()

    with ExitStack() as every:  # whatever one of them raises
        every.callback(put_back_random_numbers)
        every.callback(state.restore_gradients)
        every.callback(state.restore)
        state.drop_gradients()
        yield again


class _ModelState:
    """Copies of all that belongs to a model, and the objects themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [
            (module, module.training, dict(module._parameters), dict(module._buffers)) for module in model.modules()
        ]
        if lazy := [name for name, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]:
            raise ValueError(f"the model's {lazy[0]} is not initialized yet; run the model once before it is checked")
        held = [t for *_, parameters, buffers in self._modules for t in (*parameters.values(), *buffers.values())]
        tensors = {id(t): t for t in held if t is not None}
        self._values = [(t, t.detach().clone(), t.requires_grad, t.grad) for t in tensors.values()]

    def restore(self) -> None:
        """Put back modes, the registered objects, and their values where they changed."""
        with torch.no_grad():
            for module, training, parameters, buffers in self._modules:
                module.training = training
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # which keeps its tensors, and shows views of their registers
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)
            for tensor, value, requires_grad, _ in self._values:
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                _put_back(tensor, value)

    def drop_gradients(self) -> None:
        """Let every run start without gradients."""
        for tensor, *_ in self._values:
            if tensor.is_leaf:
                tensor.grad = None

    def restore_gradients(self) -> None:
        """Put the gradients of before back, which no run has seen."""
        for tensor, _, _, grad in self._values:
            if tensor.is_leaf:
                tensor.grad = grad


def _put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor a value, where it has another one."""
    now = tensor.data
    if now.is_meta or now.is_nested:
        return
    is_comparable = now.shape == value.shape and now.layout == value.layout == torch.strided
    if is_comparable and bool(((now == value) | ((now != now) & (value != value))).all()):
        return
    if is_comparable and 0 not in now.stride():
        with torch.inference_mode() if tensor.is_inference() else nullcontext():
            now.copy_(value)
    else:
        tensor.data = value.clone()


def _random_numbers() -> Callable[[], None]:
    """Return what puts back the generators of torch on every device in use, of Python, and of numpy where it is imported."""
    states: list[tuple[Callable[[Any], None], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if numpy := sys.modules.get("numpy"):
        states.append((numpy.random.set_state, numpy.random.get_state()))

    def put_back() -> None:
        for put, state in states:
            put(state)

    return put_back
