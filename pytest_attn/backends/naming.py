"""What reports call a user's callable."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from pytest_attn.workloads.functions import function_name

#: characters of what a callable closes over, beyond which a name says no more
_LONGEST = 60


def called_name(fn: Callable[..., Any], within: str = "") -> str:
    """Return the name that a callable's author knows: qualified, and with what it closes over in brackets.

    within: the qualified name of the test that hands it over, which goes without saying.
    Examples: "my_attention", "Attention.forward", "my_attention[causal=True]" of a partial, "make.fn[window=128]" of a local
    function, "lambda[my_attention]" of a lambda that calls it, "test_mine.lambda" of one that calls nothing.
    """
    fn = _undecorated(fn)
    if not isinstance(fn, types.FunctionType):
        return function_name(fn)
    name = fn.__qualname__.replace(".<locals>", "").replace("<lambda>", "lambda")
    inside = list(_closed_over(fn))
    if fn.__name__ == "<lambda>" and (called := _first_called(fn)):
        inside.insert(0, called)
    name = f"{name}[{_shortened(inside)}]" if inside else name
    shorter = name.removeprefix(f"{within}.") if within else name
    return name if shorter == "lambda" else shorter


def _undecorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return what decorators that say so were put around, as torch.compile is around a function."""
    try:
        inner: Callable[..., Any] = inspect.unwrap(fn)
    except ValueError:  # a circle
        return fn
    return inner


def _closed_over(fn: types.FunctionType) -> Iterator[str]:
    """Yield what a function keeps beside its code: closed-over variables and defaults, where they can be written."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        yield from _setting(name, value)
    code, defaults, keywords = fn.__code__, fn.__defaults__ or (), fn.__kwdefaults__ or {}
    positional = code.co_varnames[: code.co_argcount]
    with_defaults = [*zip(positional[len(positional) - len(defaults) :], defaults, strict=True), *keywords.items()]
    for name, value in with_defaults:
        yield from _setting(name, value)


def _setting(name: str, value: object) -> Iterator[str]:
    if value is None or isinstance(value, bool | int | float | str):
        yield f"{name}={value}"
    elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | functools.partial):
        yield f"{name}={function_name(value)}"


def _first_called(fn: types.FunctionType) -> str:
    """Return the first callable of its module that a function names, "" where it names none."""
    names = iter(fn.__code__.co_names)
    for name in names:
        value, path = fn.__globals__.get(name), name
        while isinstance(value, types.ModuleType) and (attribute := next(names, None)):
            value, path = getattr(value, attribute, None), attribute
        if callable(value):
            return path
    return ""


def _shortened(parts: list[str]) -> str:
    text = ",".join(parts)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
