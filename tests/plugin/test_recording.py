"""--attn-update-baselines as a user sees it: what is recorded, what is not, and why."""

import json
import os

import pytest
from fakes.timed import KERNEL

from pytest_attn.reports.records import read_records


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
    result = project("--attn-threads=1", "--attn-update-baselines=first")
    result.assert_outcomes(passed=1)
    processes = [f"baselines: 1 case, new process {number} of 3" for number in (1, 2, 3)]
    result.stdout.fnmatch_lines([*processes, "baselines: 1 of 1 cases recorded in *here*.json", "latency: 1 recorded"])
    (path,) = (pytester.path / "kept" / "here").iterdir()
    ((key, case),) = json.loads(path.read_text())["cases"].items()
    assert key.endswith("| 1 thread"), "they are part of the case"
    assert (len(case["p50_ns"]), len(case["z"]), case["reason"]) == (3, 3, "first")
    assert (case["shape"], case["memory"]) == ("h2-s32-d32", 1000)


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
