"""The options of pytest-benchmark on samples that were measured elsewhere: saved, compared, drawn, profiled, left out."""

import pytest
from fakes.benchmark import IS_4, MEASURING


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
