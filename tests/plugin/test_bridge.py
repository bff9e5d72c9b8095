"""Samples in pytest-benchmark, through runs of the real one; a small conftest stands for plugin.py and its `attn`."""

import math
import statistics

import pytest
from fakes.benchmark import CONFTEST, IS_4, MEASURING

from pytest_attn.cases import pytest_benchmark

#: no decimal fraction is exact; subnormal, zero and large; the same twice; a whole number
SAMPLES = [0.1 + 0.2, 1e-6 / 3, math.nextafter(2e-5, 1), 5e-324, 0.0, 12345.678, 12345.678, 3]

# -- what arrives ------------------------------------------------------------------------------------------------------


def test_the_data_are_the_samples_bit_for_bit(report):
    found = report(
        f"""
        def test_measures(attn):
            assert attn.measure(*{SAMPLES!r}, p50=1.5e-3, mode="graph", ci=[1, 2]) is True
        """,
        "--benchmark-timer=time.time",
        "--benchmark-warmup=on",
        *(() if IS_4 else ("--benchmark-precision=0.5",)),
        "--benchmark-min-rounds=99",
        passed=1,
    )
    row = found["test_measures"]
    assert [x.hex() for x in row["stats"]["data"]] == [float(x).hex() for x in SAMPLES]
    assert row["stats"]["median"] == statistics.median(SAMPLES)
    assert (row["stats"]["rounds"], row["stats"]["iterations"]) == (len(SAMPLES), 1)
    assert row["extra_info"] == {"attn": {"p50": 1.5e-3, "mode": "graph", "ci": [1, 2]}}
    assert row["options"]["timer"] == "pytest_attn"
    assert row["group"] is None


TESTS = """
import numpy as np
from pytest_attn.cases import pytest_benchmark

def test_array(attn_benchmark):
    attn_benchmark(np.array([1e-3, 2e-3], dtype="float32"))

def test_measured_array(attn):
    assert attn.measure(*np.array([1e-3, 2e-3], dtype="float32"))

def test_zeros(attn_benchmark):
    attn_benchmark([0, 0.0])

def test_recorder(attn_benchmark):
    assert attn_benchmark([1e-3, 2], samples=7, p50=1) is None

def test_facts(request):
    facts = {"p50": 1}
    assert pytest_benchmark.record_samples(request, [1e-3], facts)
    facts["p50"] = 2

def test_twice(attn, request):
    assert attn.measure() is False  # which is none
    assert attn.measure(1e-3, which=1) is True
    assert attn.measure(2e-3, which=2) is False
    assert len(list(request.node.iter_markers("benchmark"))) == 1

def test_own_before(attn, benchmark):
    benchmark.pedantic(sum, [[1]], rounds=7)
    assert attn.measure(123.0) is False

def test_own_after(attn, benchmark):
    assert attn.measure(123.0) is False
    benchmark.pedantic(sum, [[1]], rounds=7)

def test_made_at_run_time(attn, request):
    request.getfixturevalue("benchmark").pedantic(sum, [[1]], rounds=7)
    assert attn.measure(123.0) is False

def test_unused(attn, request):
    request.getfixturevalue("benchmark")
    assert attn.measure(123.0) is False

def test_after_all(attn):
    assert attn.measure(1e-3) is True
"""


def test_the_first_samples_of_a_test_without_a_benchmark_of_its_own_are_taken(report):
    found = report(TESTS, passed=11)
    halves = [float(x) for x in pytest.importorskip("numpy").array([1e-3, 2e-3], dtype="float32")]
    assert {name: row["stats"]["data"] for name, row in found.items() if row["options"]["timer"] == "pytest_attn"} == {
        "test_array": halves,
        "test_measured_array": halves,
        "test_zeros": [0.0, 0.0],
        "test_recorder": [1e-3, 2.0],
        "test_facts": [1e-3],
        "test_twice": [1e-3],
        "test_after_all": [1e-3],
    }
    assert {name: row["extra_info"]["attn"] for name, row in found.items() if row["extra_info"].get("attn")} == {
        "test_recorder": {"samples": 7, "p50": 1},
        "test_facts": {"p50": 1},
        "test_twice": {"which": 1},
    }
    own = {name: row for name, row in found.items() if row["options"]["timer"] != "pytest_attn"}
    assert set(own) == {"test_own_before", "test_own_after", "test_made_at_run_time"}
    for row in own.values():
        assert row["stats"]["rounds"] == 7
        assert row["stats"]["max"] < 123
        assert row["extra_info"] == {}


def test_a_users_marker_keeps_its_group_and_loses_its_timer(report):
    found = report(
        """
        import time
        import pytest

        pytestmark = pytest.mark.benchmark(group="of the module")

        def test_module(attn):
            assert attn.measure(1e-3)

        @pytest.mark.benchmark(group="own", timer=time.time, disable_gc=True)
        def test_own(attn):
            assert attn.measure(2e-3)

        @pytest.mark.benchmark(group="of the class")
        class TestIt:
            @pytest.mark.parametrize("size", [1, 2])
            def test_class(self, attn, size):
                assert attn.measure(size)
        """,
        passed=4,
    )
    rows = {name: (row["group"], row["stats"]["data"]) for name, row in found.items()}
    assert rows == {
        "test_module": ("of the module", [1e-3]),
        "test_own": ("own", [2e-3]),
        "test_class[1]": ("of the class", [1.0]),
        "test_class[2]": ("of the class", [2.0]),
    }
    assert found["test_own"]["options"]["disable_gc"] is True
    assert {row["options"]["timer"] for row in found.values()} == {"pytest_attn"}


def test_an_item_that_runs_again_records_again(report, pytester):
    again = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    runtestprotocol(item, log=False, nextitem=nextitem)  # as pytest-rerunfailures does
    item._initrequest()
"""
    pytester.makeconftest(CONFTEST + again)
    found = report(
        """
        runs = []

        def test_it(attn, attn_benchmark):
            runs.append(1)
            attn_benchmark([float(len(runs))])
        """,
        passed=1,
    )
    assert found["test_it"]["stats"]["data"] == [2.0]  # the later one of the two of that name


# -- a test that uses pytest-benchmark itself ----------------------------------------------------------------------------


def test_a_benchmark_of_another_kind_is_left_alone(bench, pytester):
    pytester.makeconftest(CONFTEST + "@pytest.fixture\ndef benchmark():\n    return print\n")
    bench(source=MEASURING.format(taken=False), passed=2)


# -- attn_benchmark ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least one sample, got none"),
        (1.5, "a sequence of seconds, got 1.5"),
        (None, "a sequence of seconds, got None"),
        ("12", "numbers, sample 0 is '1' (str)"),
        ([1.0, None], "numbers, sample 1 is None (NoneType)"),
        ([True], "numbers, sample 0 is True (bool)"),
        ([1j], "numbers, sample 0 is 1j (complex)"),
        ([1.0, 2.0, math.nan], "finite seconds >= 0, sample 2 is nan"),
        ([math.inf], "finite seconds >= 0, sample 0 is inf"),
        ([10**400], "finite seconds >= 0, sample 0 is 1000"),
        ([-1e-9], "finite seconds >= 0, sample 0 is -1e-09"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_the_recorder_refuses_what_is_no_duration(request, samples, message):
    record = pytest_benchmark.attn_benchmark_recorder(request)
    with pytest.raises(ValueError, match="attn_benchmark needs ") as caught:
        record(samples)
    assert message in str(caught.value)


@pytest.mark.parametrize("args", [(), ("--benchmark-disable",), ("-p", "no:benchmark")], ids=" ".join)
def test_the_recorder_refuses_a_second_time_wherever_it_runs(bench, args):
    source = """
        import pytest

        def test_twice(attn_benchmark):
            attn_benchmark([1.0])
            with pytest.raises(RuntimeError, match="one row per test"):
                attn_benchmark([1.0])

        def test_after_a_measurement(attn, attn_benchmark):
            attn.measure(1.0)
            with pytest.raises(RuntimeError, match="one row per test"):
                attn_benchmark([1.0])

        def test_after_a_refusal(attn_benchmark):
            with pytest.raises(ValueError, match="got none"):
                attn_benchmark([])
            attn_benchmark([1.0])
        """
    bench(*args, source=source, passed=3)


def test_the_recorder_refuses_beside_the_tests_own_benchmark(bench):
    source = """
        import pytest

        def test_it(attn_benchmark, benchmark):
            with pytest.raises(RuntimeError, match="or the fixture benchmark"):
                attn_benchmark([1.0])
            benchmark.pedantic(sum, [[1]])
        """
    bench(source=source, passed=1)
