"""Two versions against each other: which is meant, where it stands, what is decided, and that nothing stays behind."""

import mmap
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes.latencies import case
from fakes.records import run_of

import pytest_attn
from pytest_attn.cases.latency import TimedCase
from pytest_attn.guests.against import against_run, other_side
from pytest_attn.guests.against.against_run import BothSides
from pytest_attn.guests.against.other_side import Moved, OtherSide, OtherSideError
from pytest_attn.latency.gate import POLICIES
from pytest_attn.processes.fork_server import Command
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.reports.records import changed

MINE = Path("/work/mine")


def git(folder, *words):
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of two commits, the speed of whose kernel stands in a file; temporary folders are beside it."""
    top, own = tmp_path / "top", tmp_path / "tmp"
    (top / "sub").mkdir(parents=True)
    own.mkdir()
    git(top, "init", "-q")
    for speed in ("100", "150"):
        (top / "speed").write_text(speed)
        git(top, "add", "-A")
        git(top, "commit", "-qm", speed)
    monkeypatch.chdir(top / "sub")
    monkeypatch.setenv("TMPDIR", str(own))
    monkeypatch.setattr(against_run.ProcessFolder.__init__.__globals__["tempfile"], "tempdir", str(own))
    return top


# -- which version -------------------------------------------------------------------------------------------------------


def test_a_revision_is_there_while_it_is_asked_and_leaves_nothing_in_the_repository(repository):
    before = git(repository, "worktree", "list"), sorted(os.listdir(repository / ".git"))
    other = other_side.other_side("HEAD~1")
    assert other.name == f"HEAD~1 ({git(repository, 'rev-parse', 'HEAD~1')[:10]})"
    with other.placed() as moved:
        assert (moved.there / "speed").read_text() == "100"
        assert (repository / "speed").read_text() == "150"
    assert not moved.there.parent.exists()
    assert (git(repository, "worktree", "list"), sorted(os.listdir(repository / ".git"))) == before
    assert git(repository, "status", "--porcelain") == ""


def test_what_a_killed_run_has_left_is_removed_by_the_next(repository):
    script = (
        "from pytest_attn.guests.against.other_side import other_side\nimport time\n"
        "with other_side('HEAD~1').placed() as moved:\n    print(moved.there, flush=True)\n    time.sleep(60)\n"
    )
    own = {**os.environ, "PYTHONPATH": str(Path(pytest_attn.__file__).parent.parent)}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=own)
    left = Path(process.stdout.readline().strip())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (left / "speed").is_file()
    with other_side.other_side("HEAD").placed():
        assert not left.parent.exists()


NOBODY = "echo No module named pytest_attn >&2; exit 1"
OTHER_VERSION = "echo 0.0.1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere", r"^'nowhere' is neither a revision of \S+top nor the path of an interpreter; git log lists .*"),
        ("--all", r"^'--all' is neither a revision"),
        ("here", r"^'here' is neither a revision"),
        ("../python", r"^\.\./python has no pytest-attn that can be imported: No module named pytest_attn; install it there$"),
        ("../silent", r"^\.\./silent has no pytest-attn that can be imported: it said nothing; install it there$"),
        ("../other", r"^\.\./other has pytest-attn 0\.0\.1, this is \S+; install the same in both$"),
    ],
)
def test_what_is_no_other_version_is_refused_in_a_line(repository, text, said):
    for name, script in (("python", NOBODY), ("silent", "true"), ("other", OTHER_VERSION), ("sub/here", NOBODY)):
        (repository / name).write_text(f"#!/bin/sh\n{script}\n")
        (repository / name).chmod(0o755)
    with pytest.raises(ValueError, match=said) as refused:
        other_side.other_side(text)
    assert "\n" not in str(refused.value)


def test_without_a_repository_and_with_the_plugin_in_it_there_is_no_revision(repository, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(other_side, "__file__", str(repository / "pytest_attn" / "guests" / "against" / "other_side.py"))
        with pytest.raises(ValueError, match=r"^pytest-attn itself lies in"):
            other_side.other_side("HEAD")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"^'HEAD' is not the path of an interpreter, and \S+ is in no git repository \(git rev-parse: .*"
    ):
        other_side.other_side("HEAD")
    said = "fatal: detected dubious ownership in repository at '/mine'"
    (tmp_path / "git").write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"{said}\" 'To add an exception, call:' 'git config' >&2; exit 128\n"
    )
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(f"(git rev-parse: {said})")):
        other_side.other_side("HEAD")
    (tmp_path / "git").unlink()
    with pytest.raises(ValueError, match=r"\(git: No such file or directory\)"):
        other_side.other_side("HEAD")


def test_a_command_is_moved_with_what_it_imports(monkeypatch, tmp_path):
    link, there = tmp_path / "link", tmp_path / "t"
    link.symlink_to(MINE)
    (there / "sub").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["/usr/lib", f"{link}/src", f"{sys.prefix}/lib", ""])
    told = {"tests": [f"{MINE}/t.py::a[x/y]", "t.py"], "number": 1}
    environment = {"PYTHONPATH": f"/else{os.pathsep}{MINE}", "HOME": f"{MINE}x"}
    (there / "here.ini").touch()
    given = [f"--rootdir={MINE}", f"-c{MINE}/here.ini", f"-c{MINE}/gone.ini"]
    command = Command(given, environment, MINE / "sub", Path("/out"), told)
    moved = Moved(MINE, there, {"BUILT": "x"})(command)
    arguments = [f"--rootdir={there}", f"-c{there}/here.ini"]
    assert (moved.arguments, moved.folder, moved.output) == (arguments, there / "sub", Path("/out"))
    assert moved.told == {"tests": [f"{there}/t.py::a[x/y]", "t.py"], "number": 1}
    found = os.pathsep.join([f"{there}/src", "/else", str(there)])
    assert moved.environment == {"PYTHONPATH": found, "HOME": f"{MINE}x", "BUILT": "x"}
    assert Moved(MINE, there, {})(command._replace(folder=MINE / "new")).folder.is_dir()


def test_what_a_process_of_the_other_side_imports_from_this_tree_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sent, files = (
        [],
        {"a": f"{tmp_path}/src/a.py", "b": f"{tmp_path.parent}/t/b.py", "c": f"{sys.prefix}/c.py", "d": "_ops.py"},
    )
    channel = SimpleNamespace(send=lambda **message: sent.append(message))
    worker = SimpleNamespace(told={"here": str(tmp_path), "there": f"{tmp_path.parent}/t"}, channel=channel)
    monkeypatch.setattr(other_side.Worker, "of_this_process", lambda: worker)
    for name, file in files.items():
        monkeypatch.setitem(sys.modules, f"stray_{name}", SimpleNamespace(__file__=file))
    (tmp_path / "kernel.so").write_bytes(b"x")
    with (tmp_path / "kernel.so").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        other_side.pytest_sessionfinish()
        worker.told["there"] = None
        other_side.pytest_sessionfinish()
    strays = [str(tmp_path / "kernel.so"), files["a"]]
    assert sent == [{"strays": strays, "has_built": has_built} for has_built in (True, False)]


def test_an_installed_copy_is_no_side_unless_it_is_of_the_same_text(monkeypatch, tmp_path):
    for name, text in {"here/src/mine/fast.py": "new", "there/src/mine/fast.py": "old", "env/fast.py": "old"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    here, there, installed = tmp_path / "here", tmp_path / "there", str(tmp_path / "env" / "fast.py")
    monkeypatch.setitem(sys.modules, "mine.fast", SimpleNamespace(__file__=installed))
    assert other_side.installed_instead(here, there) == [installed]
    assert other_side.installed_instead(there, there) == []
    (tmp_path / "env" / "fast.py").write_text("new")
    assert other_side.installed_instead(here, there) == []
    assert other_side.installed_instead(there, there) == [installed]
    (there / "src" / "mine" / "fast.py").unlink()
    assert other_side.installed_instead(here, there) == []


@pytest.mark.parametrize(
    ("said", "is_missing"),
    [
        ("ERROR: not found: /t/a.py::test[x]\n(no match in any of [<Module a.py>])", True),
        ("\x1b[31mERROR: file or directory not found: a.py::test[x]\n\x1b[0m", True),
        ("ERROR: module or package not found: a.py::test[x] (missing __init__.py?)", True),
        ("ERROR: not found: /t/a.py::test[x][y]", False),
        ("ERROR: not found: /t/b/a.py::test[x]", False),
        ("a.py::test[x]", False),
    ],
)
def test_what_pytest_has_not_found_is_read_from_what_it_says(said, is_missing):
    assert against_run._is_missing("a.py::test[x]", Path("/t"), f"1 error\n{said}\n") is is_missing


def test_of_a_file_that_is_wrong_its_error_is_said_and_not_its_line():
    said = 'E     File "/t/a.py", line 1\nE       def f(:\nE             ^\nE   SyntaxError: invalid syntax\n'
    assert against_run._RAISED.findall(said) == ["SyntaxError: invalid syntax"]


def test_what_did_not_run_here_is_not_called_wrong_on_the_other_side_only(monkeypatch):
    ours, theirs = ({"both": "mismatch", "here": "mismatch", "a": "passed"}, dict.fromkeys(("a", "both", "later"), "mismatch"))
    records, others = ([changed(run_of(1)[0], test=name, verdict=one) for name, one in run.items()] for run in (ours, theirs))
    said, sides = [], BothSides(SimpleNamespace(results=SimpleNamespace(records=records)), None, OtherSide("old", "old"))
    monkeypatch.setattr(sides, "say", lambda text, **markup: said.append(text))
    assert sides._not_comparable([], others, {}) == {}
    assert said == ["wrong on both sides: both", "wrong here only: here", "wrong in old only: a"]


def test_tests_of_another_repository_are_not_compared_with_themselves(tmp_path):
    sides = BothSides(None, SimpleNamespace(rootpath=tmp_path), OtherSide("old", "old"))
    with pytest.raises(
        OtherSideError, match=rf"^{tmp_path}, pytest's root, is not in /work/mine; run pytest in the repository"
    ):
        sides._judged(Moved(MINE, tmp_path, {}), tmp_path)


# -- what is decided -----------------------------------------------------------------------------------------------------


def decided(monkeypatch, slower=0.0, later=None, kind="cuda", sd=0.002, disturbed=0, python=False, seed=0):
    """Return the decision over a case whose processes here take longer by a share; later: in the second round."""
    generator, rounds = random.Random(seed), iter([slower, slower if later is None else later])

    def fresh_runs(config, names, processes, progress, modes, lacking, more, is_forked, placed, pool_of):
        share, drift = next(rounds), generator.gauss(0, 0.003)
        for number in range(processes):
            side, there = placed(number, "here"), 1e-3 * (1 + drift * number / processes)
            p50 = there * (1 + share * (side == "here")) * (1 + generator.gauss(0, sd))
            anchors = {"compute": 2e-4 * (1.05 if python and side == "here" else 1), "memory": 1e-4}  # of another torch
            hot = ["hot"] if number < disturbed else []
            yield {"key": "k", "p50": p50, "launch": 0.0, "anchors": anchors, "disturbances": hot, "process": number}

    measurement = SimpleNamespace(
        key="k",
        test_name="t.py::t",
        policy=replace(POLICIES[kind], pause=0.0),
        cases=4,
        spec=SimpleNamespace(device=torch.device(kind)),
    )
    monkeypatch.setattr(
        against_run, "fresh_runs", lambda *given, **more: [{**one, "mode": "graph"} for one in fresh_runs(*given, **more)]
    )
    monkeypatch.setattr(against_run, "locked", lambda session, devices: ProcessFolder())
    progress = SimpleNamespace(counting=lambda *what: ProcessFolder())
    session = SimpleNamespace(progress=progress, settings=SimpleNamespace(max_slowdown=None, fresh="forked"))
    sides = BothSides(session, None, OtherSide("old", "old", top=None if python else MINE))
    return sides._decided([TimedCase(measurement, case(kind=kind))], lambda command: "there")["k"]


@pytest.mark.parametrize("python", [False, True])
def test_two_percent_are_found_both_ways_and_nothing_is_not(monkeypatch, python):
    seeds = range(24)
    of = [[decided(monkeypatch, share, seed=seed, python=python).verdict for seed in seeds] for share in (0.02, -0.02, 0.0)]
    assert [set(verdicts) for verdicts in of] == [{"slower"}, {"faster"}, {"no difference"}]


def test_what_would_have_shown_is_said(monkeypatch):
    same = decided(monkeypatch)
    assert same.detectable == pytest.approx(0.012, abs=0.002)
    assert not same.is_faster
    assert len(same.runs) == 8


def test_a_busy_cpu_accuses_nobody_and_a_slow_kernel_is_found_there(monkeypatch):
    busy = [decided(monkeypatch, kind="cpu", sd=0.1, seed=seed) for seed in range(32)]
    assert {one.verdict for one in busy} <= {"no difference", "inconclusive"}
    assert all(one.detectable > 0.1 for one in busy)
    assert decided(monkeypatch, 0.3, kind="cpu", sd=0.01).verdict == "slower"


def test_on_a_cpu_a_difference_that_is_gone_some_time_later_is_none(monkeypatch):
    gone = decided(monkeypatch, 0.5, later=0.0, kind="cpu", sd=0.01)
    assert (gone.verdict, gone.reason) == ("inconclusive", "processes some time later do not confirm the difference")


def test_kernels_that_tuned_themselves_otherwise_there_are_named(monkeypatch):
    said, sides = [], BothSides(None, None, OtherSide("old", "old"))
    monkeypatch.setattr(sides, "say", lambda text, **markup: said.append(text))
    tuned = [{"same": "warps: 4", "mine": f"warps: {4 if number in (0, 3) else 8}", f"{number}": ""} for number in range(4)]
    sides._say_tuned([{"process": number, "tuned": one} for number, one in enumerate(tuned)] + [{"process": 4}])
    assert said == ["autotuned otherwise: mine: warps: 4 here, warps: 8 in old"]


def test_too_few_undisturbed_processes_decide_nothing(monkeypatch):
    assert decided(monkeypatch, 0.5, disturbed=6).verdict == "slower"
    few = decided(monkeypatch, 0.5, disturbed=8)
    assert (few.verdict, few.reason) == (
        *("inconclusive",),
        "of this side, 4 new processes timed it undisturbed, 5 are needed; mostly: hot",
    )
    assert few.detectable < 0.02 < decided(monkeypatch, disturbed=8, sd=0.1).detectable
