"""Switches that a callable leaves turned, of torch, Python and the process, meet whoever computes next: they are put back.

The case fails. What runs in the same process can undo all of that: it stops no attack that is meant.
"""

from __future__ import annotations

import functools
import gc
import locale
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

from pytest_attn.backends.contexts import quiet
from pytest_attn.correctness.contract import ContractError


class Switch(NamedTuple):
    """Functions that read a switch, and turn it."""

    read: Callable[[], Any]
    turn: Callable[[Any], object]


@contextmanager
def switches_kept(kind: str) -> Iterator[None]:
    """Put torch's switches back after a call on a kind of device. Raises ContractError where the callable left one turned."""
    switches = _switches(kind)
    before = {name: one.read() for name, one in switches.items()}
    turned: dict[str, Any] = {}
    try:
        yield
    finally:
        for name, one in switches.items():
            if (now := one.read()) != before[name]:
                turned[name] = now
                one.turn(before[name])
        if _FLUSHING in turned and _has_loaded_libraries():
            del turned[_FLUSHING]
        if _DETERMINISTIC in turned and turned[_DETERMINISTIC][0] == before[_DETERMINISTIC][0]:
            del turned[_DETERMINISTIC]
    for name, now in turned.items():
        raise ContractError(f"the callable left {name} at {now}; it was {before[name]}: restore what it changes")


#: denormal numbers: a library that was compiled with -ffast-math turns it as it is loaded, and no kernel can help that
_FLUSHING = "torch's flushing of denormal numbers"
#: what a kernel that turns them on puts back by the one word that torch has for that, which forgets that they only warn
_DETERMINISTIC = "torch's deterministic algorithms"
_libraries: set[str] = set()


def _has_loaded_libraries() -> bool:
    """Return whether this process has loaded shared libraries since this was last asked, where the system tells."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        loaded = {line.rpartition(" ")[2] for line in lines if ".so" in line}
        found = not loaded <= _libraries
        _libraries.update(loaded)
        return found
    return False


@functools.cache
def _switches(kind: str) -> dict[str, Switch]:
    of_cuda, warns_only = torch.backends.cuda, torch.is_deterministic_algorithms_warn_only_enabled
    _has_loaded_libraries()
    switches = {
        "inference mode": Switch(torch.is_inference_mode_enabled, _enter_inference_mode),
        "grad mode": Switch(torch.is_grad_enabled, torch.set_grad_enabled),
        "default dtype": Switch(torch.get_default_dtype, torch.set_default_dtype),
        "default device": Switch(
            torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)
        ),
        **{
            f"autocast on {one}": Switch(partial(torch.is_autocast_enabled, one), partial(torch.set_autocast_enabled, one))
            for one in {"cpu", kind}
        },
        "modes": Switch(_modes, _leave_modes),
        "hooks of saved tensors": Switch(_saved_tensors_hooks, _leave_saved_tensors_hooks),
        "detection of anomalies": Switch(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "number of threads": Switch(torch.get_num_threads, torch.set_num_threads),
        "flushing of denormal numbers": Switch(lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
        "deterministic algorithms": Switch(
            lambda: (torch.are_deterministic_algorithms_enabled(), warns_only()),
            lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
        ),
        **_precisions(),
        **{
            f"{name} SDPA": Switch(getattr(of_cuda, f"{name}_sdp_enabled"), getattr(of_cuda, f"enable_{name}_sdp"))
            for name in ("flash", "mem_efficient", "math", "cudnn")
        },
    }
    named = {f"torch's {name}": one for name, one in switches.items()}
    return named | {
        "the working directory": Switch(_working_directory, os.chdir),
        "the locale": Switch(lambda: locale.setlocale(locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
        "Python's garbage collection": Switch(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        "Python's profile function": Switch(sys.getprofile, _set_profile),
        "Python's trace function": Switch(_trace_function, sys.settrace),
        "Python's monitoring tools": Switch(_monitoring_tools, _free_monitoring_tools),
    }


def _working_directory() -> str:
    """Return it; "." where it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return "."


def _set_profile(profile: Any) -> None:
    """Set the profile function; a profiler of cProfile, which before Python 3.12 stands in its place, sets itself."""
    if hasattr(profile, "enable"):
        sys.setprofile(None)
        profile.enable()
    else:
        sys.setprofile(profile)


def _precisions() -> dict[str, Switch]:
    """Return how matrix products of float32, and sums of other dtypes, may be rounded."""
    matmul, known = torch.backends.cuda.matmul, {}
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        if hasattr(matmul, name):
            known[f"backends.cuda.matmul.{name}"] = Switch(partial(getattr, matmul, name), partial(setattr, matmul, name))
    read, turn = (getattr(torch._C, f"_{way}_fp32_precision_{way}ter", None) for way in ("get", "set"))
    if read is None or turn is None:  # before torch 2.9
        known["float32 matmul precision"] = Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
        known["backends.cudnn.allow_tf32"] = Switch(torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32)
        return known

    def effective(backend: str, operation: str) -> str:
        precision: str = read(backend, operation)
        return "ieee" if precision == "none" else precision  # nobody's wish, or what it was put back to

    def put_back(backend: str, operation: str, precision: str) -> None:
        if (backend, operation) == ("cuda", "matmul"):
            with quiet():  # the older word for it, of which torch warns, must not contradict
                torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        turn(backend, operation, precision)

    for place in product(("cuda", "mkldnn"), ("matmul", "conv", "rnn")):
        known[f"float32 precision of {' '.join(place)}"] = Switch(partial(effective, *place), partial(put_back, *place))
    return known


#: how each stack of modes that operations go through is read, and how its last mode is left
_STACKS: tuple[tuple[Any, Any], ...] = (
    (_get_current_function_mode_stack, _pop_mode),
    (_get_current_dispatch_mode_stack, _pop_dispatch_mode),
)


def _modes() -> tuple[str, ...]:
    """Return the types of these modes, but for that of the default device, which is a switch of its own."""
    modes = (mode for stack, _ in _STACKS for mode in stack())
    return tuple(type(mode).__name__ for mode in modes if type(mode) is not DeviceContext)


def _leave_modes(before: tuple[str, ...]) -> None:
    for stack, pop in _STACKS:
        while _modes() != before and stack():
            pop()


_guards: list[object] = []


def _enter_inference_mode(before: bool) -> None:
    _guards.append(torch._C._InferenceMode(before))  # which ends with its guard


def _saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _leave_saved_tensors_hooks(before: Any) -> None:
    while (now := _saved_tensors_hooks()) is not None and now != before:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _trace_function() -> Any:
    """Return it, None where it is a debugger's, which a person may have started in a kernel."""
    found, debugger = sys.gettrace(), getattr(sys.modules.get("bdb"), "Bdb", ())
    return None if isinstance(getattr(found, "__self__", None), debugger) else found


def _monitoring_tools() -> tuple[Any, ...]:
    monitoring = getattr(sys, "monitoring", None)  # before Python 3.12
    return tuple(map(monitoring.get_tool, range(6))) if monitoring else ()


def _free_monitoring_tools(before: tuple[Any, ...]) -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    for tool, (now, was) in enumerate(zip(_monitoring_tools(), before, strict=True)):
        if now != was:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)
