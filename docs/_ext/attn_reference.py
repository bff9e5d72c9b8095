"""Directives that write the reference from the package: markers, fixtures, hooks, the API, workloads, inputs.

Each turns what the code declares into reStructuredText, so nothing here repeats what the code says.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import pytest_attn
from pytest_attn import hooks, plugin
from pytest_attn.backends.precision import PRECISIONS, Precision
from pytest_attn.plugin import MARKERS
from pytest_attn.reports.records import FIELDS
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import DISTRIBUTIONS


def markers() -> Iterator[str]:
    """Every marker: its signature and what it does."""
    for marker in MARKERS:
        signature, _, text = marker.partition("): ")
        yield f".. describe:: @pytest.mark.{signature})"
        yield ""
        yield f"   {plain(text[0].upper() + text[1:])}."
        yield ""


def fixtures() -> Iterator[str]:
    """Every public fixture: what it returns, and its docstring."""
    for name, function in public_fixtures():
        returns = inspect.signature(function).return_annotation
        yield f".. py:data:: {name}"
        yield f"   :type: {returns}"
        yield "   :no-index:"
        yield ""
        yield from indented(inspect.getdoc(function) or "")
        yield ""


def public_fixtures() -> list[tuple[str, Callable[..., Any]]]:
    """Return the fixtures of the plugin with the functions behind them."""
    found = [(name, value) for name, value in vars(plugin).items() if type(value).__name__ == "FixtureFunctionDefinition"]
    return [(name, value._get_wrapped_function()) for name, value in found if not name.startswith("_")]


def hook_functions() -> Iterator[str]:
    """Every hook."""
    for name, value in vars(hooks).items():
        if name.startswith("pytest_") and inspect.isfunction(value):
            yield f".. autofunction:: pytest_attn.hooks.{name}"
            yield ""


def api() -> Iterator[str]:
    """Every public name of the package: functions first."""
    names = sorted(pytest_attn.__all__, key=lambda name: (inspect.isclass(getattr(pytest_attn, name)), name.lower()))
    for name in names:
        if not inspect.isclass(getattr(pytest_attn, name)):
            yield f".. autofunction:: pytest_attn.{name}"
        else:
            yield f".. autoclass:: pytest_attn.{name}"
            yield "   :members:"
            yield "   :inherited-members: ABC, tuple"
        yield ""


def catalog() -> Iterator[str]:
    """Every workload of the catalog, by group."""
    yield from (".. list-table::", "   :header-rows: 1", "", "   * - name", "     - workload", "     - group: source")
    shown = ""
    for entry in builtin_catalog():
        about = "" if entry.group == shown else f"**{entry.group}**: {plain(entry.source)}"
        shown = entry.group
        yield f"   * - ``{entry.workload.name}``"
        yield f"     - ``{replace(entry.workload, name=None).id}``"
        yield f"     - {about}".rstrip()


def precisions() -> Iterator[str]:
    """Every precision profile: its fields that are not the default, then what the fields mean."""
    for name, profile in PRECISIONS.items():
        changed = [f for f in fields(Precision) if f.name != "name" and getattr(profile, f.name) != f.default]
        said = ", ".join(_setting(f.name, getattr(profile, f.name)) for f in changed)
        yield f"``{name}``"
        yield f"   {said or 'float32 scores; rounds P, and dS in the backward pass, to the dtype'}"
        yield ""
    yield ".. autoclass:: pytest_attn.backends.precision.Precision()"
    yield "   :no-members:"
    yield ""


def _setting(field: str, value: object) -> str:
    if value is True:
        return f"``{field}``"
    return f"``{field}={value:.3g}``" if isinstance(value, float) else f"``{field}={value!r}``"


def distributions() -> Iterator[str]:
    """Every input distribution."""
    for name, text in DISTRIBUTIONS.items():
        yield f"``{name}``"
        yield f"   {plain(text)}"
        yield ""


def record() -> Iterator[str]:
    """Every field of a line of --attn-json."""
    yield from (".. list-table::", "   :header-rows: 1", "", "   * - field", "     - type", "     - meaning")
    for name, kind, meaning in FIELDS:
        yield from (f"   * - ``{name}``", f"     - {kind}", f"     - {plain(meaning)}")


def plain(text: str) -> str:
    """Return text in which reStructuredText reads no markup."""
    return re.sub(r"([\\*`|_])", r"\\\1", text)


def without_substitutions(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Docstrings are prose: a bar in a formula is a bar."""
    for number, line in enumerate(lines):
        parts = line.split("`")
        lines[number] = "`".join(part if i % 2 else part.replace("|", r"\|") for i, part in enumerate(parts))


def indented(text: str) -> Iterator[str]:
    """Yield the lines of a directive's body."""
    yield from (f"   {line}" if line else "" for line in text.splitlines())


def directive(lines: Callable[[], Iterator[str]]) -> type[SphinxDirective]:
    """Return a directive whose content is these lines."""

    class Generated(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            for module in (pytest_attn, plugin, hooks):
                self.env.note_dependency(module.__file__ or "")
            return self.parse_text_to_nodes("\n".join(lines()))

    return Generated


def setup(app: Sphinx) -> dict[str, bool]:
    """Register a directive for each part."""
    for part in (markers, fixtures, hook_functions, api, catalog, distributions, precisions, record):
        app.add_directive(f"attn-{part.__name__.replace('_', '-')}", directive(part))
    app.connect("autodoc-process-docstring", without_substitutions)
    return {"parallel_read_safe": True}
