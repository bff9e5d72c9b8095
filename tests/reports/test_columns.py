"""Tables of text: as wide as they are where nobody says how wide a line may be, and otherwise within it, nothing lost."""

import pytest

from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.registry import Registry, tables
from pytest_attn.reports.lines import aligned, narrowed, room
from pytest_attn.workloads.catalog import builtin_catalog

TABLE = [
    ("backend", "p50", "status"),
    ("sdpa", "9.5 us", "available"),
    ("flash2", "12.25 us", "flash-attn is not installed; pip install flash-attn --no-build-isolation"),
    ("none", "", ""),
]


def letters(rows):
    """Return all but spaces, in any order: a word that is wider than the line is broken."""
    return sorted("".join("".join(cell.split()) for row in rows for cell in row))


def test_without_a_width_a_row_is_a_line():
    assert aligned(TABLE, right=(1,)) == [
        "backend       p50  status",
        "sdpa       9.5 us  available",
        "flash2   12.25 us  flash-attn is not installed; pip install flash-attn --no-build-isolation",
        "none",
    ]
    assert aligned(TABLE, right=(1,), width=200) == aligned(TABLE, right=(1,))


def test_cells_are_wrapped_at_spaces_where_that_is_enough():
    assert aligned(TABLE, right=(1,), width=60)[2] == (
        "flash2   12.25 us  flash-attn is not installed; pip install\n" + 19 * " " + "flash-attn --no-build-isolation"
    )


def test_columns_without_room_follow_below():
    assert aligned([("backend", "workload"), ("sdpa_flash", "llama3-8b-prefill"), ("math", "")], width=24) == [
        "backend\n    workload",
        "sdpa_flash\n    llama3-8b-prefill",
        "math",
    ]


def test_a_word_that_is_wider_than_the_line_is_broken():
    assert aligned([("a" * 50,)], width=24) == ["\n".join(["a" * 24, "a" * 24, "aa"])]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_real_tables_keep_to_the_line_and_lose_no_word(number, width):
    header, rows = tables(Registry(), builtin_catalog(), machine_of(resolve_device("cpu")))[number]
    texts = aligned([header, *rows], width=width)
    assert max(len(line) for text in texts for line in text.splitlines()) <= width
    assert letters([texts]) == letters([header, *rows])


def test_columns_that_can_go_go_one_by_one():
    assert narrowed(TABLE, 20, ("status",)) == [list(row[:2]) for row in TABLE]
    assert narrowed(TABLE, None, ("status",)) == [list(row) for row in TABLE]


def test_a_pipe_has_no_end_unless_its_width_is_said(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert room(is_terminal=False) is None
    assert room(is_terminal=True) > 0
    for said, taken in (("72", 72), ("3", 80), ("many", 80)):
        monkeypatch.setenv("COLUMNS", said)
        assert room(is_terminal=False) == taken
