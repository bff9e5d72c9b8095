"""The parts of the reference that are written into its pages, so that a code host shows them too.

`python docs/_ext/tables.py` rewrites what stands between `<!-- generated: NAME -->` and `<!-- end -->` in docs/reference/;
tests/plugin/test_tables_of_docs.py fails where a page differs from the code. So it does with the schemas in
pytest_attn/schemas/.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import field_tables

from pytest_attn import hooks, plugin
from pytest_attn.backends.declaration import Argument
from pytest_attn.backends.precision import PRECISIONS, Precision
from pytest_attn.guests.evidence.certify import CERTIFICATE
from pytest_attn.guests.judging.answers import ANSWER, REQUEST
from pytest_attn.guests.saving.saved_failure import ENVIRONMENT, FAILURE
from pytest_attn.latency.baseline_file import FILE
from pytest_attn.reports.records import fields as fields_of_records
from pytest_attn.reports.records import gathered, line_description
from pytest_attn.reports.runs import CLOSING_LINE
from pytest_attn.seam import guests
from pytest_attn.session.kinds import register_kinds_of_guests
from pytest_attn.session.marks import marker_help
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import DISTRIBUTIONS

PAGES = Path(__file__).parents[1] / "reference"
SCHEMAS = Path(__file__).parents[2] / "pytest_attn" / "schemas"
PART = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
#: tests collect the examples of these docstrings, with what they take for granted
NOT_RUN = "<!-- not run: tests/test_docs.py collects it -->"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; cells may hold Markdown."""
    header = list(header)
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def plain(text: str) -> str:
    """Return text in which Markdown reads no emphasis and no tag."""
    return re.sub(r"([*<])", r"\\\1", " ".join(text.split()))


def markers() -> Iterator[str]:
    """Every marker: what it does, and its arguments; those of an earlier marker are not said again."""
    register_kinds_of_guests()
    told: dict[Argument, str] = {}
    for marker in marker_help():
        summary = plain(marker.summary[0].upper() + marker.summary[1:])
        given = ", ".join(filter(None, (marker.before, "...")))
        yield from (f"## {marker.name}", "", f"`@pytest.mark.{marker.name}({given})`", "", f"{summary}.", "")
        yield from _arguments(one._replace(meaning=f"as of {told[one]}") if one in told else one for one in marker.arguments)
        told |= dict.fromkeys(marker.arguments, f"`{marker.name}`")
        yield ""


def _arguments(arguments: Iterable[Argument]) -> Iterator[str]:
    rows = ((f"`{one.name}`", _with_code(one.meaning), _with_code(one.unset or _literal(one.default))) for one in arguments)
    yield from table(("argument", "what it says", "default"), rows)


def _literal(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else f"`{default!r}`"


def _with_code(text: str) -> str:
    """Return text as Markdown in which options, quoted words and tuples of these are code."""
    code = re.compile(r'`[^`]+`|\([^()]*"[^()]*\)|"[^"]+"|--attn-[\w-]+')
    prose = [part.replace("*", r"\*").replace("<", r"\<") for part in code.split(text)]
    spans = [f"`{span.strip('`')}`" for span in code.findall(text)]
    return "".join(part for pair in zip(prose, [*spans, ""], strict=True) for part in pair)


def fixtures() -> Iterator[str]:
    """Every public fixture: its type and its docstring."""
    for name, function in public_fixtures():
        yield from (f"## {name}", "", f"Type: `{inspect.signature(function).return_annotation}`.", "")
        yield from prose_and_example(inspect.getdoc(function) or "")
    for kind in (one for guest in guests() for one in guest.kinds):
        yield from (f"## {kind.fixture}", "", f"Of a guest; the case of a test with the marker `{kind.marker}`.", "")
        yield from prose_and_example(inspect.cleandoc(kind.about))


def public_fixtures() -> list[tuple[str, Callable[..., Any]]]:
    """Return the fixtures of the plugin with the functions behind them."""
    found = [(name, value) for name, value in vars(plugin).items() if type(value).__name__ == "FixtureFunctionDefinition"]
    return [(name, value._get_wrapped_function()) for name, value in found if not name.startswith("_")]


def hook_functions() -> Iterator[str]:
    """Every hook: its signature and its docstring."""
    for name, value in vars(hooks).items():
        if name.startswith("pytest_") and inspect.isfunction(value):
            yield from (f"## {name}", "", f"`{name}({', '.join(inspect.signature(value).parameters)})`", "")
            yield from prose_and_example(inspect.getdoc(value) or "")


def prose_and_example(docstring: str) -> Iterator[str]:
    """Yield a docstring as Markdown: what is indented behind `::` becomes a block of Python."""
    for part in re.split(r"(::\n\n(?:(?: {4}.*)?\n)+)", f"{docstring}\n"):
        if part.startswith("::"):
            code = re.sub(r"  +#", "  #", inspect.cleandoc(part.removeprefix("::")))  # as ruff formats blocks of pages
            yield from (":", "", NOT_RUN, "```python", code, "```", "")
        else:
            yield from (part.strip(), "")


def catalog() -> Iterator[str]:
    """Every group of the catalog."""
    groups = gathered((entry.group, entry) for entry in builtin_catalog())
    yield from table(("group", "source"), ((f"`{name}`", plain(entries[0].source)) for name, entries in groups.items()))


def distributions() -> Iterator[str]:
    """Every input distribution."""
    yield from table(("name", "values"), ((f"`{name}`", plain(text)) for name, text in DISTRIBUTIONS.items()))


def precisions() -> Iterator[str]:
    """Every precision profile, with its fields that are not the default."""
    rows = (
        (f"`{name}`", _changed(profile) or "float32 scores; rounds P and dS to the dtype")
        for name, profile in PRECISIONS.items()
    )
    yield from table(("profile", "where it rounds"), rows)


def _changed(profile: Precision) -> str:
    names = [
        field.name for field in fields(Precision) if field.name != "name" and getattr(profile, field.name) != field.default
    ]
    return ", ".join(_setting(name, getattr(profile, name)) for name in names)


def _setting(name: str, value: object) -> str:
    if value is True:
        return f"`{name}`"
    return f"`{name}={value:.3g}`" if isinstance(value, float) else f"`{name}={value!r}`"


def record() -> Iterator[str]:
    """Every field of a line of a .jsonl file."""
    rows = ((f"`{name}`", plain(one.kind), plain(one.meaning)) for name, one in fields_of_records().items())
    yield from table(("field", "type", "meaning"), rows)


_OWN = (markers, fixtures, hook_functions, catalog, distributions, precisions, record)
PARTS = {part.__name__: part for part in (*_OWN, field_tables.options, field_tables.workload)}


def generated(page: str) -> str:
    """Return a page with its generated parts as the code has them now."""

    def part(found: re.Match[str]) -> str:
        body = "\n".join(PARTS[found[2]]()).strip()
        body = re.sub(r"\n+:\n", ":\n", re.sub(r"\n{3,}(?!(?:def|@|class|import|from) )", "\n\n", body))
        return f"{found[1]}\n{body}\n\n{found[4]}"

    return PART.sub(part, page)


def schemas() -> dict[str, str]:
    """Return the JSON schemas of the files that are read, by the name of each."""
    titles = {
        "baseline": ("baselines/MACHINE.json of --attn-update-baselines", FILE),
        "certificate": ("what python -m pytest_attn certify writes", CERTIFICATE),
        "failure": (f"{ENVIRONMENT} of --attn-save-failures", FAILURE),
        "judgment": ("what python -m pytest_attn judge --json prints", ANSWER),
        "record": ("a line of --attn-output=NAME.jsonl, but for those that close a run", line_description()),
        "request": ("a line that python -m pytest_attn judge --serve reads", REQUEST),
        "run": ("a line of --attn-output=NAME.jsonl that closes a run", CLOSING_LINE),
    }
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {
        f"{name}.json": f"{json.dumps({**dialect, 'title': title, **description}, indent=1)}\n"
        for name, (title, description) in titles.items()
    }


if __name__ == "__main__":
    for name, text in schemas().items():
        (SCHEMAS / name).write_text(text)
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(generated(path.read_text()))
