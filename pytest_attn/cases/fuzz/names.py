"""The imports that a test's source needs where it stands alone: one for each global name that it uses."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Iterator
from types import ModuleType


def imports_for(source: str, function: Callable[..., object]) -> list[str]:
    """Return import lines for the names of `source` that `function` finds in its module, sorted.

    source: the text of a test, whatever it is called there. A constant of the test's module is imported from there. A name
    that the module lacks is left out.
    """
    known = getattr(function, "__globals__", {})
    lines = {_import_of(name, known[name], function.__module__) for name in _names_in(source) if name in known}
    return sorted(lines, key=lambda line: (not line.startswith("import "), line))


def _names_in(source: str) -> Iterator[str]:
    """Yield the names that a source reads, but for those of Python."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
            yield node.id


def _import_of(name: str, value: object, module: str) -> str:
    """Return the line that binds a name to its value: from where the value is defined, else from the test's module."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__}" if value.__name__ == name else _renamed_module(name, value)
    home, own = str(getattr(value, "__module__", "") or ""), str(getattr(value, "__name__", "") or "")
    public = home.partition(".")[0]
    for place in (public, home):
        if own and getattr(sys.modules.get(place), own, None) is value:
            return f"from {place} import {own}" + ("" if own == name else f" as {name}")
    return f"from {module} import {name}"


def _renamed_module(name: str, value: ModuleType) -> str:
    parent, _, last = value.__name__.rpartition(".")
    if parent and last == name:
        return f"from {parent} import {name}"
    return f"import {value.__name__} as {name}"
