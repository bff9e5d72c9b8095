"""Functions that a user names as attention: by themselves, or as "package.module.function"."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from pytest_attn.models.entry_points import EntryPoint, read_named

#: one function of q, k, v and options, or where it is found
Named: TypeAlias = Callable[..., Any] | str


def as_functions(functions: Iterable[Named] | Named) -> tuple[Named, ...]:
    """Return functions that a user names, one or several, as a tuple."""
    return (functions,) if isinstance(functions, str) or callable(functions) else tuple(functions)


def named_entry_points(functions: Iterable[Named] | Named) -> list[EntryPoint]:
    """Return an entry point for each. Raises ValueError where one is not found, or is held by no name of its module."""
    return [_entry_point(function) for function in as_functions(functions)]


def _entry_point(function: Named) -> EntryPoint:
    if isinstance(function, str):
        module, _, attribute = function.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"functions: {function!r} is not found ({error}); expected 'package.module.function'") from None
    else:
        module, attribute, found = _home(function)
    parameters = inspect.signature(found).parameters
    names = tuple(parameters)
    if len(names) < 3:
        raise ValueError(f"functions: {attribute} takes {len(names)} arguments; expected q, k, v and options")
    tensors = names[0], names[1], names[2]
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    read = partial(read_named, tensors=tensors, defaults=defaults)
    return EntryPoint(module, attribute, names, read, "", tensors, attribute)


def _home(function: Callable[..., Any]) -> tuple[str, str, Callable[..., Any]]:
    import sys

    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    held: Any = sys.modules.get(module)
    for part in name.split("."):
        held = getattr(held, part, None)
    if held is not function:
        raise ValueError(f"functions: {function!r} is not found under its name {module}.{name}; say a function of a module")
    return module, name, function
