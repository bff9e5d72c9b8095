"""Functions that users give: what they are called, how they must be callable, and how they are written down and imported."""

import functools
import importlib
import inspect
import re
import shlex
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any


def function_name(fn: object) -> str:
    """Name a callable as its author does, in a printable line: "f", "f[block=64]" of a partial, "Kernel.forward", "lambda"."""
    if isinstance(fn, functools.partial):
        given = [*map(str, filter(_is_plain, fn.args)), *(f"{k}={v}" for k, v in fn.keywords.items() if _is_plain(v))]
        return printable(function_name(fn.func) + (f"[{','.join(given)}]" if given else ""))
    name = str(getattr(fn, "__name__", type(fn).__name__)).replace("<lambda>", "lambda")
    owner = getattr(fn, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return printable(name)
    return printable(f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}")


def type_name(value: object) -> str:
    """Return the name of a value's class in one printable line."""
    return printable(type(value).__name__)


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


# -- names that anybody can choose, as what can be printed and typed anywhere ------------------------------------------------

#: characters of a name, beyond which it is cut and told apart by a checksum
LONGEST = 200
#: what a runner of GitHub Actions takes for a command: the older form also within a line
_COMMAND = re.compile(r"(?:^|(?<=\s)):(?=:\w)|#(?=#\[)")


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function by name, None where nobody knows them, as of some builtins."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def printable(text: str, longest: int = LONGEST) -> str:
    """Return a name as one line of printable characters: others are written as Python escapes them.

    Bidirectional marks and surrogates are such others, and what begins a command for the log of a job is escaped. longest: how
    many characters it may have; 0 for any number.
    """
    if not text.isprintable():
        text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
    text = _COMMAND.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    return f"{text[: longest - 11]}...{zlib.crc32(text.encode()):08x}" if 0 < longest < len(text) else text


def printable_lines(text: str) -> str:
    """Return a text of several lines, each as `printable` leaves it, at whatever length."""
    return "\n".join(printable(line, 0) for line in text.split("\n"))


def shell_word(text: str) -> str:
    """Return a word for a shell; one that cannot be printed is written as bash and zsh read it, $'...'."""
    if printable(text, 0) == text:
        return shlex.quote(text)
    plain = frozenset(map(chr, range(32, 127))) - frozenset("\\'#:")
    shown = (chr(byte) if chr(byte) in plain else f"\\x{byte:02x}" for byte in _bytes_of(text))
    return f"$'{''.join(shown)}'"


def _bytes_of(text: str) -> bytes:
    """Return the bytes of a word: a surrogate that stands for a byte is that byte, as in a path of another encoding."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


# -- how they are called, written down and imported ------------------------------------------------------------------------


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
    if getattr(value, "is_nested", False):  # which has no shape, or one, by what torch has loaded
        return "a nested tensor"
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
