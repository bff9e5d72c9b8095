"""What a failure says: the worst element, how far off it is, and where the wrong rows lie. Why is asked in tests/diagnosis."""

import pytest
import torch
from judging import CAUSAL, CROSS, FULL, causal, explicit, failure, with_lse
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pytest_attn import Workload
from pytest_attn.guests.mutants.all_mutants import MUTANTS

#: whose backward pass takes dS = P dP
WITHOUT_D = next(mutant for mutant in MUTANTS if mutant.name == "delta-missing").backend()


def test_the_failure_names_worst_element_levels_place_and_figures():
    def last_row_wrong(q, k, v):
        out = causal(q, k, v).clone()
        out[:, 1:3, 256:] = 0
        return out

    text = failure(last_row_wrong, CAUSAL)
    lines = text.splitlines()
    assert lines[0].startswith(f"mismatch: out of {last_row_wrong.__qualname__.replace('.<locals>', '')}: z ")
    assert lines[0].endswith(" in one element, limit 8 (h4-kv2-s257-d64-causal, inputs structured)")
    assert lines[1].startswith("  worst      out[0, ")
    assert ", 256, " in lines[1]
    assert "exact" in lines[1]
    assert "budget" in lines[1]
    assert "128 of 65,792 elements above 8" in lines[2]
    assert lines[3] == "  where      rows only 256 of 257 (the last); heads 1, 2 (of 4)"
    assert lines[4].startswith("  figures    absmax ")
    assert "cosine" in lines[4]
    assert "slope" in lines[4]


def test_of_an_lse_that_is_infinite_somewhere_that_row_is_shown():
    overflows = with_lse(lambda lse: (lse + 1e-7).index_fill(2, torch.tensor([77]), torch.inf))
    assert "lse[0, 0, 77] = inf, exact" in failure(overflows, Workload(128, heads=2), returns_lse=True).splitlines()[1]


@pytest.mark.parametrize(
    ("spoil", "place"),
    [
        (lambda out: out[:, :, 128:], "rows 128 to 199 of 200, the tail after the last full tile of 128"),
        (lambda out: out[:, :, 192:], "rows 192 to 199 of 200, the tail; all 2 heads"),
        (lambda out: out[:, :, 63::64], "rows 3 of 200, every one at 63 modulo 64"),
        (lambda out: out[:, :, 10:20], "rows 10 to 19 of 200"),
    ],
)
def test_the_place_of_a_fault_is_described(spoil, place):
    def faulty(q, k, v):
        out = sdpa(q, k, v).clone()
        spoil(out).mul_(1.5)
        return out

    assert place in failure(faulty, Workload(200, heads=2))


@pytest.mark.parametrize(
    ("kernel", "workload", "line"),
    [
        (causal, CROSS, "  suggests   it equals attention with the other causal alignment (causal) (z "),
        (lambda q, k, v: explicit(q, k, v, scale=0.2), FULL, "  suggests   it equals attention with scale 0.2, not 0.125 (z "),
        (WITHOUT_D, FULL, "  suggests   dq is that of a backward pass without D: dS = P * dP"),
        (
            lambda q, k, v: sdpa(q, k, v, dropout_p=0.3),
            FULL,
            "  rerun      equal calls return different results: is dropout on, is there a race, or is memory read",
        ),
    ],
)
def test_each_kind_of_hint_has_its_line(kernel, workload, line):
    assert line in failure(kernel, workload, backward="backward pass" in line)
