"""Two files of records compared, and what bisect makes of one."""

import random
import subprocess

import pytest
from fakes.records import GPU, profile_of, record, timing, workloads
from fakes.timed import committed

from pytest_attn.__main__ import main
from pytest_attn.guests.against import compare_records
from pytest_attn.guests.against.compare_records import bisected
from pytest_attn.reports.records import RecordWriter

ON = next(workloads(1))
BACKEND = ("mine", 1.0, "torch", "2.11")


def checked(verdict="passed", **more):
    values = {"test": "t.py::t", "command": "pytest t.py::t", "z_element": 2.0, "z_row": 1.0, "z_head": 0.5, "memory": 1 << 20}
    return {**record("check", verdict, ON, BACKEND, "forward"), **values, **more}


def launching(symbol):
    profile = profile_of(ON, BACKEND, "forward")
    return checked(profiles=[{**profile, "launches": [{**one, "symbol": symbol} for one in profile["launches"]]}])


def timed(p50=1e-3, verdict="no baseline", runs=None, anchors=None, disturbances=(), **more):
    one = timing(verdict, ON, BACKEND, "forward", random.Random(0))
    decision = {"change": 0.0, "runs": runs, "detectable": 0.01} if runs else None
    latency = {**one["latency"], "p50": p50, "decision": decision, "memory": 1 << 20}
    latency |= {"anchors": anchors or {}, "disturbances": [*disturbances]}
    return {**one, "test": "t.py::t", "command": "pytest t.py::t", "latency": latency, **more}


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """Return a function of two runs that returns what is printed, and how it ends."""
    monkeypatch.chdir(tmp_path)

    def compare(base, head, *options):
        for name, records in (("base.jsonl", base), ("head.jsonl", head)):
            RecordWriter(name).write(records)
        assert main(["compare", "base.jsonl", "head.jsonl", *options]) == 0
        return capsys.readouterr().out.splitlines()

    return compare


def test_equal_runs_differ_in_nothing_and_say_what_would_have_shown(compared):
    first, second = compared([checked(), timed()], [checked(z_element=2.2), timed(1.01e-3)])
    assert first == "2 judgments in both runs"
    assert second.startswith("1 p50 compared; the least slowdown that would have shown: ")


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (checked(), checked("mismatch", reason="out z 33"), "verdict       mine on {}: passed -> mismatch (out z 33)"),
        (checked(), checked("skipped", reason="no window"), "verdict       mine on {}: passed -> skipped (no window)"),
        (checked(), checked(z_element=4.0), "z, element    mine on {}: 2.00 -> 4.00"),
        (checked(), checked(memory=3 << 20), "memory        mine on {}: 1.0 MiB -> 3.0 MiB"),
        (checked(), checked(compile_seconds=9.0), "first calls   mine on {}: 0.0 s -> 9.0 s"),
        (timed(), timed(2e-3, shape={**timed()["shape"], "id": "s64"}), "shape         mine on {}: * -> s64"),
        (launching("old"), launching("new"), "kernels       mine on {}: old -> new"),
        (timed(), timed(1.2e-3), "slower        mine on {}: 1 ms -> 1.2 ms (+20.0%; *% would have shown)"),
        (timed(runs=[1e-3] * 8), timed(9e-4, runs=[9e-4] * 8), "faster        mine on {}: 1 ms -> 0.9 ms (-10.0%; *"),
    ],
)
def test_what_changed_is_a_line_with_before_and_now(compared, before, now, line):
    said, *others = compared([before], [now])
    assert others[0].startswith("1 judgment in both runs")
    start, _, end = line.format(ON[0]).partition("*")
    assert said.startswith(start)
    assert said.endswith(end if "*" in line else said[len(start) :])


def test_a_comment_has_the_command_of_each_line(compared):
    page = compared([checked()], [checked("mismatch")], "--md")
    assert f"| verdict | `mine` | `{ON[0]}` | passed | mismatch | `pytest t.py::t` |" in page


def test_a_busy_cpu_is_not_taken_for_a_slower_kernel(compared):
    cpu, busy = {**GPU, "kind": "cpu"}, {"compute": 2e-3, "memory": 1e-3, "attention": 2e-3}
    quiet = timed(machine=cpu, anchors={name: taken / 2 for name, taken in busy.items()})
    for now in (timed(2e-3, machine=cpu, anchors=busy), timed(2e-3, machine=cpu, disturbances=["a core that others used"])):
        assert not [line for line in compared([quiet], [now]) if line.startswith("slower")]
    assert compared([quiet], [now])[-1] == "1 p50 not compared: other work disturbed one of the two times"
    slower = timed(2e-3, machine=cpu, anchors=quiet["latency"]["anchors"])
    assert compared([quiet], [slower])[0].startswith("slower ")


def test_times_of_other_machines_are_not_compared(compared):
    lines = compared([timed()], [timed(2e-3, machine={**GPU, "name": "H100"})])
    assert lines == ["1 judgment in both runs", "another machine: NVIDIA H200 before, H100 now; times are not compared"]


@pytest.mark.parametrize(
    ("base", "said"),
    [(".", ". is a folder; name the"), ("gone.jsonl", "there is no gone"), ("empty.jsonl", "empty.jsonl has no")],
)
def test_what_is_no_run_is_refused_in_a_line(tmp_path, monkeypatch, capsys, base, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SystemExit) as ended:
        main(["compare", base, "empty.jsonl"])
    assert ended.value.code == 2
    assert f"compare: error: {said}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ([checked(), timed(verdict="no difference")], 0),
        ([checked(), timed(verdict="faster")], 0),
        ([checked(), timed(verdict="slower")], 1),
        ([checked(), timed(verdict="slower"), timed(verdict="inconclusive")], 1),
        ([checked(), timed(verdict="inconclusive")], 125),
        ([checked("mismatch"), timed(verdict="slower")], 125),
        ([], 125),
    ],
)
def test_bisect_says_slower_not_slower_or_cannot_say(records, code):
    assert bisected(records)[0] == code


def test_bisect_ends_that_of_git_without_a_good_revision_or_a_test(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (["-x", "t.py"], "there is no good revision; type git bisect start BAD GOOD"),
        ([], "name the test that"),
    ):
        assert main(["bisect", *words]) == 128  # 1 to 127 are a bad revision
        assert capsys.readouterr().err.startswith(f"bisect: {said}")
    assert main(["bisect", "--help"]) == 128
    assert "inconclusive." in capsys.readouterr().out


def test_bisect_knows_the_good_revision_by_the_words_of_its_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for speed in ("fast", "slow"):
        (tmp_path / "speed").write_text(speed)
        committed(tmp_path)
    for words in (["start", "--term-old=fast", "--term-new=slow"], ["slow"], ["fast", "HEAD~1"]):
        subprocess.run(["git", "bisect", *words], check=True, capture_output=True)
    asked = []
    monkeypatch.setattr(compare_records, "_pytest", lambda *words: asked.append(words))
    assert main(["bisect", "t.py"]) == 125
    first = subprocess.run(["git", "rev-parse", "HEAD~1"], check=True, capture_output=True, text=True).stdout.strip()
    assert asked[0][:2] == ("t.py", f"--attn-against={first}")
