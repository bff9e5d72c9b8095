"""Functions that a user names as attention: by themselves, or as "package.module.function"."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from pytest_attn.backends.attention_args import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    refuse_unread,
    shortened,
)
from pytest_attn.backends.libraries.sdpa import read_plain

#: one function of q, k, v and options, or where it is found
Named: TypeAlias = Callable[..., Any] | str


def as_functions(functions: Iterable[Named] | Named) -> tuple[Named, ...]:
    """Return functions that a user names, one or several, as a tuple."""
    return (functions,) if isinstance(functions, str) or callable(functions) else tuple(functions)


def user_functions(functions: Iterable[Named] | Named) -> list[AttentionFunction]:
    """Return how each is read. Raises ValueError where one is not found, or is held by no name of its module."""
    return [_user_function(function) for function in as_functions(functions)]


def _user_function(function: Named) -> AttentionFunction:
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
    read = partial(_read, tensors=tensors, defaults=defaults)
    return AttentionFunction(module, attribute, names, read, "", tensors, attribute)


def _home(function: Callable[..., Any]) -> tuple[str, str, Callable[..., Any]]:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    held: Any = sys.modules.get(module)
    for part in name.split("."):
        held = getattr(held, part, None)
    if held is not function:
        raise ValueError(f"functions: {function!r} is not found under its name {module}.{name}; say a function of a module")
    return module, name, function


# -- how they are read --------------------------------------------------------------------------------------------------

_CAUSAL, _SCALE = ("is_causal", "causal"), ("scale", "softmax_scale", "scaling", "sm_scale")
_MASK, _DROPOUT = ("attn_mask", "mask", "attention_mask"), ("dropout_p", "dropout")
_SOFTCAP = "softcap"


def _read(given: Mapping[str, Any], tensors: tuple[str, str, str], defaults: Mapping[str, Any]) -> AttentionArguments:
    """Read a user's function: q, k, v (batch, heads, rows, dim), and options under the names that are usual for them.

    defaults: what options are that are not given. Those under other names are not checked.
    """
    options = {name: defaults[name] for name in (*_MASK, *_CAUSAL, *_SCALE, *_DROPOUT, _SOFTCAP) if name in defaults}
    options |= given
    q, k, v = (options.pop(name) for name in tensors)
    for name, tensor in zip(tensors, (q, k, v), strict=True):
        if getattr(tensor, "ndim", 0) != 4:
            raise UnreadableError(f"its argument {name} is {shortened(tensor)}; expected (batch, heads, rows, dim)")

    def option(names: tuple[str, ...]) -> Any:
        return next((value for name in names if (value := options.pop(name, None)) is not None), None)

    attn_mask, causal, scale, dropout = (option(names) for names in (_MASK, _CAUSAL, _SCALE, _DROPOUT))
    softcap = option((_SOFTCAP,))
    refuse_unread(options, set())
    given_to_sdpa = {"query": q, "key": k, "value": v, "attn_mask": attn_mask, "is_causal": causal, "scale": scale}
    if hasattr(dropout, "p"):  # a module
        dropout = dropout.p if dropout.training else 0.0
    arguments = read_plain({**given_to_sdpa, "dropout_p": dropout})
    return dataclasses.replace(arguments, softcap=softcap)
