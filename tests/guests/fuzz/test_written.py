"""A workload written as source, and the marker that it replaces: what a failure of --attn-fuzz prints."""

import ast

import pytest
from hypothesis import HealthCheck, given, settings

from pytest_attn import Pages, Window, Workload
from pytest_attn.guests.fuzz.fuzz_case import _is_attention_mark
from pytest_attn.strategies import workloads
from pytest_attn.workloads.source import import_lines, write_workload

SMOKE = pytest.mark.attention("smoke-full")

MARK = pytest.mark.attention


def test_the_marker_is_known_under_any_name():
    source = "@SMOKE\n@MARK('flux')\n@pytest.mark.attention('flux')\n@pytest.mark.slow\n@unknown\ndef test_it(): ..."
    marks = ast.parse(source).body[0].decorator_list
    assert [_is_attention_mark(mark, own_mask) for mark in marks] == [True, True, True, False, False]


def test_a_written_workload_evaluates_to_the_same():
    @settings(max_examples=200, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(workloads())
    def evaluates(workload):
        text, imports = write_workload(workload)
        names = {}
        exec("\n".join(import_lines(imports)), names)
        assert eval(text, names) == workload

    evaluates()


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        (Workload(7), "Workload(7)"),
        (
            Workload(7, 9, dtype="fp16", mask=Window(None, 3)),
            'Workload(7, 9, dtype="float16", mask=Window(left=None, right=3))',
        ),
        (Workload(7, kv_lens=(7, 2), heads=4, kv_heads=2), "Workload(7, heads=4, kv_heads=2, kv_lens=(7, 2))"),
        (Workload(q_lens=(3, 4)), "Workload(q_lens=(3, 4))"),
        (Workload(1, 20, kv_pages=Pages(8)), "Workload(1, 20, kv_pages=Pages(size=8))"),
        (Workload(2, mask=lambda b, h, q, k: q >= k), "Workload(2, mask=lambda_"),
    ],
)
def test_what_follows_from_the_rest_is_not_written(workload, text):
    assert write_workload(workload)[0].startswith(text)


def own_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_functions_are_imported_unless_the_test_stands_beside_them():
    workload = Workload(3, mask=own_mask)
    text, imports = write_workload(workload)

    assert text == "Workload(3, mask=own_mask)"
    assert import_lines(imports) == ["from pytest_attn import Workload", f"from {__name__} import own_mask"]
    assert write_workload(workload, home=__name__)[1] == {("pytest_attn", "Workload")}
