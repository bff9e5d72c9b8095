"""Tables of fields for docs/_ext/tables.py: options, and what a workload is made of."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields

from pytest_attn import BooleanMask, Causal, Document, Neighborhood, Pages, Window, Workload
from pytest_attn.session.option_types import Option
from pytest_attn.session.options import all_groups, all_options

#: what a user writes as `mask=` beside "causal" and "causal-bottom-right"
MASKS = (Window, Causal, Document, Neighborhood, BooleanMask)


def options() -> Iterator[str]:
    """Every option: a table per group."""
    declared = {one.name: one for one in all_options()}
    for group in all_groups():
        yield from ("", f"## {group.title.capitalize()}", "", "| option | default | what it does |", "| --- | --- | --- |")
        for name in group.names:
            yield row(*_option_cells(declared[name]))


def _option_cells(one: Option) -> tuple[str, str, str]:
    text, _, default = one.help.partition(" (default")
    said = default.removeprefix(": ").removesuffix(")").lstrip() if default else ""
    flag = one.flag if one.is_switch else f"{one.flag} {one.metavar}"
    if default and not default.startswith(":"):  # " (default there: ...)": a sentence of its own
        text, said = one.help, ""
    unset = "" if one.default is None else f"`{one.default}`" if one.default else "none"
    return f"`{one.dest}`, ini value" if one.is_ini_only else f"`{flag}`", said or unset, text


def workload() -> Iterator[str]:
    """The fields of Workload, then of each mask and of Pages."""
    yield from ("", "## Fields", "")
    yield from _fields(Workload)
    yield from (
        "",
        "## Masks",
        "",
        'Beside `mask="causal"` and `mask="causal-bottom-right"`, each imported from `pytest_attn`:',
    )
    for mask in (*MASKS, Pages):
        yield from ("", f"### {mask.__name__}", "", summary(mask), "")
        yield from _fields(mask)


def _fields(described: type) -> Iterator[str]:
    meanings = arguments_of(described)
    yield from ("| field | default | meaning |", "| --- | --- | --- |")
    for one in fields(described):
        default = "required" if one.default is MISSING else f"`{one.default!r}`"
        yield row(f"`{one.name}`", default, meanings[one.name])


def summary(described: object) -> str:
    """Return the paragraphs of a docstring before its sections, as one."""
    text = (inspect.getdoc(described) or "").partition("\nArgs:")[0]
    return " ".join(text.split())


def arguments_of(described: object) -> dict[str, str]:
    """Return the meaning of each argument, from the section Args of a docstring."""
    section = re.split(r"^(?:Returns|Raises):", (inspect.getdoc(described) or "").partition("Args:\n")[2], flags=re.M)[0]
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.M)
    return {name: " ".join(text.split()) for name, text in found}


def row(*cells: str) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
