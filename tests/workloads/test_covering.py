"""As few cases as reach each value, or each pair of values, always the same."""

import pytest

from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.covering import covering, targets_of, values_of

CASES = {"plain": "a", "both": "abc", "other": "cd", "last": "bd", "again": "abc"}


def reached(cases, strength, chosen):
    return frozenset().union(*(targets_of(cases[case], strength) for case in chosen))


@pytest.mark.parametrize(("strength", "chosen"), [(0, ["both"]), (1, ["both", "other"]), (2, ["both", "other", "last"])])
def test_what_adds_most_comes_first_and_nothing_comes_that_adds_nothing(strength, chosen):
    assert covering(CASES, strength) == chosen


def test_of_those_that_add_as_much_the_cheapest_is_chosen():
    assert covering(CASES, 1, cost=lambda case: float(case == "both")) == ["again", "other"]


def test_what_does_not_run_is_replaced_and_only_what_would_be_chosen_is_asked():
    asked = []

    def runs(case):
        asked.append(case)
        return case != "both"

    assert covering(CASES, 1, runs) == ["again", "other"]
    assert asked == ["both", "again", "other"]
    assert covering(CASES, 0, lambda case: False) == []


def test_what_others_reach_needs_nobody():
    assert covering(CASES, 1, reached=targets_of("abc", 1)) == ["other"]
    assert covering(CASES, 0, reached=targets_of("abcd", 1)) == []
    assert covering({}, 2) == []


@pytest.mark.parametrize("strength", [1, 2])
def test_of_the_catalog_all_is_reached_with_fewer(strength):
    cases = {w.id: values_of(w) for w in builtin_catalog().select("all")}
    chosen = covering(cases, strength)
    assert reached(cases, strength, chosen) == reached(cases, strength, cases)
    assert chosen == covering(cases, strength)
    assert len(chosen) < len(cases) * (0.25, 0.75)[strength - 1]
