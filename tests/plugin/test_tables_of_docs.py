"""Documentation that is generated stays what the code says."""

import runpy
from pathlib import Path

import pytest

from pytest_attn.backends.listing import capability_table
from pytest_attn.backends.registry import Registry
from pytest_attn.reports.columns import aligned

DOCS = Path(__file__).parents[2] / "docs"
GENERATED = [page for page in sorted((DOCS / "reference").glob("*.md")) if "<!-- generated: " in page.read_text()]


def capability_lines():
    header, rows = capability_table(Registry())
    return aligned([header, *rows])


def test_the_table_of_capabilities_is_that_of_attn_list():
    text = (DOCS / "reference" / "backends.md").read_text()
    assert text.partition("```text\n")[2].partition("```")[0].splitlines() == capability_lines()


def test_attn_list_prints_it(pytester):
    result = pytester.runpytest_inprocess("--attn-list", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines([line.replace("[", "[[]") for line in capability_lines()], consecutive=True)


def test_every_backend_has_a_row():
    assert [line.split()[0] for line in capability_lines()[1:]] == Registry().names


@pytest.fixture(scope="module")
def tables():
    return runpy.run_path(str(DOCS / "_ext" / "tables.py"))


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.stem)
def test_what_is_generated_is_what_the_code_says(page, tables):
    text = page.read_text()
    assert tables["generated"](text) == text, "run: python docs/_ext/tables.py"
    assert tables["generated"](text.replace("attn", "ATTN")) != text.replace("attn", "ATTN")


def test_every_part_is_on_a_page(tables):
    assert {name for page in GENERATED for _, name, *_ in tables["PART"].findall(page.read_text())} == set(tables["PARTS"])
