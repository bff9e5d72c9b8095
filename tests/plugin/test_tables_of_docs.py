"""Documentation that is generated stays what the code says, and every field of it has a meaning."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest

import pytest_attn
from pytest_attn import Pages, Workload
from pytest_attn.backends.registry import Registry, capability_table
from pytest_attn.reports.lines import aligned

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "_ext"))
import field_tables  # noqa: E402
import tables  # noqa: E402

GENERATED = [page for page in sorted((DOCS / "reference").glob("*.md")) if "<!-- generated: " in page.read_text()]


def capability_lines():
    header, rows = capability_table(Registry())
    return aligned([header, *rows])


def test_pages_that_no_code_writes_have_every_name():
    for page, names in (("backends", Registry().names), ("api", pytest_attn.__all__)):
        assert set(names) <= set(re.findall(r"`(\w+)`", (DOCS / f"reference/{page}.md").read_text()))


def test_every_backend_has_a_row():
    assert [line.split()[0] for line in capability_lines()[1:]] == Registry().names


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.stem)
def test_what_is_generated_is_what_the_code_says(page):
    if page.stem == "fixtures" and not hasattr(pytest, "TerminalReporter"):
        pytest.skip("needs pytest 8.4, which says what a fixture's function is")
    text = page.read_text()
    assert tables.generated(text) == text, "run: python docs/_ext/tables.py"
    assert tables.generated(text.replace("attn", "ATTN")) != text.replace("attn", "ATTN")


def test_the_schemas_are_what_the_descriptions_say():
    shipped = {path.name: path.read_text() for path in tables.SCHEMAS.iterdir()}
    assert shipped == tables.schemas(), "run: python docs/_ext/tables.py"
    for text in shipped.values():
        jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_every_part_is_on_a_page():
    assert {name for page in GENERATED for _, name, *_ in tables.PART.findall(page.read_text())} == set(tables.PARTS)


@pytest.mark.parametrize("described", [Workload, *field_tables.MASKS, Pages])
def test_every_field_has_a_meaning(described):
    assert list(field_tables.arguments_of(described)) == [one.name for one in fields(described)]
