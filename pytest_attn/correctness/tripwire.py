"""Traces of a callable that meet whoever computes next: switches of torch that it turned, functions that it replaced.

Both are put back, and fail its case. What runs in the same process can undo all of that: it stops no attack that is meant.
"""

from __future__ import annotations

import builtins
import functools
import gc
import locale
import operator
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

from pytest_attn.backends.contexts import quiet
from pytest_attn.correctness.contract import ContractError

# -- torch's switches --------------------------------------------------------------------------------------------------


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


# -- functions ---------------------------------------------------------------------------------------------------------


#: whose functions a judgment relies on: of torch itself and of Python, those named below
_WATCHED = (
    *("math", "time", "torch", "torch.Tensor", "torch.nn.functional", "torch.autograd", "torch.cuda.Event"),
    *("_pytest.main.Session", "_pytest.reports.TestReport", "_pytest.runner", "_pytest.runner.CallInfo"),
)
_OF_TORCH = (
    *("allclose", "arange", "cat", "compile", "empty", "equal", "full", "get_num_threads", "is_grad_enabled", "isclose"),
    *("manual_seed", "matmul", "ones", "rand", "randn", "softmax", "stack", "tensor", "where", "zeros", "zeros_like"),
)
_OF_PYTHON = (
    *("abs", "all", "any", "bool", "callable", "dict", "filter", "float", "getattr", "hasattr", "int", "isinstance"),
    *("issubclass", "iter", "len", "list", "map", "max", "min", "next", "range", "round", "set", "sorted", "str", "sum"),
    *("tuple", "type", "zip"),
)
#: stands for a name that is not there, and behind the last one
_NOTHING = object()


class _Space(NamedTuple):
    """A module or class, and its own name."""

    name: str
    owner: Any

    @property
    def names(self) -> dict[str, Any]:
        """Names that are watched of it, as they are wherever they are read."""
        names: dict[str, Any] = vars(self.owner)  # of a class a view, which copies itself as well
        return {name: names.get(name, _NOTHING) for name in _OF_TORCH} if self.owner is torch else names

    def added(self, was: Mapping[str, Any]) -> Iterator[str]:
        """Yield new names of a class that hide something of a base class."""
        hidden = self.owner.__mro__[1:] if isinstance(self.owner, type) else ()
        return (name for name in vars(self.owner).keys() - was.keys() if any(name in vars(one) for one in hidden))

    def put_back(self, name: str, value: object) -> None:
        """Have a name stand for a value again."""
        if value is _NOTHING:
            delattr(self.owner, name)
        elif isinstance(self.owner, type):
            type.__setattr__(self.owner, name, value)
        else:
            vars(self.owner)[name] = value


@functools.cache
def _spaces() -> tuple[_Space, ...]:
    """Return the spaces that are watched, of those that this process has imported."""
    return tuple(_Space(name, found) for name in _WATCHED if (found := _found(name)) is not None)


def _found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return sys.modules.get(name) or getattr(sys.modules.get(module), attribute, None)


@functools.lru_cache(1)
def _operators(number: int) -> frozenset[str]:
    """Return the operators of torch that have kernels of Python, which are this many: there are thousands to copy."""
    return frozenset(torch.library._impls)


@contextmanager
def functions_kept(where: str = "") -> Iterator[None]:
    """Put functions back that a callable has replaced: clocks, those of Python, pytest and torch, and torch's operators.

    Whoever reaches the judge's process can replace this package's own, too: a list of names to watch would never end.

    Raises ContractError that names them. What was replaced before is not laid to the callable. where: the callable, and on
    what it is judged.
    """
    spaces, operators = _spaces(), _operators(len(torch.library._impls))
    before, modules = [one.names.copy() for one in spaces], len(sys.modules)
    python = vars(builtins)
    of_python = {name: python[name] for name in _OF_PYTHON}
    try:
        yield
    finally:
        others = [(name, python[name]) for name, value in of_python.items() if python[name] is not value]
        python.update(of_python)  # before anything here calls them
        replaced = [f"{name} by {_described(now)}" for name, now in others]
        replaced += _put_all_back(spaces, before, modules)
        if len(operators) != len(torch.library._impls):
            replaced += _withdraw(torch.library._impls - operators, _libraries_since(modules))
        raised = sys.exc_info()[1]
        if replaced and (raised is None or isinstance(raised, Exception)):  # of which a judge's own may come from them
            then = f" (then {type(raised).__name__} was raised: {raised})" if raised else ""
            raise ContractError(
                f"the callable replaced {', '.join(replaced)}: that is put back, and nothing that was found meanwhile counts;"
                f" leave clocks, and functions of torch, as they are{then}",
                where,
            )


#: what times are taken by
_CLOCKS = ("perf_counter", "perf_counter_ns", "process_time", "monotonic", "sleep")


def require_clocks() -> None:
    """Raise RuntimeError where a clock was replaced before a callable is timed, as in a test whose time stands still."""
    for name in _CLOCKS:
        clock = getattr(time, name, None)
        if type(clock) is not BuiltinFunctionType or (clock.__self__, clock.__name__) != (time, name):
            raise RuntimeError(
                f"time.{name} is {_described(clock)} and not Python's own, so nothing can be timed; leave clocks as they are"
                " where a kernel is measured"
            )


def _described(value: object) -> str:
    """Say what stands in the place of a function, without asking it."""
    code = getattr(value, "__code__", None) if type(value) is FunctionType else None
    return f"{code.co_name} of {Path(code.co_filename).name}" if code else f"an object of type {type(value).__name__}"


def _libraries_since(modules: int) -> set[str]:
    """Return the files of installed modules that were imported after so many were."""
    files = (str(getattr(one, "__file__", "")) for one in islice(list(sys.modules.values()), modules, None))
    return {file for file in files if not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)}


def _put_all_back(spaces: Sequence[_Space], before: Sequence[dict[str, Any]], modules: int) -> Iterator[str]:
    """Put back the functions of all spaces; yield what was replaced. modules: how many were imported before."""
    after = [one.names for one in spaces]
    now, was = (chain(chain.from_iterable([one.values() for one in some]), (_NOTHING,)) for some in (after, before))
    if not all(map(operator.is_, now, was)):
        files = _libraries_since(modules)
        for space, names in zip(spaces, before, strict=True):
            yield from _put_back(space, names, files)


def _put_back(space: _Space, was: Mapping[str, Any], libraries: set[str]) -> Iterator[str]:
    """Put back the functions of a space; yield what was replaced, and by what. libraries: that were imported meanwhile."""
    kept = {name: value for name, value in was.items() if callable(value) or hasattr(type(value), "__get__")}
    for name, value in (kept | dict.fromkeys(space.added(was), _NOTHING)).items():
        now = vars(space.owner).get(name, _NOTHING)
        if now is value or (space.name.startswith("torch") and _may_stay(now, value, libraries)):
            continue
        space.put_back(name, value)
        yield f"{space.name}.{name}" if now is _NOTHING else f"{space.name}.{name} by {_described(now)}"


def _may_stay(now: Any, was: Any, libraries: set[str]) -> bool:
    """Return whether torch itself has wrapped a function of its own, or a library changed torch as it was imported."""
    if type(now) is not FunctionType:
        return False
    file = now.__code__.co_filename
    return file in libraries or (file.startswith(_TORCH) and getattr(now, "__wrapped__", None) is was)


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def _withdraw(added: set[str], libraries: set[str]) -> Iterator[str]:
    """Take kernels back that were registered for operators of torch; yield which were, and where.

    added: as torch.library names them, "aten/equal/CPU". Those of torch itself may stay, as FlashAttention 3 once activated.
    """
    for key in sorted(one for one in added if one.startswith("aten/")):
        name = key.split("/")[1]
        files = re.findall(r"registered at (.*\.py):\d+", torch._C._dispatch_dump(f"aten::{name}"))
        if file := next((one for one in files if not one.startswith(_TORCH) and one not in libraries), ""):
            for one in gc.get_objects():
                if type(one) is torch.library.Library and key in one._op_impls:
                    one._destroy()  # type: ignore[no-untyped-call]
            yield f"the operator aten::{name} by {Path(file).name}"
