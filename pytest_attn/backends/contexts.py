"""Contexts that a library's code runs in: without its warnings, without Python's collector, with variables of its own."""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.raised import ending_no_test

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


#: what torch 2.6 and later ones call dynamo's limits, and what makes an error of reaching one
_LIMITS = (("recompile_limit", "cache_size_limit"), ("accumulated_recompile_limit", "accumulated_cache_size_limit"))
_FAILS = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")
_UNLIMITED = 1 << 30
_GAVE_UP = re.compile(r".*(recompile|cache)(_size)?[_ ]limit.* (reached|exceeded)")
_given_up = 0
RAN_EAGERLY = "what torch.compile makes may have run eagerly"


@contextmanager
def unlimited_recompiles() -> Iterator[None]:
    """Keep what torch.compile made from running eagerly, which it does from the eighth compilation of a function on.

    Each workload is a legitimate compilation. What has given up before is compiled anew. Raises RuntimeError where a function
    gives up all the same. Does nothing where nothing has been compiled in this process yet.
    """
    global _given_up
    config: Any = sys.modules.get("torch._dynamo.config")
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if config is None or utils is None or getattr(config, _present(config, *_LIMITS[0])) == _UNLIMITED:
        yield
        return
    given_up = sum(times for why, times in utils.counters["unimplemented"].items() if _GAVE_UP.match(why))
    if given_up > _given_up:
        sys.modules["torch._dynamo"].reset()
    _given_up = given_up
    changes: dict[str, Any] = {_present(config, *names): _UNLIMITED for names in _LIMITS}
    if not config.suppress_errors:  # which torch does not take together
        changes[_present(config, *_FAILS)] = True
    try:
        with config.patch(changes):
            yield
    except Exception as error:
        if not re.fullmatch(r"FailOn\w+LimitHit", type(error).__name__):
            raise
        raise RuntimeError(
            "torch.compile gave up: it compiled this function as often as it may, and would run it eagerly, so compiled code"
            " cannot be judged; leave out recompile_limit= of torch.compile"
        ) from error


def _present(config: Any, *names: str) -> str:
    return next(name for name in names if hasattr(config, name))


def eager_because() -> str:
    """Say why what torch.compile makes may run eagerly here, as far as its settings tell; "" where it does not."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None:
        return ""
    stance = getattr(getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None), "stance", "default")
    settings = {
        "TORCHDYNAMO_DISABLE=1": os.environ.get("TORCHDYNAMO_DISABLE") == "1",
        "torch._dynamo.config.disable is set": config.disable,
        f"its stance is {stance}": stance in ("force_eager", "eager_on_recompile"),
        "torch._dynamo.config.suppress_errors is set": config.suppress_errors,
    }
    found = next((name for name, is_set in settings.items() if is_set), "")
    return found and f"{RAN_EAGERLY}: {found}"


def compiling_seconds() -> float:
    """Return the seconds in which torch.compile has worked in this process; another release may not tell."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return math.fsum(getattr(utils, "compilation_time_metrics", {}).get("_compile.compile_inner", ()))


@contextmanager
def judged_code(name: str, is_quiet: bool) -> Iterator[None]:
    """Surround what is judged: compiled code stays compiled, and the test goes on.

    name: what is judged. is_quiet: its warnings are a library's, and fail no test.
    """
    with quiet() if is_quiet else untraced(), unlimited_recompiles(), ending_no_test(name):
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

    from pytest_attn.backends.gradients import gradients_of

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
                return tuple(gradients_of([ctx.out], ctx.leaves, douts, retain_graph=True))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            return Within.apply(q, k, v)  # type: ignore[no-untyped-call]
        with context():
            return fn(q, k, v)

    return call
