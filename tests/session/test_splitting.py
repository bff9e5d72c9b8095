"""How tests are divided among hosts: each in one part, the same on every host, the parts alike."""

import random

import pytest

from pytest_attn.session.splitting import Cost, assign, digest, loads_of

SECOND = 1_000_000


def fake_cases(count, seed=0, backends=10):
    """Cases of `count / backends` workloads, most of them short, a few that take a hundred times as long."""
    draw = random.Random(seed)
    found = {}
    for workload in range(count // backends):
        reference = int(SECOND * draw.lognormvariate(-2, 1.5))
        for backend in range(backends):
            name = f"test_kernel.py::test_it[w{workload}-b{backend}]"
            compiling = 20 * SECOND if draw.random() < 0.02 else 0
            found[name] = Cost(f"test_it w{workload}", 30_000 + reference // 8 + compiling, reference)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parts", [1, 2, 3, 8, 16])
def test_4000_cases_are_each_in_one_part_and_parts_are_within_15_percent(parts, seed):
    costs = fake_cases(4000, seed)
    found = assign(costs, parts)
    assert found.keys() == costs.keys()
    assert len(found) == 4000
    assert set(found.values()) == set(range(1, parts + 1))
    loads = loads_of(found, costs, parts)
    assert max(loads) <= 1.15 * min(loads), loads


def alike(count):
    """Tests of which many cost the same, so that only their ids tell them apart."""
    return {f"test[{number}]": Cost(f"w{number // 3}", 1000 * (number * 37 % 7), 500) for number in range(count)}


@pytest.mark.parametrize("costs", [fake_cases(4000), alike(300)], ids=["fake", "alike"])
def test_the_order_of_tests_does_not_matter(costs):
    shuffled = list(costs)
    random.Random(1).shuffle(shuffled)
    assert assign({name: costs[name] for name in shuffled}, 8) == assign(costs, 8)


def test_all_cases_of_a_workload_are_in_one_part_where_they_do_not_take_too_long():
    costs = fake_cases(4000)
    parts_of = {}
    for name, part in assign(costs, 8).items():
        parts_of.setdefault(costs[name].group, set()).add(part)
    divided = sum(len(parts) > 1 for parts in parts_of.values())
    assert divided <= 40, "a reference is computed again where its workload is divided"


def test_a_group_that_takes_too_long_is_broken_up_unless_it_is_bound():
    long = {f"case{number}": Cost("one", SECOND) for number in range(8)}
    assert sorted(assign(long, 4).values()) == [1, 1, 2, 2, 3, 3, 4, 4]
    bound = {name: cost._replace(is_bound=True) for name, cost in long.items()}
    assert len(set(assign(bound, 4).values())) == 1


def test_more_parts_than_tests_leave_some_empty_and_lose_nothing():
    assert sorted(assign({"a": Cost("a", 1), "b": Cost("b", 1)}, 5).values()) == [1, 2]
    assert assign({}, 3) == {}


def test_tests_that_cost_nothing_spread_out_as_well():
    found = assign({f"test{number}": Cost(f"test{number}", 0) for number in range(80)}, 8)
    assert [list(found.values()).count(part) for part in range(1, 9)] == [10] * 8


def test_a_digest_is_of_the_lines_whatever_their_order():
    assert digest(["a", "b"]) == digest(["b", "a"]) != digest(["a", "c"])
    assert len(digest([])) == 12


def test_the_division_is_the_one_that_other_hosts_compute():
    """It must not change with Python's version, platform or hash seed: these numbers are part of what hosts agree on."""
    costs = fake_cases(400)
    assert all(isinstance(one, int) for cost in costs.values() for one in (cost.own, cost.shared))
    found = assign(alike(60), 4)
    assert digest(f"{name} {part}" for name, part in found.items()) == "bfd8d4954b2e"
