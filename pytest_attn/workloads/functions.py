"""Functions that users give: what they are called, how they must be callable, and what they returned instead."""

from __future__ import annotations

import functools
import inspect
import types
import zlib
from collections.abc import Callable


def function_name(fn: object) -> str:
    """Name a callable as its author does: "f", "f[block=64]" for a partial, "Kernel.forward", "lambda"."""
    if isinstance(fn, functools.partial):
        given = [*map(str, filter(_is_plain, fn.args)), *(f"{k}={v}" for k, v in fn.keywords.items() if _is_plain(v))]
        return function_name(fn.func) + (f"[{','.join(given)}]" if given else "")
    name = str(getattr(fn, "__name__", type(fn).__name__)).replace("<lambda>", "lambda")
    owner = getattr(fn, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return name
    return f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}"


def function_label(fn: object) -> str:
    """Name a function for an id: the same in every process, different for different closures and lambdas."""
    written = function_name(fn)
    name, is_partial, _ = written.partition("[")
    code = getattr(fn, "__code__", None)
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    plain = [value for value in (*cells, *(getattr(fn, "__defaults__", None) or ())) if _is_plain(value)]
    if is_partial:
        plain = [written]
    if name == "lambda" or plain:
        where = (getattr(fn, "__module__", ""), getattr(code, "co_firstlineno", 0), plain)
        name += f"-{zlib.crc32(repr(where).encode()) & 0xFFFF:04x}"
    return name


def _is_plain(value: object) -> bool:
    """Whether a value is written the same in every process."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def require_parameters(field: str, fn: Callable[..., object], names: tuple[str, ...]) -> None:
    """Raise ValueError unless `fn` can be called with as many positional arguments as there are names."""
    try:
        inspect.signature(fn).bind(*names)
    except TypeError:
        raise ValueError(
            f"Workload: {field} must be a function of ({', '.join(names)}), got {function_label(fn)}{inspect.signature(fn)}"
        ) from None
    except ValueError:  # a builtin without a signature: the call itself will tell
        return


def describe(value: object) -> str:
    """Say what a value is, in the words of an error message."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        return f"{type(value).__name__}"
    return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(shape)}"
