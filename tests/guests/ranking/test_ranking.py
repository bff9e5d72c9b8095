"""Records in, standings, lines, JSON and Python out; and the rule of ties, against real and simulated processes."""

import math
import random
from itertools import permutations

import pytest
from fakes.ranked import H200, PROCESSES, RECORDED, TUNED, checked, names, only, right, tables, text, timed

from pytest_attn.guests.ranking.ranking import Timed, is_slower, rank, rank_sum_tail

# -- the rule ------------------------------------------------------------------------------------------------------------


def test_the_tail_of_ranks_counts_every_order():
    high, low = [3.5, 5.0, 6.2], [1.0, 2.0, 4.0, 5.5]
    exceeding = sum(h > value for h in high for value in low)
    orders = list(permutations([*high, *low]))
    as_many = sum(sum(h > value for h in order[:3] for value in order[3:]) >= exceeding for order in orders)
    assert rank_sum_tail(high, low) == pytest.approx(as_many / len(orders))


def scattered(generator, center, spread, processes=0):
    p50 = center * math.exp(generator.gauss(0, spread))
    values = tuple(center * math.exp(generator.gauss(0, spread)) for _ in range(processes))
    return Timed(p50, (p50 * 0.999, p50 * 1.001, 0.96), values, "today")


@pytest.mark.parametrize(("processes", "lines"), [(0, 3000), (10, 800)])
@pytest.mark.parametrize("rivals", [1, 7])
def test_the_fastest_in_truth_is_rarely_missing(processes, lines, rivals):
    generator, missing = random.Random(3), 0
    for _ in range(lines):
        everyone = [scattered(generator, 1.0, generator.choice((0.001, 0.003, 0.01)), processes) for _ in range(rivals + 1)]
        fastest = min(everyone, key=lambda one: sorted(one.processes)[5] if processes else one.p50)
        missing += everyone[0] is not fastest and is_slower(everyone[0], fastest, "cuda", rivals)
    assert missing / lines < 0.05 + 2 * math.sqrt(0.05 * 0.95 / lines)


def test_what_differs_clearly_is_told_apart():
    generator = random.Random(5)
    pairs = [(scattered(generator, 1.03, 0.003), scattered(generator, 1.0, 0.003)) for _ in range(300)]
    assert sum(is_slower(slow, fast, "cuda", 1) for slow, fast in pairs) > 270
    recorded = [(scattered(generator, 1.01, 0.003, 10), scattered(generator, 1.0, 0.003, 10)) for _ in range(50)]
    assert sum(is_slower(slow, fast, "cuda", 1) for slow, fast in recorded) > 45


def test_a_time_in_batches_is_not_slower_than_one_in_a_graph_for_what_batches_cost():
    graph, batched = Timed(1.0, (1.0, 1.0, 0.9), mode="graph"), Timed(1.18, (1.18, 1.18, 0.9), mode="batched")
    assert not is_slower(batched, graph, "cuda", 1)
    assert is_slower(batched._replace(mode="graph"), graph, "cuda", 1)
    assert is_slower(batched._replace(p50=1.4), graph, "cuda", 1)
    assert not is_slower(batched, graph._replace(mode="replay"), "cuda", 1)
    ten = tuple(1.18 + n / 1e4 for n in range(10)), tuple(1.0 + n / 1e4 for n in range(10))
    assert not is_slower(batched._replace(processes=ten[0]), graph._replace(processes=ten[1]), "cuda", 1)


@pytest.mark.parametrize(("slow", "fast", "times"), [("replay", "graph", 1.08), ("graph", "replay", 1.03)])
def test_graphs_here_and_there_are_not_told_apart_by_where_they_lie(slow, fast, times):
    here, there = Timed(1.0, (1.0, 1.0, 0.9), mode=fast), Timed(times, (times, times, 0.9), mode=slow)
    assert not is_slower(there, here, "cuda", 1)
    assert is_slower(there._replace(mode=fast), here, "cuda", 1)


# -- who stands where ----------------------------------------------------------------------------------------------------


def test_the_fastest_its_ties_and_how_far_it_is_ahead():
    line = only(right("a", 1.0e-3) + right("b", 1.002e-3) + right("c", 1.5e-3) + right("d", 3e-3))
    assert line.exact.fastest.name == "a"
    assert names(line.exact.ties) == ["b"]
    assert names(line.exact.slower) == ["c", "d"]
    assert line.exact.ahead == pytest.approx(1.5)


CPU = {**H200, "device": "cpu", "kind": "cpu"}
TWO = right("a", 1.0e-3) + right("b", 1.025e-3)
FRONT = [
    *right("fast", 1e-3, error=2e-3, memory=50 << 20),
    *right("same", 1.001e-3, error=1.98e-3, memory=50 << 20),
    *right("exact", 2e-3, error=1e-3, memory=50 << 20),
    *right("lean", 3e-3, error=2e-3, memory=10 << 20),
    *right("poor", 4e-3, error=3e-3, memory=60 << 20),
    *right("beaten", 2.5e-3, error=1e-3, memory=50 << 20),
]
TIES = right("a", 1.001e-3, error=1e-3) + right("b", 1e-3, error=2e-3) + right("c", 1.0005e-3, error=1.5e-3)
NO_MEMORY = right("a", 1e-3, memory=5) + right("b", 2e-3, memory=None) + right("c", 3e-3, error=1e-4, memory=5)
#: records, and who of them is slower, ties with the fastest, or is on the front
STANDINGS = {
    "one rival": (TWO, "slower", ["b"]),
    "more rivals need a larger difference": (TWO + [r for n in range(20) for r in right(f"c{n}", 2e-3)], "ties", ["b"]),
    "a GPU": (right("a", 1.0e-3) + right("b", 1.05e-3), "slower", ["b"]),
    "a CPU scatters more": (right("a", 1.0e-3, machine=CPU) + right("b", 1.05e-3, machine=CPU), "ties", ["b"]),
    "the host's clock, too": (right("a", 1.0e-3) + right("b", 1.05e-3, latency={"mode": "host"}), "ties", ["b"]),
    "a wide interval": (right("a", 1.0e-3) + right("b", 1.05e-3, off=0.06), "ties", ["b"]),
    "what is better in anything": (FRONT, "pareto", ["exact", "lean"]),
    "a tie is there for its error and not for its time": (TIES, "pareto", ["a"]),
    "without memory it is that of time and error": (NO_MEMORY, "pareto", ["c"]),
    "a callable that one test measures twice": (
        *([*right("mine", 0.001, is_callable=True), timed("mine", 0.002, is_callable=True)], "ranked", ["mine", "mine #2"]),
    ),
}


@pytest.mark.parametrize("name", STANDINGS)
def test_who_stands_where(name):
    records, standing, expected = STANDINGS[name]
    assert names(getattr(only(records).exact, standing)) == expected


def test_recorded_processes_tell_apart_what_one_process_cannot():
    slower = {**RECORDED, "processes": [t * 1.003 for t in PROCESSES]}
    line = only(right("a", 1.0e-3, **RECORDED) + right("b", 0.999e-3, **slower))
    assert line.exact.by_processes
    assert names(line.exact.ranked) == ["a", "b"]
    assert names(line.exact.slower) == ["b"]


@pytest.mark.parametrize(
    "doubt",
    [
        {"date": "2026-10-01"},
        {"verdict": "regressed"},
        {"latency": {"decision": {"is_faster": True}}},
        {"processes": PROCESSES[:9]},
    ],
    ids=["another day", "regressed", "faster", "nine"],
)
def test_recorded_processes_that_do_not_compare_are_left_alone(doubt):
    slower = {**RECORDED, "processes": [t * 1.003 for t in PROCESSES], **doubt}
    line = only(right("a", 1.0e-3, **RECORDED) + right("b", 0.999e-3, **slower))
    assert not line.exact.by_processes
    assert names(line.exact.ranked) == ["b", "a"]
    assert names(line.exact.ties) == ["a"]


def test_approximate_backends_are_ranked_apart():
    line = only(right("exact", 2e-3) + right("int8", 1e-3, is_approximate=True) + right("fp8", 3e-3, is_approximate=True))
    assert line.exact.fastest.name == "exact"
    assert line.approximate.fastest.name == "int8"
    assert tables(right("int8", 1e-3, is_approximate=True))["FORWARD"] == {}


# -- what is left out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "why", "reason"),
    [
        ([checked("bad", "mismatch", reason="out z 50")], "wrong", "out z 50"),
        ([checked("bad", "raised", reason="RuntimeError: no")], "raised", "RuntimeError: no"),
        ([checked("bad", "expected", reason="out z 50")], "wrong", "as expected: out z 50"),
        ([checked("bad", "known defect", reason="x#1: NaN")], "known defect", "x#1: NaN"),
        ([checked("bad", "skipped", reason="needs sm90")], "skipped", "needs sm90"),
        ([checked("bad"), timed("bad", 0, "mismatch", reason="old")], "wrong", "cannot be timed: old"),
        ([checked("bad"), timed("bad", 0, "raised", reason="lies")], "raised", "cannot be timed: lies"),
        ([checked("bad"), timed("bad", 0, "no result", reason="hangs")], "raised", "cannot be timed: hangs"),
        ([checked("bad"), timed("bad", 0, "untimed", reason="shared")], "untimed", "shared"),
        ([checked("bad"), timed("bad", 1e-6, "inconclusive", reason="anchors")], "inconclusive", "anchors"),
        (right("bad", 1e-6, latency={"disturbances": ["hot"]}), "inconclusive", "disturbed: hot"),
        ([timed("bad", 1e-6)], "unchecked", "no check of it in these records"),
        (
            [*right("bad", 1e-6), checked("bad", "broken", question="invariants", reason="leak", test="t.py::test_i")],
            "wrong",
            "breaks leak",
        ),
        ([*right("bad", 1e-6), checked("bad", "mismatch", reason="in another test", test="t.py::test_c")], "wrong", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_right_or_not_timed_is_named_and_not_ranked(records, why, reason):
    line = only(right("good", 1e-3) + records)
    assert names(line.exact.ranked) == ["good"]
    (excluded,) = line.excluded
    assert (excluded.name, excluded.excluded) == ("bad", why)
    assert reason is None or excluded.reason == reason


def test_wrong_gradients_do_not_spoil_the_forward_pass():
    names_of = ("out", "dq", "dk", "dv")
    spoilt = checked("a", "mismatch", names=names_of, failed=("dq",), direction="forward+backward", test="t.py::test_b")
    forward = [*right("a", 0.001), spoilt]
    assert names(only(forward).exact.ranked) == ["a"]
    backward = [checked("a"), spoilt, timed("a", 1e-3, direction="backward")]
    assert names(only(backward).excluded) == ["a"]
    wrong_output = checked("a", "mismatch", names=names_of, failed=("out",), direction="forward+backward", test="t.py::test_b")
    assert names(only([*right("a", 0.001), wrong_output]).excluded) == ["a"]


def test_a_backward_pass_needs_a_check_of_gradients():
    line = only([checked("a"), timed("a", 1e-3, direction="backward")])
    assert [(one.name, one.excluded) for one in line.excluded] == [("a", "unchecked")]


def test_a_refusal_belongs_to_the_direction_of_its_test():
    records = right("a", 1e-3, test="t.py::test_f")
    records += right("a", 2e-3, test="t.py::test_b", direction="backward", names=("out", "dq"))
    records += [checked("b", "skipped", reason="no backward", test="t.py::test_b", direction="forward+backward")]
    forward, backward = rank(records).lines
    assert not forward.excluded
    assert names(backward.excluded) == ["b"]


# -- well defined --------------------------------------------------------------------------------------------------------


def test_directions_devices_shapes_and_conditions_are_lines_of_their_own():
    other = {**H200, "device": "cuda:1"}
    records = right("a", 1e-3) + right("a", 2e-3, direction="backward", names=("dq",)) + right("a", 3e-3, machine=other)
    records += [*right("a", 0.004, shape="b2"), timed("a", 0.005, latency={"l2": "warm"})]
    lines = rank(records).lines
    found = [(one.direction, one.machine["device"], one.shape, one.l2, one.exact.fastest.timed.p50) for one in lines]
    assert found == [
        ("forward", "cuda:0", "b1", "cold", 1e-3),
        ("forward", "cuda:0", "b1", "warm", 5e-3),
        ("backward", "cuda:0", "b1", "cold", 2e-3),
        ("forward", "cuda:1", "b1", "cold", 3e-3),
        ("forward", "cuda:0", "b2", "cold", 4e-3),
    ]


def test_a_backend_that_several_tests_measured_has_one_value():
    records = [r for n, p50 in enumerate((3e-3, 1e-3, 2e-3)) for r in right("a", p50, test=f"t.py::test_{n}")]
    assert [one.timed.p50 for one in only(records).exact.ranked] == [2e-3]


def test_callables_are_told_apart_by_their_tests():
    records = right("<lambda>", 1e-3, test="t.py::test_a", is_callable=True)
    records += right("<lambda>", 2e-3, test="t.py::test_b", is_callable=True)
    records += right("mine", 3e-3, test="t.py::test_c", is_callable=True)
    assert names(only(records).exact.ranked) == ["<lambda> of test_a", "<lambda> of test_b", "mine"]
    bad = [checked("<lambda>", "mismatch", test="t.py::test_b", is_callable=True)]
    assert names(only(records + bad).excluded) == ["<lambda> of test_b"]


def test_configurations_compete_with_the_default_alone():
    line = only(TUNED, "mine")
    assert names(line.exact.ranked) == ["mine@BLOCK=32:warps=4", "mine@BLOCK=64:warps=4", "mine"]
    row = text(TUNED, tuned="mine")[1].split()
    assert row == ["flux-L512", "fwd", "BLOCK=32:warps=4", "1.0000", "ms", "0.1%", "x2.00", "-", "-"]
    found = tables(TUNED, "mine")
    assert (found["BACKEND"], found["FORWARD"]) == ("mine", {"flux-L512": {"BLOCK": 32, "warps": 4}})


def test_the_table_keeps_the_default_where_nothing_is_faster_for_certain():
    records = right("mine", 1.001e-3) + right("mine@BLOCK=32", 1e-3)
    assert " tie " in text(records, tuned="mine")[1]
    assert tables(records, "mine")["FORWARD"] == {"flux-L512": {}}
