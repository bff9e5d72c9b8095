"""A line every 30 seconds of what takes long: the case, its phases, for how long."""

import os
import re
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from pytest_attn.session import progress as module
from pytest_attn.session.progress import Progress

SLOW = """
import time
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa

def slow(q, k, v):
    time.sleep(0.05)
    return sdpa(q, k, v)

@pytest.mark.attention("smoke-full")
def test_it(attn):
    attn.check(slow)
"""
HASTY = """
from pytest_attn.session import progress
progress.TICK = 0.02
"""


def config_of(verbose=0, **facts):
    return SimpleNamespace(option=SimpleNamespace(verbose=verbose), add_cleanup=lambda clean: None, **facts)


@pytest.fixture
def now(monkeypatch):
    """The seconds of the clock, as a list of one; outside of a test."""
    seconds = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(module, "os", SimpleNamespace(environ={}, dup=os.dup, close=os.close))
    return seconds


@pytest.fixture
def progress(now):
    made = Progress(config_of())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("worker", "arguments"),
    [("", ["-p", "no:xdist"]), pytest.param("gw0 ", ["-n", "1"], marks=pytest.mark.slow("starts processes"))],
)
def test_a_slow_kernel_is_named_with_its_case_and_seconds(pytester, capfd, monkeypatch, worker, arguments):
    pytester.makepyfile(SLOW)
    pytester.makeconftest(HASTY)
    monkeypatch.setattr(module, "TICK", module.TICK)
    start = pytester.runpytest_subprocess if worker else pytester.runpytest_inprocess
    start("-p", "no:cacheprovider", *arguments).assert_outcomes(passed=1)
    said = rf"^attn: {worker}\S+::test_it\[smoke-full\]: checking slow on smoke-full, 0:00$"
    assert re.search(said, capfd.readouterr().err, re.MULTILINE)


def test_phases_are_said_from_the_outermost_on_and_for_how_long(progress, now):
    assert progress.words(now[0]) == ""
    with progress.during("timing sdpa", "tiny"):
        now[0] += 65
        with progress.during("", "what is not worth a word"), progress.during("diagnosing out", "tiny", 60.0):
            now[0] += 2
            assert progress.words(now[0]) == "timing sdpa on tiny, 1:07, diagnosing out on tiny, 0:02 of at most 1:00"
        assert progress.words(now[0]) == "timing sdpa on tiny, 1:07"
    assert progress.words(now[0]) == ""


def test_what_is_counted_is_said_with_its_number_and_what_was_disturbed_apart(progress, now):
    with progress.counting("new process", 3, 2) as count:
        said = []
        for done in range(5):
            count(done)
            now[0] += 10
            said.append(progress.words(now[0]))
    disturbed = "of up to 2 more, as some were disturbed"
    assert said == [
        *(f"new process {number} of 3, 0:{number}0" for number in (1, 2, 3)),
        f"new process 1 {disturbed}, 0:40",
        f"new process 2 {disturbed}, 0:50",
    ]


def test_the_case_and_the_worker_are_named(progress, now):
    module.os.environ["PYTEST_CURRENT_TEST"] = "a.py::test_it[a (b)] (call)"
    other = Progress(config_of(workerinput={"workerid": "gw3"}))
    with other.during("checking", ""), progress.during("checking", ""):
        now[0] += 10
        assert progress.words(now[0]) == "a.py::test_it[a (b)]: checking, 0:10"
        assert other.words(now[0]) == "gw3 a.py::test_it[a (b)]: checking, 0:10"
    other.close()


def test_waiting_for_another_process_is_said_sooner(capfd, monkeypatch):
    monkeypatch.setattr(module, "SOON", 0.01)
    progress = Progress(config_of())
    with progress.during("checking", "tiny"), progress.during("waiting until another process has timed", "cpu", 600.0, True):
        time.sleep(0.1)
    progress.close()
    said = r"\nattn: .*checking on tiny, 0:00, waiting until another process has timed on cpu, 0:00 of at most 10:00\n"
    assert re.fullmatch(said, capfd.readouterr().err)


@pytest.mark.parametrize(("verbose", "is_child"), [(-1, False), (0, True)])
def test_nothing_is_written_that_nobody_reads(monkeypatch, verbose, is_child):
    monkeypatch.setattr(os, "dup", lambda descriptor: pytest.fail("it has taken stderr"))
    Progress(config_of(verbose), is_child).close()


def test_what_compiles_is_diagnosed_and_asked_is_named(pytester, monkeypatch):
    told = []

    @contextmanager
    def during(self, doing, on, within=0.0, is_waiting=False):
        told.append((doing, on, within))
        yield

    @contextmanager
    def counting(self, doing, total, more=0):
        yield lambda number: told.append((doing, number, total))

    monkeypatch.setattr(Progress, "during", during)
    monkeypatch.setattr(Progress, "counting", counting)
    pytester.makepyfile("""
        import pytest, torch
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        @pytest.mark.attention("smoke-full", device="cpu")
        def test_it(attn):
            fn = torch.compile(sdpa, backend="eager")
            attn.check(fn, name="mine")
            attn.check_invariants(sdpa, only=["rerun", "poison"], name="asked")
            attn.check(lambda q, k, v: 1.1 * sdpa(q, k, v), name="wrong")
        """)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-diagnosis-timeout=7").assert_outcomes(failed=1)
    said = [one for one in told if one[0]]
    assert said == [
        ("checking mine", "smoke-full", 0.0),
        ("compiling mine", "smoke-full", 0.0),
        ("trying the invariants of asked", "smoke-full", 0.0),
        ("trying the invariants of asked on smoke-full:", 0, 2),
        ("trying the invariants of asked on smoke-full:", 1, 2),
        ("checking wrong", "smoke-full", 0.0),
        ("diagnosing wrong", "smoke-full", 7.0),
    ]


def test_no_thread_outlives_what_it_watches(progress):
    before = threading.active_count()
    with progress.during("checking", "tiny"), progress.during("compiling", "tiny"):
        assert threading.active_count() == before + 1
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
