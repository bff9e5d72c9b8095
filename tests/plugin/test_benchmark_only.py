"""--benchmark-only and --benchmark-skip: which tests measure, as pytest-benchmark is told."""

import json

import pytest

#: tests that measure, each in its own way, then those that do not
FORMS = """
import contextlib, functools, pytest
from elsewhere import measures_elsewhere

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

def helper(attn):
    attn.measure(1.0)

def nested_helper(attn):
    return [attn.measure(x) for x in (1.0,)]

wrapped_helper = decorated(helper)

def helper_of_helper(attn):
    helper(attn)

class measure_nothing:
    __wrapped__ = helper

@pytest.fixture
def prepared(attn):
    return attn

def test_yes_plain(attn): attn.measure(1.0)
@decorated
@decorated
def test_yes_wrapped(attn): attn.measure(1.0)
def test_yes_nested(attn): (lambda: [attn.measure(x) for x in (1.0,)])()
def test_yes_helper(attn): helper(attn)
@decorated
def test_yes_nested_helper(attn): nested_helper(attn)
def test_yes_wrapped_helper(attn): wrapped_helper(attn)
@pytest.mark.parametrize("size", [1, 2])
def test_yes_parametrized(attn, size): attn.measure(size)
class TestYes:
    def test_yes_method(self, attn): attn.measure(1.0)
def test_yes_prepared(prepared): prepared.measure(1.0)
def test_yes_recorder(attn_benchmark): attn_benchmark([1.0])
@pytest.mark.usefixtures("attn_benchmark")
def test_yes_declared(attn): helper_of_helper(attn)
def test_yes_own(benchmark): benchmark.pedantic(sum, [[1]])

def test_no_plain(attn): pass
def test_no_word(attn): "measure"; measure = attn; attn.request.node
def test_no_attn(): helper(type("A", (), {"measure": print}))
def test_no_second_level(attn): helper_of_helper(attn)
def test_no_other_module(attn): measures_elsewhere(attn)
@pytest.mark.parametrize("size", [1, 2])
def test_no_parametrized(attn, size): measure_nothing, size
"""

YES, NO = 13, 7


@pytest.fixture
def forms(bench, pytester):
    pytester.makepyfile(elsewhere="def measures_elsewhere(attn):\n    attn.measure(1.0)")
    pytester.makepyfile(test_forms=FORMS)
    return bench


def test_only_runs_the_tests_that_measure(forms, pytester):
    result = forms("--benchmark-only", "--benchmark-json=out.json", "-rps", passed=YES, skipped=NO)
    assert_all_that_passed_are("test_yes", result)
    rows = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    assert len(rows) == YES
    assert {row["options"]["timer"] for row in rows if row["name"] != "test_yes_own"} == {"pytest_attn"}


def test_skip_runs_the_others(forms):
    result = forms("--benchmark-skip", "-rps", passed=NO, skipped=YES)
    assert_all_that_passed_are("test_no", result)


def assert_all_that_passed_are(prefix, result):
    passed = [line for line in result.outlines if line.startswith("PASSED ")]
    assert passed
    assert all(f"::{prefix}" in line for line in passed)


def test_no_benchmark_is_set_up_before_it_is_needed(forms, pytester):
    result = pytester.runpytest_inprocess("-p", "no:attn", "--benchmark-only", "--setup-plan")
    assert result.stdout.str().count("SETUP    F benchmark") == 1  # of test_yes_own


def test_only_of_a_file_without_own_benchmarks_warns_of_none(bench):
    source = """
        import pytest

        def test_skips(attn):
            pytest.skip("here")
            attn.measure(1.0)

        def test_fails(attn):
            assert attn is None
            attn.measure(1.0)

        def test_returns(attn):
            if attn is None:
                attn.measure(1.0)
        """
    result = bench("--benchmark-only", source=source, rc=1, passed=1, failed=1, skipped=1)
    assert "was not used" not in result.stdout.str() + result.stderr.str()


def test_a_measurement_that_skip_did_not_see_goes_unrecorded(bench):
    source = """
        def test_it(attn):
            assert getattr(attn, "mea" + "sure")(1.0) is False
        """
    bench("--benchmark-skip", source=source, passed=1)
