"""The generated tables of docs/reference are what the code says, and every field of them has a meaning."""

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from pytest_attn import Pages, Workload

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS / "_ext"))
import attn_tables  # noqa: E402


@pytest.mark.parametrize("name", attn_tables.PAGES)
def test_a_generated_page_is_that_of_the_code(name):
    text = (attn_tables.REFERENCE / name).read_text()
    assert attn_tables.BEGIN in text
    assert text == attn_tables.page(name, text), "stale: run python docs/_ext/attn_tables.py"


@pytest.mark.parametrize("described", [Workload, *attn_tables.MASKS, Pages])
def test_every_field_has_a_meaning(described):
    assert list(attn_tables.arguments_of(described)) == [one.name for one in fields(described)]
