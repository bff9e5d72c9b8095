"""The options of pytest-benchmark on samples that were measured elsewhere: saved, compared, drawn, profiled, left out."""

import json

import pytest
from fakes.benchmark import IS_4, MEASURING


@pytest.mark.slow("times in many processes")
def test_a_saved_run_is_compared_and_fails_when_slower(bench, pytester):
    def source(*samples):
        return f"def test_it(attn):\n    assert attn.measure(*{samples!r}, p50=1)"

    quiet = ("-W", "default", "--disable-warnings")  # of machine_info: the frequency of a CPU is never the same twice
    bench("--benchmark-save=base", "--benchmark-save-data", source=source(1.0, 2.0, 9.0), passed=1)
    [saved] = (pytester.path / ".benchmarks").rglob("*_base.json")
    row = json.loads(saved.read_text())["benchmarks"][0]
    assert (row["stats"]["data"], row["extra_info"]) == ([1.0, 2.0, 9.0], {"attn": {"p50": 1}})

    def compare(rc, samples):
        pytester.makepyfile(source(*samples))
        args = ("--benchmark-compare", "--benchmark-compare-fail=median:5%", *quiet)
        # in a process of its own: pytest-benchmark raises through pytest's main
        result = pytester.runpytest_subprocess("-p", "no:attn", "-p", "no:cacheprovider", *args)
        assert result.ret == rc
        return result

    result = compare(0, (2.1, 2.1, 0.1))  # 5 % is not above 5 %; mean and min are no matter
    result.stdout.fnmatch_lines_random(["test_it (0001_base)*", "test_it (NOW)*"])
    result = compare(1, (2.11, 2.11, 0.1))
    result.stderr.fnmatch_lines(["*Performance has regressed*", "*test_it*'median' has failed*5.500000000 > 5.000000000*"])


def test_cprofile_calls_once_more_and_changes_no_sample(report):
    source = MEASURING.format(taken=True)
    loops = () if IS_4 else ("--benchmark-cprofile-loops=3",)
    found = report(source, "--benchmark-cprofile=tottime", *loops, passed=2)
    assert found["test_measures"]["stats"]["data"] == [1e-3, 3e-3, 2e-3]
    assert found["test_measures"]["cprofile"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "args",
    [
        ("--benchmark-disable", "--benchmark-json=out.json"),
        ("-p", "no:benchmark"),
        ("-n", "1", "--benchmark-json=out.json"),
        ("-n", "1", "--benchmark-skip"),
    ],
    ids=" ".join,
)
def test_where_pytest_benchmark_does_not_record_nothing_happens(bench, pytester, args):
    source = "def test_recorder(attn_benchmark):\n    attn_benchmark([1.0])\n" + MEASURING.format(taken=False)
    expected = {"passed": 1, "skipped": 2} if "--benchmark-skip" in args else {"passed": 3}
    result = bench(*args, source=source, in_process="-n" not in args, **expected)
    assert "automatically disabled" not in result.stdout.str() + result.stderr.str()
    written = pytester.path / "out.json"
    assert not written.exists() or (IS_4 and not written.read_text())  # which opens it while it reads the options


def test_where_nothing_is_measured_pytest_benchmark_leaves_no_line_and_no_folder(pytester):
    pytester.makepyfile(
        test_plain="def test_plain():\n    pass", test_own="def test_own(benchmark):\n    benchmark.pedantic(len, ((),))"
    )
    plain = pytester.runpytest_inprocess("test_plain.py")
    plain.stdout.no_fnmatch_line("benchmark: *")
    assert not (pytester.path / ".benchmarks").exists()
    pytester.runpytest_inprocess("test_own.py").stdout.fnmatch_lines(["collected 1 item", "benchmark: *"])
    asked = pytester.runpytest_inprocess("test_own.py", "--benchmark-autosave")
    asked.stdout.fnmatch_lines(["benchmark: *", "collected 1 item"])
    assert list((pytester.path / ".benchmarks").rglob("*.json"))
