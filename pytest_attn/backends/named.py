"""A function by its name, "module:function": imported when it is first needed."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_attn.workloads.functions import parameters_of
from pytest_attn.workloads.inputs import Inputs

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

_NAME = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
#: what a function is handed beside q, k and v where it has a parameter of the name
OFFERED = (*("workload", "bias", "sinks", "alibi_slopes", "cu_seqlens", "cu_seqlens_kv", "kv_lens", "page_table", "descales"),)


class UnimportableError(ImportError):
    """A function cannot be imported by its name; the text says why, and what helps."""


def is_name(text: str) -> bool:
    """Return whether a text has the form "module:function"."""
    return _NAME.fullmatch(text) is not None


def is_imported_from_a_test(module: str) -> bool:
    """Return whether a module is imported in this process, and is none that is installed."""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    installed = [Path(sysconfig.get_path(one)) for one in ("stdlib", "purelib", "platlib")]
    return path != "" and not any(place in Path(path).parents for place in installed)


def imported(name: str, file: str = "") -> Callable[..., Any]:
    """Import a function by "module:function"; the working folder is looked through last. Raises UnimportableError.

    file: of the module, where it is not searched for.
    """
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = _from_file(module, file) if file else importlib.import_module(module)
    except Exception as error:
        advice = (
            f"; put the folder of {module.partition('.')[0]} on sys.path, by `pythonpath = FOLDER` in pytest's configuration"
        )
        is_missing = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0])
        raise UnimportableError(
            f"{name} cannot be imported: {type(error).__name__}: {error}{advice if is_missing else ''}"
        ) from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        what = f"{path} of {module} is {type(found).__name__}" if found is not None else f"{module} has no {path}"
        raise UnimportableError(f"{name} cannot be imported: {what}; expected a callable of (q, k, v)")
    function: Callable[..., Any] = found
    return function


def _from_file(module: str, file: str) -> ModuleType:
    """Run a file as the module of this name: its text, as bytecode of a second ago may be of another."""
    sys.dont_write_bytecode = True  # of what it imports beside it
    found = sys.modules[module] = ModuleType(module)
    found.__file__ = file
    exec(compile(Path(file).read_bytes(), file, "exec"), vars(found))
    return found


def offered_to(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return which of `OFFERED` a function has parameters for; a **keywords is handed the workload.

    But for (*args, **kwargs), which hands on what it gets: a module's call, the `apply` of a `torch.autograd.Function`.
    """
    parameters = (parameters_of(function) or {}).values()
    names = {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    kinds = {one.kind for one in parameters}
    if inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        names.add("workload")
    return tuple(name for name in OFFERED if name in names)


class NamedFunction:
    """A function of (q, k, v) and keywords, which stands wherever a callable does."""

    #: whether it runs in a process of its own, and its module is imported there alone
    is_isolated = False

    def __init__(self, name: str) -> None:
        """Import nothing yet. Raises ValueError for what is not "module:function"."""
        if not is_name(name):
            raise ValueError(f'a function\'s name must be "module:function", got {name!r}')
        self.name = self.__name__ = name
        self.__module__, _, self.__qualname__ = name.partition(":")

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return imported(self.name)

    @property
    def wanted(self) -> Sequence[str]:
        """Those of `OFFERED` that it takes. Raises UnimportableError."""
        return offered_to(self._function)

    def executor(self, executor: Any) -> Any:
        """Return the `Executor` that runs it, by default that of its case, which is given."""
        return executor

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        """Call it."""
        return self._function(q, k, v, **given)

    def on(self, inputs: Inputs) -> Callable[..., Any]:
        """Return it with what it takes of some inputs, beside q, k and v."""
        offered: list[dict[str, Any]] = []  # until it is first called, nothing is imported

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
            if not offered:
                offered.append({name: getattr(inputs, name) for name in self.wanted})
            return self(q, k, v, **offered[0], **given)

        return call
