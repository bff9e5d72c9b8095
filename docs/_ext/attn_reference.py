"""Directives that write the API from the package; tables.py writes the rest into the pages.

Each turns what the code declares into reStructuredText, so nothing here repeats what the code says.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import pytest_attn
from pytest_attn import hooks, plugin
from pytest_attn.backends.registry import Registry, capability_table
from pytest_attn.diagnosis.faults import all_faults
from pytest_attn.reports.lines import aligned
from pytest_attn.workloads.catalog import builtin_catalog


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


def list_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a table whose first cells are code."""
    yield from (".. list-table::", "   :header-rows: 1", "")
    yield from indented("\n".join(f"{'  -' if place else '* -'} {cell}" for place, cell in enumerate(header)))
    for first, *others in rows:
        yield f"   * - ``{first}``"
        yield from (f"     - {plain(cell)}" for cell in others)
    yield ""


def faults() -> Iterator[str]:
    """Every fault that a diagnosis can name, by its identity."""
    yield from list_table(("identity", "what is wrong"), all_faults().items())


def catalog() -> Iterator[str]:
    """Every workload of the catalog."""
    rows = ((e.workload.name or "", replace(e.workload, name=None).id, e.group, e.source) for e in builtin_catalog())
    yield from list_table(("name", "workload", "group", "source"), rows)


def capabilities() -> Iterator[str]:
    """What each backend's interface supports, as --attn-list prints it."""
    header, rows = capability_table(Registry())
    yield from ("::", "", *indented("\n".join(aligned([header, *rows]))), "")


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
    for part in (api, capabilities, faults, catalog):
        app.add_directive(f"attn-{part.__name__.replace('_', '-')}", directive(part))
    app.connect("autodoc-process-docstring", without_substitutions)
    return {"parallel_read_safe": True}
