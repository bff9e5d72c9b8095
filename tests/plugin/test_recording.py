"""--attn-update-baselines as a user sees it: what is recorded, what is not, and why."""

import json
import os

import pytest
from fakes.timed import KERNEL

from pytest_attn.reports.records import read_records


@pytest.mark.slow("times in many processes")
def test_recording_says_what_it_wrote(project, pytester, baseline_file, real_processes):
    pytester.makeini("[pytest]\nfilterwarnings = error\n")  # nothing was imported before pytest could rewrite it
    result = project("--attn-update-baselines", "first recording")
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines(
        [
            r"baselines: 1 case, new process 1 of 3",
            r"baselines: 1 case, new process 2 of 3",
            r"baselines: 1 case, new process 3 of 3",
            r"baselines: 1 of 1 cases recorded in .*baselines.*\.json",
            r"latency: 1 recorded",
        ],
        consecutive=False,
    )
    (case,) = json.loads(baseline_file().read_text())["cases"].values()
    assert len(case["p50_ns"]) == 3
    assert case["reason"] == "first recording"
    assert case["shape"] == "h2-s32-d32"
    assert case["memory"] == 1000
    assert len(case["z"]) == 3


@pytest.mark.slow("times in many processes")
def test_a_recording_replaces_disturbed_processes(project, baseline_file):
    result = project("--attn-update-baselines=first", HOT_IN="0,3,4")
    result.assert_outcomes(passed=1)
    assert result.stdout.str().count("baselines: 1 case disturbed, one more process") == 3
    (case,) = json.loads(baseline_file().read_text())["cases"].values()
    assert len(case["p50_ns"]) == 3


@pytest.mark.slow("times in many processes")
def test_a_recording_on_a_busy_machine_keeps_the_good_processes_until_there_are_enough(project, baseline_file):
    project("--attn-update-baselines=first", HOT_IN="0,2,3,4,5,6,7,8,9").assert_outcomes(passed=1)
    (case,) = json.loads(baseline_file().read_text())["cases"].values()
    assert len(case["p50_ns"]) == 3


def test_what_was_not_recorded_is_an_error_of_its_test(project, pytester, monkeypatch):
    monkeypatch.setattr("pytest_attn.cases.latency.MORE_PROCESSES", 4)
    result = project("--attn-update-baselines=first", "--attn-output=run.jsonl", "--junitxml=run.xml", HOT_IN="0,3,4,5,6")
    result.assert_outcomes(passed=1, errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    words = "*2 new processes timed it undisturbed, 3 are needed; mostly: hot; record again when the machine does nothing else"
    result.stdout.fnmatch_lines([f"not recorded: {words}", "latency: 1 not recorded*"])
    assert not (pytester.path / "baselines").exists()
    records = read_records(pytester.path / "run.jsonl")
    assert [record["verdict"] for record in records if record["question"] == "latency"] == ["unrecorded"]
    assert "not recorded" in (pytester.path / "run.xml").read_text()


def test_what_fails_before_or_after_its_time_is_not_recorded(project, pytester):
    wrong, late = KERNEL.replace("return sdpa(q, k, v)", "return sdpa(q, k, v) * 0"), "\n    assert False, 'after its time'\n"
    pytester.makepyfile(test_wrong=wrong, test_mine=KERNEL.rstrip() + late)
    result = project("--attn-update-baselines=first")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines_random(["E * mismatch: out of mine: *", "E * after its time*"])
    assert not (pytester.path / "baselines").exists()


#: one backend in two tests, ids with an at sign, two callables of one factory: one case, two, and two
CASES = """
@pytest.mark.parametrize("n", [1, 2], ids=["k@1", "k@2"])
@MARK
def test_ids(attn, n):
    attn.measure(mine)

@MARK
def test_backend(attn):
    attn.measure("math")

@pytest.mark.attention(Workload(32, heads=2, head_dim=32, name="tiny"), device="cpu", inputs="large")
def test_backend_again(attn):
    attn.measure("math")

def make(n):
    def fn(q, k, v):
        return sdpa(q, k, v) * 1.0 ** n
    return fn

@MARK
def test_factory(attn):
    [attn.measure(make(n)) for n in (1, 8)]
"""


@pytest.mark.slow("times in many processes")
def test_what_is_one_case_and_what_are_two(project, pytester, baseline_file):
    head, _, body = KERNEL.partition("@pytest.mark")
    pytester.makepyfile(test_mine=head + CASES.replace("@MARK", f"@pytest.mark{body.splitlines()[0]}"))
    project("--attn-update-baselines=first").assert_outcomes(passed=5)
    cases = json.loads(baseline_file().read_text())["cases"]
    assert {key: len(case["p50_ns"]) for key, case in cases.items()} == dict.fromkeys(cases, 3)
    assert len(cases) == 5
    assert len([key for key in cases if "| math" in key or key.startswith("math")]) == 1, cases.keys()
    project().assert_outcomes(passed=5)


@pytest.mark.slow("times in many processes")
def test_recording_again_keeps_the_history_and_the_rest(recorded, pytester, baseline_file):
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text() + "\n" + KERNEL[KERNEL.index("@pytest.mark") :].replace("test_mine", "test_other"))
    recorded("--attn-update-baselines=slower on purpose", "-k", "test_other", TIMES="150").assert_outcomes(
        passed=1, deselected=1
    )
    cases = json.loads(baseline_file().read_text())["cases"]
    assert sorted(case["reason"] for case in cases.values()) == ["first recording", "slower on purpose"]
    recorded("--attn-update-baselines=accepted", "-k", "not test_other", TIMES="150").assert_outcomes(passed=1, deselected=1)
    cases = json.loads(baseline_file().read_text())["cases"]
    assert [entry[2] for key, case in cases.items() for entry in case["history"] if "test_mine[" in key] == [
        "first recording",
        "accepted",
    ]
    result = recorded("-k", "not test_other", TIMES="150")
    result.stdout.re_match_lines([r".*\+(49|5\d)\.\d% since the first recording on .*"], consecutive=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["batched", "replay"])
def test_recorded_anew_batches_and_replays_become_a_graph_in_every_process(recorded, mode, baseline_file):
    path = baseline_file()
    path.write_text(path.read_text().replace('"mode": "host"', f'"mode": "{mode}"'))
    recorded(MODES="graph,events", PYTEST_ADDOPTS="--attn-update-baselines=captured").assert_outcomes(passed=1)
    (case,) = json.loads(path.read_text())["cases"].values()
    assert case["mode"] == "graph"
    assert [entry[2] for entry in case["history"]] == ["captured"], "times of another mode are no history"


def test_the_folder_of_baselines_can_be_another(project, pytester):
    pytester.makeini("[pytest]\nattn_baselines = kept/here\n")
    project("--attn-threads=1", "--attn-update-baselines=first").assert_outcomes(passed=1)
    (path,) = (pytester.path / "kept" / "here").iterdir()
    (key,) = json.loads(path.read_text())["cases"]
    assert key.endswith("| 1 thread"), "they are part of the case"


def test_ctrl_c_while_recording_writes_nothing(pytester, project):
    path = pytester.path / "conftest.py"
    interrupted = "def interrupted(*arguments):\n    raise KeyboardInterrupt\nrecording.fresh_runs = interrupted\n"
    path.write_text(f"{path.read_text()}\n{interrupted}")
    result = project("--attn-update-baselines=first")
    result.stdout.fnmatch_lines(["baselines: nothing recorded: interrupted"])
    assert not (pytester.path / "baselines").exists()
    assert os.environ.get("PYTEST_ATTN_CHANNEL") is None


def test_what_cannot_be_written_is_said_before_anything_is_timed(project, pytester):
    (pytester.path / "baselines").write_text("")
    result = project("--attn-update-baselines=first")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["baselines: nothing recorded: *cannot be written*", "latency: 1 not recorded"])
    result.stdout.no_fnmatch_line("*new process 1 of*")
