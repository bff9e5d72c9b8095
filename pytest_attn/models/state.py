"""Leave a model as it was: parameters, gradients, buffers, training mode, and the random numbers of the process."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def untouched(model: torch.nn.Module | None) -> Iterator[Callable[[], None]]:
    """Put back all that a step changes of a model; yields a function that does so in between, before another run.

    Gradients are None at the start of every run, and those of before come back at the end.
    """
    import torch

    random_numbers = _RandomNumbers()
    state = None if model is None else _State(model)
    try:
        with torch.no_grad():
            if state is not None:
                state.drop_gradients()

        def again() -> None:
            if state is not None:
                state.restore()
                state.drop_gradients()
            random_numbers.restore()

        yield again
    finally:
        with ExitStack() as every:  # whatever one of them raises
            every.callback(random_numbers.restore)
            if state is not None:
                every.callback(state.restore_gradients)
                every.callback(state.restore)


class _State:
    """Copies of all that belongs to a model, and the objects themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        from torch.nn.parameter import is_lazy

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
        import torch

        with torch.no_grad():
            for module, training, parameters, buffers in self._modules:
                module.training = training
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
    if now.is_meta or now.is_nested or (_is_comparable(now, value) and _is_equal(now, value)):
        return
    if _is_comparable(now, value) and 0 not in now.stride():
        now.copy_(value)
    else:
        tensor.data = value.clone()


def _is_equal(now: torch.Tensor, value: torch.Tensor) -> bool:
    return bool(((now == value) | ((now != now) & (value != value))).all())


def _is_comparable(now: torch.Tensor, value: torch.Tensor) -> bool:
    import torch

    return now.shape == value.shape and now.layout == value.layout == torch.strided


def _cuda_states() -> Any:
    """Return the states of the CUDA generators, None where no device is in use."""
    cuda: Any = sys.modules["torch"].cuda
    return cuda.get_rng_state_all() if cuda.is_initialized() else None


class _RandomNumbers:
    """The states of the generators of torch on every device in use, of Python, and of numpy where it is imported."""

    def __init__(self) -> None:
        import torch

        self._torch = torch.get_rng_state()
        self._cuda = _cuda_states()
        self._python = random.getstate()
        self._numpy: Any = numpy.random.get_state() if (numpy := sys.modules.get("numpy")) is not None else None

    def restore(self) -> None:
        """Put all of them back."""
        import torch

        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
