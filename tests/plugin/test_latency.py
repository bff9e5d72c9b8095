"""attn.measure as a user sees it. Times come from a clock of the tests, in this process and in the fresh ones."""

import builtins
import re

import pytest
from fakes.timed import KERNEL

from pytest_attn.reports.records import read_records

HOT = {"HOT": "hardware thermal slowdown"}


def test_without_a_baseline_the_time_is_shown_and_what_to_type(project, pytester):
    result = project()
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines(
        [
            r".* attention latency .*",
            r" +p50 +\+- +change +detects +verdict +backend +workload +direction +mode",
            r" ?(100|0\.10)\S+ .s +\d.* +- +- +no baseline +mine +tiny +forward +host clock, 1 call a sample, L2 warm",
            r"no baseline +mine on tiny: none recorded in .*baselines",
            r'latency: 1 without a baseline; record with --attn-update-baselines "first recording"',
        ],
        consecutive=False,
    )
    assert not (pytester.path / "baselines").exists()


def test_a_case_keeps_its_name_when_its_kernel_moves_to_another_line(project, pytester):
    text = KERNEL.replace("attn.measure(mine)", "attn.measure(lambda q, k, v, block=64: mine(q, k, v))")
    keys = []
    for moved in (text, "# a comment\n\n" + text):
        pytester.makepyfile(test_mine=moved)
        project("--attn-output=run.jsonl").assert_outcomes(passed=1)
        records = read_records(pytester.path / "run.jsonl")
        keys += [record["latency"]["key"] for record in records if record["question"] == "latency"]
    assert keys[0] == keys[1]
    assert "lambda of test_mine.py::test_mine" in keys[0]


#: options, environment, how the test ends, and what is said of a time that was recorded at 100 us
SAID = {
    "an equal time": ((), {}, "passed", ["latency: 1 as fast as recorded"]),
    "the limit is 60 %": (["--attn-max-slowdown=60"], {"TIMES": "150"}, "passed", ["latency: 1 as fast as recorded"]),
    "the limit is 40 %": (["--attn-max-slowdown=40"], {"TIMES": "150"}, "failed", ["latency: 1 regressed"]),
    "more memory": ((), {"MEMORY": str(5 << 20)}, "failed", ["*because    peak memory 5.0 MiB, recorded 0.0 MiB"]),
    "a slow machine": (
        *(["-rs"], {"TIMES": "300", "ANCHOR": "3"}, "skipped"),
        ["SKIPPED * test_mine.py:*: inconclusive latency: the compute control moved by +200*"],
    ),
    "a disturbance": (["-rs"], {**HOT, "TIMES": "300"}, "skipped", ["*inconclusive latency: hardware thermal slowdown"]),
    "required on a slow machine": (
        *(["--attn-latency=require"], {"TIMES": "300", "ANCHOR": "3"}, "failed"),
        ["E * inconclusive: mine on tiny, forward: the compute control moved by +200.*", "E *record*--attn-update-baselines*"],
    ),
    "off": (["--attn-latency=off", "-rs"], {}, "skipped", ["*not timed: --attn-latency=off; the check of mine passed"]),
    "other threads": (
        *(["-q", "--attn-threads=3"], {}, "passed"),
        ["no baseline*: recorded warm, * thread*, this is warm, 3 threads"],
    ),
    "workers that share a device": (
        *(
            ["-rs"],
            {"TIMES": "150", "PYTEST_XDIST_WORKER": "gw0", "PYTEST_XDIST_WORKER_COUNT": "2"},
            "skipped",
        ),  # as xdist tells
        ["latency: 1 not timed", "*not timed: 2 workers share the cpu; latencies need -n 0; the check of mine passed"],
    ),
    "one worker": (["-n", "1"], {"TIMES": "150"}, "failed", ["latency: 1 regressed"]),
    "required of workers that share": (
        *(["-n", "2", "--attn-latency=require"], {}, "failed"),
        ["E * not timed, which --attn-latency=require asks for: * 2 workers share the cpu*"],
    ),
    "a new process repeats the options that matter": (  # -k and -p stay, outputs and other processes go
        ["-k", "mine", "--junitxml=report.xml", "-x", "-v", "--attn-seed=0", "-p", "no:randomly"],
        *({"TIMES": "150"}, "failed", ["*decided on 0.15* ms, 0.15* ms"]),
    ),
}


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(one, id=name, marks=[pytest.mark.slow("starts processes")] * ("-n" in one[0]))
        for name, one in SAID.items()
    ],
)
def test_a_time_ends_its_test_as_it_compares_and_says_why(recorded, said):
    options, environment, outcome, lines = said
    result = recorded(*options, **environment)
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(lines)


def test_less_accuracy_is_a_regression(recorded, pytester, baseline_file):
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text().replace("return sdpa(q, k, v)", "return sdpa(q, k, v) * (1 + 2e-7)"))
    data = baseline_file().read_text()
    baseline_file().write_text(re.sub(r'"z": \[[^\]]*\]', '"z": [0.1, 0.05, 0.01]', data))
    result = recorded()
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r"E +because +less accurate: z \d.* in one element, recorded 0\.10; .*"], consecutive=False)


def test_a_wrong_kernel_is_never_timed(recorded, pytester):
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text().replace("return sdpa(q, k, v)", "return sdpa(q, k, v) * 0"))
    result = recorded()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * mismatch: out of mine: *"])
    assert "attention latency" not in result.stdout.str()


def test_require_fails_where_there_is_nothing_to_compare_with(project):
    result = project("--attn-latency=require")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E * no baseline: mine on tiny, forward: none recorded in *", "E *record*--attn-update-baselines*"]
    )


def test_require_asks_a_disturbed_case_again_and_does_not_replace_its_baseline(recorded):
    result = recorded("--attn-latency=require", TIMES="300", **HOT)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * inconclusive: *hardware thermal slowdown", "E *repeat*when nothing else computes*"])
    assert "--attn-update-baselines" not in result.stdout.str()


def without_pytest_benchmark(name, *args, imported=builtins.__import__, **kwargs):
    """Import what is asked for, but for pytest-benchmark."""
    if name.partition(".")[0] == "pytest_benchmark":
        raise ModuleNotFoundError(name)
    return imported(name, *args, **kwargs)


def test_without_pytest_benchmark_a_time_is_recorded_and_a_slower_one_fails(project, monkeypatch):
    monkeypatch.setattr(builtins, "__import__", without_pytest_benchmark)
    without = ("-p", "no:benchmark", "-W", "error")
    project(*without, "--attn-update-baselines=first").assert_outcomes(passed=1)
    project(*without).stdout.fnmatch_lines(["latency: 1 as fast as recorded"])
    slower = project(*without, TIMES="150")
    slower.assert_outcomes(failed=1)
    slower.stdout.fnmatch_lines(["latency: 1 regressed"])


def test_a_damaged_file_is_said_and_left_alone(recorded, baseline_file):
    baseline_file().write_text("{")
    for latency in ("auto", "require"):  # a gate that says nothing would be off
        result = recorded("-q", f"--attn-latency={latency}")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["*is damaged*restore it from version control*", "*or*--attn-latency=off, which times nothing"]
        )
        result.stdout.no_fnmatch_line("*first recording*")  # which would be refused
    result = recorded("--attn-update-baselines=again")
    result.stdout.fnmatch_lines(["baselines: nothing recorded: *is damaged*"])
    assert baseline_file().read_text() == "{"


def test_junit_json_markdown_and_last_failed_see_a_regression(recorded, pytester, monkeypatch):
    pytester.makepyfile(test_other="def test_other():\n    pass\n")
    monkeypatch.setenv("TIMES", "150")
    outputs = ("--junitxml=report.xml", "--attn-output=run.jsonl", "--attn-output=run.md")
    pytester.runpytest_inprocess(*outputs).assert_outcomes(failed=1, passed=1)
    (record,) = (one for one in read_records(pytester.path / "run.jsonl") if one["verdict"] == "regressed")
    assert record["explanation"][0]["text"] == f"regressed: mine on tiny, forward: {record['reason']}"
    summary = (pytester.path / "run.md").read_text()
    assert f"| regressed | `mine` | `tiny` | forward | {record['reason']} |" in summary
    p50 = re.match(r"p50 (\S+ ms)", record["reason"])[1]
    assert re.search(rf"^\| {p50} \| .* \| regressed \|$", summary, re.M), "what was compared stands beside the change"
    text = (pytester.path / "report.xml").read_text()
    assert 'failures="1"' in text
    assert "AssertionError: regressed: mine on tiny" in text
    assert "attn_p50_mine_forward" in text
    result = pytester.runpytest_inprocess("--lf", "--co", "-q")
    assert [line for line in result.outlines if "::" in line] == ["test_mine.py::test_mine[tiny]"]


def test_a_result_that_is_wrong_when_timed_is_called_wrong(pytester):
    """With the real clock: a kernel that is right in its check, and then returns what it has."""
    pytester.makepyfile(
        KERNEL.replace(
            "    return sdpa(q, k, v)", "    KEPT.append(sdpa(q, k, v))\n    return KEPT[min(len(KEPT), 13) - 1]"
        ).replace("def mine", "KEPT = []\ndef mine")
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-output=run.jsonl")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*cannot be timed: mine on tiny, forward: *: its result is not that of the data it was given*",
            "mismatch *mine on tiny: *its result is not that of the data it was given*",
            "latency: 1 wrong when timed",
        ]
    )
    assert [one["verdict"] for one in read_records(pytester.path / "run.jsonl")] == ["passed", "mismatch"]


@pytest.mark.slow("times in many processes")
def test_a_kernel_that_hangs_later_has_no_result(project, pytester, monkeypatch):
    monkeypatch.setattr("pytest_attn.cases.measurement.WAITING_SECONDS", 1.0)
    (pytester.path / "conftest.py").unlink()
    late = "    CALLS.append(1)\n    if len(CALLS) > 4:\n        time.sleep(60)\n    return sdpa(q, k, v)"
    kernel = KERNEL.replace("    return sdpa(q, k, v)", late).replace("def mine", "CALLS = []\ndef mine")
    pytester.makepyfile(test_mine=f"import time\n{kernel}")
    result = project("--attn-timeout=1", "--attn-output=run.jsonl")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*cannot be timed: *no result after 2 s (--attn-timeout): *", "latency: 1 without a result"])
    (record,) = (one for one in read_records(pytester.path / "run.jsonl") if one["question"] == "latency")
    assert record["verdict"] == "no result"


def test_a_kernel_that_raises_later_is_named_and_shows_no_frame_of_the_plugin(project, pytester):
    (pytester.path / "conftest.py").unlink()
    pytester.makepyfile(
        test_mine=KERNEL.replace(
            "    return sdpa(q, k, v)", "    CALLS.append(1)\n    assert len(CALLS) < 4\n    return sdpa(q, k, v)"
        ).replace("def mine", "CALLS = []\ndef mine")
    )
    result = project()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["latency: 1 cannot be timed"])
    assert "pytest_attn/" not in result.stdout.str()
