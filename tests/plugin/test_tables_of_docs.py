"""Documentation that is generated stays what the code says."""

from pathlib import Path

from pytest_attn.backends.listing import capability_table
from pytest_attn.backends.registry import Registry
from pytest_attn.reports.columns import aligned

DOCS = Path(__file__).parents[2] / "docs"


def capability_lines():
    header, rows = capability_table(Registry())
    return aligned([header, *rows])


def test_the_table_of_capabilities_is_that_of_attn_list():
    text = (DOCS / "backends.md").read_text()
    assert text.partition("```text\n")[2].partition("```")[0].splitlines() == capability_lines()


def test_attn_list_prints_it(pytester):
    result = pytester.runpytest_inprocess("--attn-list", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines([line.replace("[", "[[]") for line in capability_lines()], consecutive=True)


def test_every_backend_has_a_row():
    assert [line.split()[0] for line in capability_lines()[1:]] == Registry().names
