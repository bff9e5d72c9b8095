"""What a library's code runs in: without its warnings, without Python's collector, with variables of its own."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def untraced() -> Iterator[None]:
    """Keep torch's compiler trace out of captured logs: hundreds of lines that say nothing of a kernel.

    pytest puts its own handlers on a logger that does not propagate, so it is silenced, unless TORCH_TRACE wants it.
    """
    trace = logging.getLogger("torch.__trace")
    before = trace.disabled
    trace.disabled = before or "TORCH_TRACE" not in os.environ
    try:
        yield
    finally:
        trace.disabled = before


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the warnings of libraries from failing a run under -W error, and torch's compiler trace out of captured logs."""
    with untraced(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of what is timed, or captured in a graph."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while; what was there before comes back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def within(context: Callable[[], AbstractContextManager[object]], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return fn, called in a context in both directions: a library may patch torch for the backward pass, too."""
    import torch

    class Within(torch.autograd.Function):
        """Keeps the graph of the call, to go through it in the context."""

        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.leaves = [t.detach().requires_grad_() for t in tensors]
            with torch.enable_grad(), context():
                ctx.out = fn(*ctx.leaves)
            out: torch.Tensor = ctx.out.detach()
            return out

        @staticmethod
        def backward(ctx: Any, *douts: torch.Tensor) -> Any:
            with context():
                return torch.autograd.grad(ctx.out, ctx.leaves, douts[0], retain_graph=True, allow_unused=True)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            return Within.apply(q, k, v)  # type: ignore[no-untyped-call]
        with context():
            return fn(q, k, v)

    return call
