"""Temporary folders of processes: none is left by one that ends, and what a killed one leaves goes with the next one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_attn.reports import files
from pytest_attn.reports.files import ProcessFolder, remove_left

HOLDS = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup would have it ignore
from pytest_attn.reports.files import ProcessFolder
folder = ProcessFolder("", sys.argv[1])
open(folder.name + "/data", "w").write("mine")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_folder_stays_while_its_process_lives_and_goes_when_it_was_killed(tmp_path, holder, ending):
    (folder,) = tmp_path.iterdir()
    remove_left(tmp_path)
    assert (folder / "data").read_text() == "mine"
    holder.send_signal(ending)
    holder.wait()
    assert folder.exists()
    with ProcessFolder("", str(tmp_path)) as own:
        assert [str(path) for path in tmp_path.iterdir()] == [own]
    assert not [*tmp_path.iterdir()]


def test_only_folders_that_are_ours_go(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for path in (elsewhere, tmp_path / ".pytest-attn-with-data", tmp_path / "another-tool"):
        path.mkdir()
        (path / "data").write_text("")
    for path in (elsewhere, tmp_path / "another-tool"):
        (path / ".held").write_text("")
    (tmp_path / ".pytest-attn-link").symlink_to(elsewhere)
    (tmp_path / "pytest-attn-cpu.lock").write_text("")
    before = sorted(tmp_path.rglob("*"))
    remove_left(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("names", [(), (".held",), (".held", "data")])
def test_wherever_its_process_is_killed_it_goes(tmp_path, names):
    left = tmp_path / ".pytest-attn-12345678"
    left.mkdir()
    for name in names:
        (left / name).write_text("")
    remove_left(tmp_path)
    assert not left.exists()


def test_one_that_another_process_takes_for_left_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    hold, taken = files._hold, []

    def first_removed(path):
        if not taken:
            taken.append(path)
            remove_left(tmp_path)
        return hold(path)

    monkeypatch.setattr(files, "_hold", first_removed)
    with ProcessFolder("", str(tmp_path)) as own:
        assert [str(path) for path in tmp_path.iterdir()] == [own]
    assert own not in map(str, taken)


def test_a_disk_that_has_no_locks(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *of: (_ for _ in ()).throw(OSError("no locks available")))
    with ProcessFolder("", str(tmp_path)) as own:
        remove_left(tmp_path)
        assert [str(path) for path in tmp_path.iterdir()] == [own]
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_done_leaves_no_descriptor(tmp_path):
    before = os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else []
    for _ in range(3):
        with ProcessFolder("", str(tmp_path)):
            pass
    assert len(os.listdir("/proc/self/fd") if before else []) == len(before)
