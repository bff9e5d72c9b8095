"""Replace a function wherever it is held by name, and put it back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.contexts import quiet
from pytest_attn.models.compiled import uncompiled

if TYPE_CHECKING:
    import torch


@contextmanager
def replaced(wrappers: Mapping[int, Callable[[Any], Any]], model: torch.nn.Module | None) -> Iterator[None]:
    """Put wrap(function) wherever a function is held whose id is a key: modules, classes of the model, and its own fields.

    A function that torch.compile made of one of them is wrapped as well. What was there before comes back, whatever happens.
    """
    changed: list[tuple[Any, str, Any]] = []
    made: dict[int, Any] = {}
    try:
        with quiet():  # some names warn when they are looked at
            held = [(o, name, value, wrap) for o in _owners(model) for name, value, wrap in _held_by(o, wrappers)]
        for owner, name, value, wrap in held:
            function = value.__func__ if type(value) is staticmethod else value
            wrapped = made.setdefault(id(function), wrap(function))
            binds = hasattr(type(value), "__get__") and type(value) is not staticmethod
            try:
                setattr(owner, name, wrapped if binds or not isinstance(owner, type) else staticmethod(wrapped))
            except (AttributeError, TypeError):  # of a module or class that cannot be changed
                continue
            changed.append((owner, name, value))
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)


def _held_by(owner: Any, wrappers: Mapping[int, Callable[[Any], Any]]) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Yield name, value and wrapper of what an owner holds."""
    for name, value in list(vars(owner).items()):
        wrap = _wrapper_of(value, wrappers)
        if wrap is not None:
            yield name, value, wrap


def _wrapper_of(value: Any, wrappers: Mapping[int, Callable[[Any], Any]]) -> Callable[[Any], Any] | None:
    """Return what wraps a value, None where it is none of the functions; hundreds of thousands are asked for."""
    if id(value) in wrappers:
        return wrappers[id(value)]
    kind = type(value)
    if kind is staticmethod:
        return _wrapper_of(value.__func__, wrappers)
    if kind is not FunctionType or not value.__dict__:
        return None
    compiled_from = uncompiled(value)
    return None if compiled_from is None else wrappers.get(id(compiled_from))


def _owners(model: torch.nn.Module | None) -> Iterator[Any]:
    """Yield what holds functions by name: every imported module but our own, then classes and objects of the model."""
    for name, module in list(sys.modules.items()):
        if module is not None and not name.startswith("pytest_attn.") and isinstance(getattr(module, "__dict__", None), dict):
            yield module
    if model is None:
        return
    seen: set[int] = set()
    for part in model.modules():
        for owner in (part, *type(part).__mro__[:-1]):
            if id(owner) not in seen and owner.__module__ not in ("torch.nn.modules.module", "builtins"):
                seen.add(id(owner))
                yield owner
