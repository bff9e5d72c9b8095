"""Functions that a callable has replaced, of Python, pytest and torch, meet whoever computes next: they are put back.

The case fails. What runs in the same process can undo all of that: it stops no attack that is meant.
"""

from __future__ import annotations

import builtins
import functools
import gc
import operator
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch

from pytest_attn.correctness.contract import ContractError

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
    of_python, depth = {name: python[name] for name in _OF_PYTHON}, sys.getrecursionlimit()
    try:
        yield
    finally:
        if sys.getrecursionlimit() < depth:
            sys.setrecursionlimit(depth)  # which was too low for whatever looks at what was left
        others = [(name, python[name]) for name, value in of_python.items() if python[name] is not value]
        python.update(of_python)  # before anything here calls them
        replaced = [f"{name} by {described(now)}" for name, now in others]
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
                f"time.{name} is {described(clock)} and not Python's own, so nothing can be timed; leave clocks as they are"
                " where a kernel is measured"
            )


def described(value: object) -> str:
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
        yield f"{space.name}.{name}" if now is _NOTHING else f"{space.name}.{name} by {described(now)}"


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
