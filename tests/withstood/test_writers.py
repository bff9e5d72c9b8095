"""Disks that are full, what may not be written, and what stands where a file of ours should: said in one line, never 0."""

import contextlib
import os
import re
import subprocess
import sys

import attempts
import pytest
from fakes.timed import CLOCK, KERNEL

from pytest_attn.latency.baseline_file import read

TEST = """
import pytest
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa
W = Workload(32, heads=2, head_dim=32)

@pytest.mark.attention(W, device="cpu")
def test_right(attn): attn.check(sdpa)
"""
WRONG = TEST.replace("attn.check(sdpa)", "attn.check(lambda q, k, v: sdpa(q, k, v) * 1.01)")
#: what each writer is asked, the file, its tests, and its conftest
WRITERS = {
    ".jsonl": ("--attn-output=there/run.jsonl", "run.jsonl", TEST, ""),
    ".md": ("--attn-output=there/run.md", "run.md", TEST, ""),
    ".support.md": ("--attn-output=there/run.support.md", "run.support.md", TEST, ""),
    ".html": ("--attn-output=there/run.html", "run.html", TEST, ""),
    "--attn-rank-to": ("--attn-rank-to=there/run", "run.json", KERNEL, CLOCK),
    "saved failures": ("--attn-save-failures=there/saved", "saved", WRONG, ""),
    "baselines": ("--attn-update-baselines=why --attn-baselines=there/kept", "kept", KERNEL, CLOCK),
    "merge": ("merge there/all.jsonl run.jsonl", "all.jsonl", TEST, ""),
    "report": ("report run.jsonl -o there/page.html", "page.html", TEST, ""),
    "GITHUB_STEP_SUMMARY": ("", "step.md", TEST, ""),
}


@contextlib.contextmanager
def full(path, size="64k"):
    """Put a disk without room there."""
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False).returncode:
        pytest.skip("mounting a disk takes root")
    try:
        with contextlib.suppress(OSError), open(path / "filling", "wb", 0) as file:
            while True:
                file.write(bytes(1024))
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def denied(path):
    path.chmod(0o555)
    yield


def instead(make):
    @contextlib.contextmanager
    def made(path, name):
        make(path / name)
        yield

    return made


def foreign(path):
    path.write_text("theirs")
    os.chown(path, 65534, 65534)
    path.chmod(0o600)
    path.parent.chmod(0o1777)
    os.chown(path.parent, 65534, 65534)


OBSTACLES = {
    "disk full": lambda path, name: full(path),
    "permission denied": lambda path, name: denied(path),
    "a folder there": instead(lambda path: (path.mkdir(), (path / "theirs").write_text(""), path.chmod(0o555))),
    "a file there": instead(lambda path: path.write_text("theirs")),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "a link to nowhere": instead(lambda path: path.symlink_to("no/such/file")),
    "/dev/full": instead(lambda path: path.symlink_to("/dev/full")),
    "another user's file": instead(foreign),
}


REFUSED = re.compile(r"cannot write|cannot be written|must be a |are needed in")
WRITTEN = re.compile(r"written to|cases recorded in|saved      |: written, |exit 0")
#: what stood in our place is not ours to remove
KEPT = ("a folder there", "another user's file")


@pytest.mark.one_in(29)
@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("writer", WRITERS)
def test_an_obstacle(runs, writer, obstacle, withstood):
    options, name, test, conftest = WRITERS[writer]
    module = "pytest_attn" if options.startswith(("merge", "report")) else "pytest"
    with attempts.own_folder() as folder:
        there = folder / "there"
        there.mkdir()
        (folder / "test_it.py").write_text(test)
        (folder / "conftest.py").write_text(conftest)
        if module != "pytest":
            runs.status(runs.start(folder, "--attn-output=run.jsonl"))
        step = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(there / name)} if name == "step.md" else {}
        with OBSTACLES[obstacle](there, name):
            status = runs.status(runs.start(folder, *options.split(), is_ordinary=True, module=module, **step))
            left = attempts.left_in(folder), attempts.left_by_processes(folder, 1)
            stands = (there / name).exists() or (there / name).is_symlink()
        lines = [line for line in (folder / "output").read_text().splitlines() if "there" in line]
        refused = [line for line in lines if REFUSED.search(line)]
        assert not re.search("INTERNALERROR|Traceback|Error>", (folder / "output").read_text())
        assert [name for name in left[0] if ".recorded-" not in name] + left[1] == []
        assert stands or refused
        if refused:
            assert status in (1, 2, 4) or step, refused
        else:
            assert status == (1 if test == WRONG else 0)
            assert (there / name).exists()
        assert obstacle not in KEPT or refused, lines
        assert obstacle not in KEPT or (there / name).exists()
    withstood("in the way", obstacle, writer, "one line says so" if refused else "written")


#: two sessions at once, each with 40 cases of its own: in one file, or of two devices in one folder
SESSION = """
import sys
from dataclasses import replace
from pathlib import Path
from pytest_attn.latency.baseline_file import BaselineFile, Identity, read
name, device, start = sys.argv[1], sys.argv[2], Path("start")
case = next(iter(read(Path("one.json")).cases.values()))
print("ready", flush=True)
sys.stdin.readline()
file = BaselineFile(Path("kept", f"{device}.json"), Identity("cpu", device, 2), read(Path("one.json")).anchors)
for number in range(40):
    file.write({f"case {number} of {name}": case})
"""


@pytest.mark.slow("two processes import torch")
@pytest.mark.parametrize("devices", [("one", "one"), ("one", "other")], ids=["one file", "one folder, two devices"])
def test_two_sessions_at_once(runs, devices, withstood):
    with attempts.own_folder() as folder:
        (folder / "test_it.py").write_text(KERNEL)
        (folder / "conftest.py").write_text(CLOCK)
        runs.status(runs.start(folder, "--attn-update-baselines=why"))
        (made,) = (folder / "baselines").iterdir()
        made.rename(folder / "one.json")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        both = [
            subprocess.Popen([sys.executable, "-c", SESSION, name, device], cwd=folder, **pipes)
            for name, device in zip("ab", devices, strict=True)
        ]
        for one in both:
            assert one.stdout.readline() == "ready\n"
        for one in both:
            one.stdin.write("go\n")
            one.stdin.flush()
        assert [(one.communicate(), one.returncode)[1] for one in both] == [0, 0]
        kept = [key for path in (folder / "kept").iterdir() for key in read(path).cases]
        assert len(kept) == 80
        assert attempts.left_in(folder) == []
    where = "one file" if devices[0] == devices[1] else "one folder, two devices"
    withstood("at once", "two sessions write 40 cases each", where, "all kept")


@pytest.mark.slow("two sessions record")
def test_two_whole_sessions_record_at_once(runs, withstood):
    with attempts.own_folder() as folder:
        (folder / "conftest.py").write_text(CLOCK)
        for name in "ab":
            (folder / f"test_{name}.py").write_text(KERNEL)
        both = [
            runs.start(folder, f"test_{name}.py", "--attn-update-baselines=why", TMPDIR=str(folder / "tmp")) for name in "ab"
        ]
        assert [runs.status(one) for one in both] == [0, 0], (folder / "output").read_text()
        (path,) = (folder / "baselines").iterdir()
        assert len(read(path).cases) == 2
        assert (attempts.left_in(folder), attempts.left_by_processes(folder, 1)) == ([], [])
    withstood("at once", "two whole sessions record", "one file", "all kept")
