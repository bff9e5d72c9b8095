"""A workload, and a test that fails on it, as text to paste."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest

from pytest_attn.backends.precision import Precision
from pytest_attn.workloads.functions import function_label
from pytest_attn.workloads.masks import Mask
from pytest_attn.workloads.workload import Workload


def write_test(item: pytest.Function, workload: Workload, backend: str | None, title: str) -> str:
    """Return the text of a test that runs `item`'s function on one workload, for its file or one beside it.

    title: the comment above. The text has the imports that it needs.
    """
    text, imports = write_workload(workload, home=item.function.__module__)
    marker = item.get_closest_marker("attention")
    assert marker is not None
    options = {name: value for name, value in marker.kwargs.items() if name != "dtypes"}  # the workload has its own
    if backend:
        options["backends"] = backend
    needed = {("pytest_attn", "Precision")} if isinstance(options.get("precision"), Precision) else set()
    arguments = ", ".join([text, *(f"{name}={value!r}" for name, value in options.items())])
    written = _renamed(item, re.sub(r"\W+", "_", workload.id), arguments)
    found = imports_for("\n".join(written), item.function)
    lines = dict.fromkeys(["import pytest", *found, *imports, *_import_lines(needed)])
    return "\n".join([f"# {title}", *_without_doubles(lines), "", "", *written])


def _without_doubles(lines: Iterable[str]) -> list[str]:
    """Return import lines without those of one name that a line of several names of the same module has as well."""
    given = list(lines)
    several = [line.partition(" import ") for line in given if "," in line]
    doubles = {f"{start} import {name}" for start, _, names in several for name in names.split(", ")}
    return [line for line in given if line not in doubles]


def _renamed(item: pytest.Function, suffix: str, arguments: str) -> list[str]:
    """Return the lines of a test's source with another name and marker."""
    function = item.function
    name = f"{function.__name__}_{suffix}"
    mark = f"@pytest.mark.attention({arguments})"
    try:
        source = textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(source).body[0]
        assert isinstance(definition, ast.FunctionDef)
    except (OSError, SyntaxError, AssertionError):  # made by other code
        parameters = ", ".join(inspect.signature(function).parameters)
        return [mark, f"def {name}({parameters}):", f"    ...  # as in {function.__name__}"]
    kept = [f"@{ast.unparse(one)}" for one in definition.decorator_list if not _is_attention_mark(one, function)]
    header, *body = source.splitlines()[definition.lineno - 1 :]
    lines = [mark, *kept, header.replace(function.__name__, name, 1), *body]
    return lines if item.cls is None else [f"class {item.cls.__name__}Again:", *(f"    {line}".rstrip() for line in lines)]


def _is_attention_mark(decorator: ast.expr, function: Callable[..., object]) -> bool:
    """Whether a decorator is the marker, whatever its module calls it."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(called, ast.Attribute):
        return called.attr == "attention"
    known = getattr(function, "__globals__", {}).get(getattr(called, "id", ""))
    return isinstance(known, pytest.MarkDecorator) and known.name == "attention"


def write_workload(workload: Workload, home: str = "") -> tuple[str, list[str]]:
    """Return text that evaluates to the workload, without what follows from the rest, and the imports that it needs.

    `home` is the module that it is written for, whose functions need no import.
    """
    given = {field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)}
    for name in reversed(list(given)):
        rest = {other: value for other, value in given.items() if other != name}
        if _makes(rest, workload):
            given = rest
    imports = {("pytest_attn", "Workload")}
    texts = []
    for name, value in given.items():
        text = _write_value(value, home, imports)
        is_positional = name == "q_len" or (name == "kv_len" and "q_len" in given)
        texts.append(text if is_positional else f"{name}={text}")
    return f"Workload({', '.join(texts)})", _import_lines(imports)


def _import_lines(imports: Iterable[tuple[str, str]]) -> list[str]:
    by_module: dict[str, list[str]] = {}
    for module, name in sorted(imports):
        by_module.setdefault(module, []).append(name)
    unwritten = [f"# write {name} here, which cannot be imported" for name in by_module.pop("", [])]
    return [f"from {module} import {', '.join(names)}" for module, names in by_module.items()] + unwritten


def _makes(fields: dict[str, Any], workload: Workload) -> bool:
    try:
        return Workload(**fields) == workload
    except ValueError:
        return False


def _write_value(value: object, home: str, imports: set[tuple[str, str]]) -> str:
    """Write a field's value, and note what must be imported for it."""
    if isinstance(value, str):
        return f'"{value}"'
    if callable(value):
        return _write_function(value, home, imports)
    kind = type(value)
    text = value.source(lambda function: _write_function(function, home, imports)) if isinstance(value, Mask) else repr(value)
    if text.startswith(kind.__name__):
        module = "pytest_attn" if kind.__module__.startswith("pytest_attn.") else kind.__module__
        if module not in (home, "builtins"):
            imports.add((module, kind.__name__))
    return text


def _write_function(function: Callable[..., object], home: str, imports: set[tuple[str, str]]) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not function:
        module, name = "", function_label(function).replace("-", "_")
    if module != home:
        imports.add((module, name))
    return name


# -- imports: one for each global name that a test's source needs where it stands alone --------------------------------


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
