"""Functions that users give: what they are called, how they must be callable, and how they are written down and imported."""

import functools
import importlib
import inspect
import types
import zlib
from collections.abc import Callable
from typing import Any


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
    """Return whether a value is written the same in every process."""
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


class UnknownFunctionError(ValueError):
    """A function of a workload cannot be imported here."""


def encode_function(function: Callable[..., Any]) -> dict[str, str]:
    """Return where a function can be imported from, and its label."""
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", None) or ""
    return {"module": module, "name": name, "label": function_label(function)}


def decode_function(encoded: dict[str, str]) -> Callable[..., Any]:
    """Import the function of `encode_function`; raise UnknownFunctionError for anything else of the same name."""
    module, name, label = encoded["module"], encoded["name"], encoded["label"]
    found: Any = None if "<" in name else _module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, types.FunctionType) or function_label(found) != label:
        raise UnknownFunctionError(f"{label} of {module or 'an unknown module'} cannot be imported here")
    return found


def _module(name: str) -> types.ModuleType | None:
    """Import a module, None where that fails: a test module may even end with pytest's own kind of exception."""
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
