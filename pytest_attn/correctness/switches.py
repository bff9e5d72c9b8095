"""What a callable leaves turned, of torch, Python and the process, meets whoever computes next: it is put back.

So is what can run code of its own later, such as the handler of a signal. The case fails. What runs in the same process can
undo all of that: it stops no attack that is meant.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import locale
import operator
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from contextvars import ContextVar
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
from pytest_attn.correctness.replaced_functions import described

#: set where a process of the callable's own watches it: what turns here, other threads have turned
RUNS_ELSEWHERE = ContextVar("RUNS_ELSEWHERE", default=False)


class Switch(NamedTuple):
    """Functions that read a switch, and turn it.

    is_left: of what it is now and what else it was, whether the callable has to put it back. part: names one of several parts.
    """

    read: Callable[[], Any]
    turn: Callable[[Any], object]
    is_left: Callable[[Any, Any], bool] = operator.ne
    part: Callable[[int], str] | None = None

    def said(self, name: str, now: Any, was: Any) -> str:
        """Say what it was left at."""
        if self.part is not None:
            at = next(
                (at for at, pair in enumerate(zip(now, was, strict=False)) if operator.ne(*pair)), min(len(now), len(was))
            )
            name, (now, was) = self.part(at), (_named(one[at]) if at < len(one) else "none" for one in (now, was))
        return f"the callable left {name} at {now}; it was {was}: restore what it changes"


class KeptSwitches:
    """Switches as they were when this was made. Around a call it puts them back, and a lower recursion limit.

    Raises ContractError where the callable left one turned. kind: of the device. only: names of switches, where not all.
    """

    def __init__(self, kind: str, only: Collection[str] = ()) -> None:
        known, self._modules = {} if RUNS_ELSEWHERE.get() else _switches(kind), len(sys.modules)
        self._limit = sys.getrecursionlimit()
        self._switches = {name: one for name, one in known.items() if not only or name in only}
        self._before = {name: one.read() for name, one in self._switches.items()}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        limit = sys.getrecursionlimit()
        if limit < self._limit:
            sys.setrecursionlimit(self._limit)  # here: near a low one nothing else runs; compilers raise it
        left = self.put_back()
        if limit < self._limit:
            left = Switch(int, int).said("Python's recursion limit", limit, self._limit)
        if left and error is None:
            raise ContractError(left)

    def put_back(self) -> str:
        """Put back what differs; say which a callable has left turned that none of its libraries did, "" for none."""
        turned = {}
        for name, one in self._switches.items():
            now, was = one.read(), self._before[name]
            if now != was and one.is_left(now, was):
                turned[name] = now
        if not turned:
            return ""
        excused = _OF_LIBRARIES & turned.keys()
        if excused and not self._has_loaded_libraries():
            excused = set()
        for name, now in turned.items():
            if name in excused & _STAYS:
                self._before[name] = now
            else:
                self._switches[name].turn(self._before[name])
        if _DETERMINISTIC in turned and turned[_DETERMINISTIC][0] == self._before[_DETERMINISTIC][0]:
            excused = {*excused, _DETERMINISTIC}
        left = (
            self._switches[name].said(name, now, self._before[name]) for name, now in turned.items() if name not in excused
        )
        return next(left, "")

    def _has_loaded_libraries(self) -> bool:
        imported, self._modules = len(sys.modules) != self._modules, len(sys.modules)
        return _has_loaded_libraries() or imported


def kept_from_running_later() -> KeptSwitches:
    """Return what can run a callable's own code between two calls, as it is now."""
    _has_loaded_libraries()  # which excuse nothing from now on
    return KeptSwitches("cpu", only=(*_LATER, "torch's modes"))


#: denormal numbers: a library that was compiled with -ffast-math turns it as it is loaded, and no kernel can help that
_FLUSHING = "torch's flushing of denormal numbers"
#: what a library turns as it is loaded or imported, which may be at the first call of a kernel
_HANDLERS, _FILTERS, _CORES = "handlers of signals", "Python's filters of warnings", "the cores of the process"
_CALLBACKS = "Python's callbacks of garbage collection"
_OF_LIBRARIES = {_FLUSHING, _HANDLERS, _FILTERS, _CORES, _CALLBACKS}
#: of these what it may need
_STAYS = {_HANDLERS, _FILTERS, _CALLBACKS}
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
        "cuDNN": Switch(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
        "threads of autograd": Switch(torch._C._is_multithreading_enabled, torch.autograd.set_multithreading_enabled),
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
    if hasattr(torch._C, "_set_mkldnn_enabled"):
        switches["oneDNN"] = Switch(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled)
    return {f"torch's {name}": one for name, one in switches.items()} | _LATER | _of_process()


#: reads it where it is given none
_locale = partial(locale.setlocale, locale.LC_ALL)


def _of_process() -> dict[str, Switch]:
    """Return switches of Python and of the process."""
    blocked, c = signal.pthread_sigmask, ctypes.CDLL(None)
    switches = {
        "the signals that are blocked": Switch(partial(blocked, signal.SIG_BLOCK, ()), partial(blocked, signal.SIG_SETMASK)),
        "the working directory": Switch(_working_directory, os.chdir),
        "the locale": Switch(_locale, _locale),
        "Python's garbage collection": Switch(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        "Python's thresholds of garbage collection": Switch(gc.get_threshold, lambda before: gc.set_threshold(*before)),
        "Python's interval between threads": Switch(sys.getswitchinterval, sys.setswitchinterval),
        _FILTERS: Switch(
            lambda: tuple(warnings.filters),
            _set_filters,
            _are_filters_left,
            part=lambda at: f"Python's filter {at + 1} of warnings",
        ),
        "the mask of new files": Switch(_umask, os.umask),
        "the timeout of new sockets": Switch(socket.getdefaulttimeout, socket.setdefaulttimeout),
    }
    if hasattr(c, "fesetround"):
        switches["the direction in which floats are rounded"] = Switch(c.fegetround, c.fesetround)
    if hasattr(os, "sched_setaffinity"):
        switches[_CORES] = Switch(partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0))
        switches["the scheduling class of the process"] = Switch(
            partial(os.sched_getscheduler, 0), lambda before: os.sched_setscheduler(0, before, os.sched_param(0))
        )
    return switches


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _are_filters_left(now: tuple[Any, ...], was: tuple[Any, ...]) -> bool:
    """Return whether some are gone, or one has come of all messages: those of one message libraries add as they run."""
    return not set(was) <= set(now) or any(message is module is None for _, message, _, module, _ in {*now} - {*was})


def _set_filters(filters: tuple[Any, ...]) -> None:
    warnings.resetwarnings()  # which has all be asked anew
    warnings.filters[:] = filters  # type: ignore[index]


# -- what can run later -------------------------------------------------------------------------------------------------


def _handlers() -> tuple[Any, ...]:
    return tuple(map(_getsignal, _SIGNALS))


def _set_handlers(before: tuple[Any, ...]) -> None:
    time.sleep(_UNDER_WAY)
    for number, now, was in zip(_SIGNALS, _handlers(), before, strict=True):
        if now is not was and was is not None:  # None: code of C handles it
            with suppress(ValueError):  # from another thread than the first
                signal.signal(number, was)


def _is_handler_left(now: tuple[Any, ...], was: tuple[Any, ...]) -> bool:
    """Return whether one differs that is not a debugger's, which a person may have started in a kernel."""
    return any(one is not other and not _is_of_debugger(one) for one, other in zip(now, was, strict=True))


def _handler_at(at: int) -> str:
    known = {int(one): one.name for one in signal.Signals}
    return f"the handler of {known.get(_SIGNALS[at], f'signal {_SIGNALS[at]}')}"


def _named(value: Any) -> str:
    """Name a handler of a signal, or a filter of warnings."""
    if type(value) is int:
        return {0: "SIG_DFL", 1: "SIG_IGN"}.get(value, str(value))
    return str(value) if type(value) is tuple else described(value)


#: seconds in which a signal that was sent comes, by which the process would end without its handler
_UNDER_WAY = 0.01
#: without an enumeration of what it returns, which takes longer
_getsignal: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
_SIGNALS = tuple(sorted(map(int, signal.valid_signals())))


def _timer(which: int) -> Switch:
    return Switch(lambda: any(signal.getitimer(which)), lambda before: signal.setitimer(which, 0), operator.gt)


def _wakeup_descriptor() -> int:
    """Return the descriptor that signals write to, -1 for none."""
    with suppress(ValueError):  # from another thread than the first
        if (descriptor := signal.set_wakeup_fd(-1)) >= 0:
            signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)  # as asyncio sets it
        return descriptor
    return -1


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
    if hasattr(torch._C, "_set_math_sdp_allow_fp16_bf16_reduction"):
        known["sums of MATH SDPA in half precision"] = Switch(
            torch._C._get_math_sdp_allow_fp16_bf16_reduction, torch._C._set_math_sdp_allow_fp16_bf16_reduction
        )
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


_saved_tensors_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def _leave_saved_tensors_hooks(before: Any) -> None:
    while (now := _saved_tensors_hooks()) is not None and now != before:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def watchers() -> tuple[Any, ...]:
    """Return what Python tells of each line or function."""
    return tuple(_LATER[name].read() for name in _WATCHERS)


def unwatch(before: tuple[Any, ...]) -> None:
    """Have Python tell nobody who has not been among its watchers before; raise ContractError where a callable left one."""
    left = ""
    for name, was in zip(_WATCHERS, before, strict=True):
        one, now = _LATER[name], _LATER[name].read()
        if now is not was and (type(now) is not tuple or now != was):
            one.turn(was)
            left = one.said(name, now, was) if one.is_left(now, was) else left
    if left:
        raise ContractError(f"while it was timed, {left}")


def _is_trace_left(now: Any, was: Any) -> bool:
    """Return whether one has come that is not a debugger's, or one has gone."""
    return not _is_of_debugger(was if now is None else now)


def _is_of_debugger(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), getattr(sys.modules.get("bdb"), "Bdb", ()))


def _monitoring_tools() -> tuple[Any, ...]:
    monitoring = getattr(sys, "monitoring", None)  # before Python 3.12
    return tuple(map(monitoring.get_tool, range(6))) if monitoring else ()


def _free_monitoring_tools(before: tuple[Any, ...]) -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    for tool, (now, was) in enumerate(zip(_monitoring_tools(), before, strict=True)):
        if now != was:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)


_TIMERS = {"interval": "ITIMER_REAL", "virtual": "ITIMER_VIRTUAL", "profiling": "ITIMER_PROF"}  # which Windows lacks
#: a timer that was armed before may have come to its end, or have been disarmed
_LATER = {
    **{f"the {name} timer": _timer(getattr(signal, which)) for name, which in _TIMERS.items() if hasattr(signal, which)},
    _HANDLERS: Switch(_handlers, _set_handlers, _is_handler_left, _handler_at),
    "the descriptor that signals write to": Switch(
        _wakeup_descriptor, lambda before: signal.set_wakeup_fd(before, warn_on_full_buffer=False)
    ),
    "Python's profile function": Switch(sys.getprofile, _set_profile),
    "Python's trace function": Switch(sys.gettrace, sys.settrace, _is_trace_left),
}
if hasattr(sys, "monitoring"):
    _LATER["Python's monitoring tools"] = Switch(_monitoring_tools, _free_monitoring_tools)
#: of these what Python tells of each line or function
_WATCHERS = [name for name in _LATER if name.startswith("Python's ")]
_LATER[_CALLBACKS] = Switch(lambda: tuple(gc.callbacks), lambda before: gc.callbacks.__setitem__(slice(None), before))
