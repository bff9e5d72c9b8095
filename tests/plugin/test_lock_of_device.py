"""A device's lock that is no file of ours: nothing is timed, which is said, and nobody's kernel is blamed."""

import os
import tempfile
from pathlib import Path

import pytest

from pytest_attn.reports.records import read_records

LOCK = "pytest-attn-cpu.lock"


@pytest.fixture(params=["folder", "link to itself", "unreadable"])
def no_lock(request, project):
    path = Path(tempfile.gettempdir()) / LOCK
    path.unlink(missing_ok=True)
    if request.param == "folder":
        path.mkdir()
    elif request.param == "link to itself":
        path.symlink_to(LOCK)
    else:
        path.write_text("")
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may open every file")
    return path


def test_a_lock_that_cannot_be_opened_is_the_reason_and_not_the_kernel(recorded, no_lock, pytester):
    result = recorded("-rs", "--attn-output=run.jsonl")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"*not timed: *{LOCK} cannot be locked*remove it, or set TMPDIR*the check of mine passed*"])
    assert [one["verdict"] for one in read_records(pytester.path / "run.jsonl")] == ["passed", "untimed"]
    recorded("--attn-latency=require").assert_outcomes(failed=1)


def test_nothing_is_recorded_without_the_lock(project, no_lock, pytester):
    result = project("--attn-update-baselines=why")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"untimed *{LOCK} cannot be locked*"])
    assert not (pytester.path / "baselines").exists()
