"""What --attn-output names is written however a run ends, or the run does not end with 0."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from pytest_attn.reports.records import read_records

TEST = """
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa
@pytest.mark.attention("smoke-full")
def test_right(attn): attn.check(sdpa)
"""
QUIET = ("-p", "no:cacheprovider")


def closing(path):
    return json.loads(path.read_text().splitlines()[-1])["run"]


def test_without_a_terminal(pytester):
    pytester.makepyfile(TEST)
    done = pytester.runpytest_inprocess(
        *("-p", "no:terminal", "--attn-output=run.md", "--attn-output=run.jsonl", "--attn-output=run.support.md", *QUIET)
    )
    assert done.ret == 0
    assert "1 right" in (pytester.path / "run.md").read_text()
    assert (pytester.path / "run.support.md").exists()
    assert closing(pytester.path / "run.jsonl")["records"] == 1


@pytest.mark.parametrize("options", [(), ("-p", "no:terminal")])
@pytest.mark.parametrize("name", ["run.md", "run.jsonl", "run.support.md"])
def test_one_that_cannot_be_written(pytester, name, options):
    filling = f"""
import os
def test_fills():
    if os.path.exists({name!r}): os.remove({name!r})
    os.symlink("/dev/full", {name!r})
"""
    pytester.makepyfile(TEST + filling)
    done = pytester.runpytest_inprocess(f"--attn-output={name}", *options, *QUIET)
    said = [line for line in (*done.outlines, *done.errlines) if "--attn-output: cannot write " in line and name in line]
    assert (done.ret, len(said)) == (1, 1)


SLOW_END = """
import os, time
import pytest
@pytest.hookimpl(trylast=True)
def pytest_terminal_summary():
    open("ending", "w").close()
    time.sleep(30)
"""


def test_an_interrupt_while_the_run_is_finishing(pytester):
    pytester.makepyfile(TEST)
    pytester.makeconftest(SLOW_END)
    command = [sys.executable, "-m", "pytest", "--attn-output=run.jsonl", *QUIET]
    run = subprocess.Popen(
        command,
        cwd=pytester.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # which what runs in the background ignores
    )
    while run.poll() is None and not (pytester.path / "ending").exists():
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert (run.returncode, "Traceback" in said) == (pytest.ExitCode.INTERRUPTED, False)
    assert closing(pytester.path / "run.jsonl")["exit"] == pytest.ExitCode.INTERRUPTED
    assert len(read_records(pytester.path / "run.jsonl")) == 1


@pytest.mark.parametrize("kernel", ["raise RuntimeError('no')", "import time; time.sleep(30)"])
def test_a_record_says_what_was_asked(pytester, kernel):
    test = TEST.replace("attn.check(sdpa)", f"\n    def mine(q, k, v): {kernel}\n    attn.check_invariants(mine)")
    pytester.makepyfile(test)
    pytester.runpytest_inprocess("--attn-output=run.jsonl", "--attn-timeout=0.5", *QUIET)
    (record,) = read_records(pytester.path / "run.jsonl")
    assert (record["question"], record["verdict"] in ("raised", "no result")) == ("invariants", True)
