"""Tests with ranks in real processes over gloo: what is right passes, what fails ends with its message, the next case runs."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_attn.guests.ranks.pool import Pool
from pytest_attn.processes.launcher import Process

TESTS = Path(__file__).parent.parent
KERNELS = """
import os, signal
import pytest, torch
import torch.distributed as dist
from exchanges import GlooExchange
from rings import AllGather, Problem, Ring, Ulysses
from pytest_attn import Workload
from pytest_attn.guests.ranks.sharding import Sharding

W = Workload(34, heads=4, kv_heads=2, head_dim=32, mask="causal")

def kernel(attn, cls, fault=""):
    problem = Problem.of(Sharding(attn.workload, "head-tail", attn.ranks))
    return lambda q, k, v: cls(GlooExchange(attn.rank, attn.ranks, attn.group), problem, fault)(q, k, v)
"""
ENDS = """
@pytest.fixture(params=[Ring, Ulysses], ids=["ring", "ulysses"])
def cls(request):
    return request.param

@pytest.mark.attention(W, ranks=2, shard="head-tail", backward=True)
def test_honest(attn, cls):
    comparison = attn.check(kernel(attn, cls))
    assert comparison.passed
    assert attn.rank in (0, 1) and attn.ranks == 2
    if attn.group is not None:  # on a rank
        assert attn.q.shape == (1, 4, 17, 32) and attn.mask.shape == (1, 1, 17, 34)
        assert attn.mesh.size() == 2 and len(attn.shards[attn.rank]) == 17
        with pytest.raises(ValueError, match="a rank has no attn.reference"):
            attn.reference

@pytest.mark.attention(W, ranks=2)
def test_raises(attn):
    def fn(q, k, v):
        if attn.rank == 1:
            raise ValueError("\\nno such head")
        dist.all_reduce(torch.ones(1), group=attn.group)
        return q
    attn.check(fn)

@pytest.mark.attention(W, ranks=2)
def test_skips(attn):
    attn.check(lambda q, k, v: pytest.skip("not on ranks"))

@pytest.mark.attention(W, ranks=2)
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_declines(attn, ranks):
    def fn(q, k, v):
        if attn.rank in ranks:
            raise NotImplementedError("no grouped heads")
        return q
    attn.check(fn)

@pytest.mark.attention(W, ranks=2)
def test_killed(attn):
    def fn(q, k, v):
        if attn.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1), group=attn.group)
        return q
    attn.check(fn)

@pytest.mark.attention(W, ranks=2)
def test_deadlock(attn):
    def fn(q, k, v):
        if attn.rank == 1:
            dist.recv(torch.ones(1), 0, group=attn.group)
        dist.all_reduce(torch.ones(1), group=attn.group)
        return q
    attn.check(fn)

@pytest.mark.attention(W, ranks=2, shard="head-tail")
def test_wrong(attn):
    attn.check(kernel(attn, Ring, "rank 1 never receives"))

@pytest.mark.attention(W, ranks=2, shard="head-tail")
def test_ends_early(attn):
    if attn.rank == 1:
        raise KeyError("before the check")
    attn.check(kernel(attn, Ring))

@pytest.mark.attention(W, ranks=2)
def test_leaves(attn):
    if attn.rank == 1:
        pytest.exit("enough", returncode=7)
    attn.check(lambda q, k, v: q)

@pytest.mark.attention(W, W.replace(q_len=66, kv_len=66), ranks=2, shard="head-tail")
def test_after_all_this(attn):
    attn.check(kernel(attn, AllGather))
    attn.check_invariants(kernel(attn, AllGather), only="rerun")
    if attn.rank == 1:
        raise KeyError("after the check")
"""


@pytest.fixture(autouse=True)
def _kernels_are_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))


#: what those say that end without being waited for
SAID_SOON = (
    "*rank 1 of 2 raised ValueError: no such head*",
    "*rank 1 of 2 raised NotImplementedError: no grouped heads*",
    "*rank 1 was killed by SIGKILL while the case ran*",
    "*after the check*",
)


def test_a_rank_that_raises_or_is_killed_has_its_message_and_the_next_case_runs(pytester):
    pytester.makepyfile(test_it=KERNELS + ENDS)
    result = pytester.runpytest("-k", "killed or (after_all and s34)")
    result.assert_outcomes(passed=1, failed=1, errors=1)
    for wanted in SAID_SOON[2:]:
        result.stdout.fnmatch_lines([wanted])


@pytest.mark.slow("starts processes")
def test_each_way_to_end_has_its_message_and_the_next_case_runs(pytester, monkeypatch):
    def seconds(pool):
        """How long ranks are waited for: only a deadlock's end is, and however busy the machine is."""
        is_last = sys._getframe(1).f_locals.get("wanted") == "result"
        return 2.0 if is_last and "test_deadlock" in os.environ["PYTEST_CURRENT_TEST"] else 60.0

    def send_slowly(process, number):
        """As on a busy machine, where one rank may have ended before the next one gets its signal."""
        send(process, number)
        time.sleep(0.3 if number == signal.SIGABRT else 0.0)

    send = Process.send_signal
    monkeypatch.setattr(Process, "send_signal", send_slowly)
    monkeypatch.setattr(Pool, "_seconds", property(seconds, lambda pool, given: None), raising=False)
    pytester.makepyfile(KERNELS + ENDS)
    result = pytester.runpytest("--attn-rank-timeout=60", "-W", "error", "--attn-save-failures=saved")
    result.assert_outcomes(passed=4, failed=8, errors=2, skipped=1)
    for wanted in (
        *SAID_SOON,
        "*rank 0 of 2 raised *EndsTestError: * raised pytest.skip (not on ranks): a kernel cannot end*",
        "*12 cases judged, 1 declined*",
        "*rank 0: waits in all_reduce, its collective *",
        "*the ranks gave no result within 2 s (--attn-rank-timeout):*",
        "no result * fn on * the ranks gave no result within 2 s (--attn-rank-timeout)",
        "no result * fn on * rank 1 was killed by SIGKILL while the case ran",
        "*rank 1: waits in recv from 0, its collective 1*",
        "*ranks      rank 1 (of 2): all 17 rows, 9 to 25",
        "*out of rank 1 is attention to its own keys only*",
        "*saved      saved/*",
        "*rank 1 of 2: its test failed before the judgment was made:*",
        "*before the check*",
        "*rank 1 of 2: its test failed:*",
        "*rank 1 has left the interpreter with exit code 7 while the case ran*",
    ):
        result.stdout.fnmatch_lines([wanted])
    assert _processes_in(pytester.path) == [str(os.getpid())], "a rank or a server is left"


def _processes_in(folder):
    """Return the processes that work in a folder: ranks, and what they have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [path.name] if os.readlink(path / "cwd") == str(folder) and _runs(path.name) else []
    return found


def test_a_backend_or_too_few_rows_needs_no_ranks(pytester):
    pytester.makepyfile("""
        import pytest
        from pytest_attn import Workload
        @pytest.mark.attention(Workload(1, 64, heads=2, head_dim=32), ranks=(2, 4))
        def test_short(attn):
            attn.check(lambda q, k, v: q)
        @pytest.mark.attention(Workload(64, heads=2, head_dim=32), ranks=2)
        def test_backend(attn):
            attn.check("sdpa")
    """)
    result = pytester.runpytest("-rs")
    result.assert_outcomes(skipped=2, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 would have no query row*", "*rank 1 of 4 would have no query row*"])
    result.stdout.fnmatch_lines(["*sdpa computes in one process; with ranks, attn.check takes a callable*"])


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("can_fork", [True, False])
def test_no_rank_outlives_its_judge(pytester, can_fork):
    pytester.makeconftest(f"from pytest_attn.processes.launcher import Launcher\nLauncher.can_fork = {can_fork}\n")
    pytester.makepyfile(
        KERNELS
        + """
@pytest.mark.attention(W, ranks=2)
def test_hangs(attn):
    def fn(q, k, v):
        open(f"pid-{attn.rank}", "w").write(str(os.getpid()))
        dist.recv(torch.ones(1), 1 - attn.rank, group=attn.group)
        return q
    attn.check(fn)
"""
    )
    run = subprocess.Popen([sys.executable, "-m", "pytest", "-q"], cwd=pytester.path, stdout=subprocess.DEVNULL)
    files = [pytester.path / f"pid-{rank}" for rank in (0, 1)]
    end = time.monotonic() + 120
    while not all(file.is_file() and file.read_text() for file in files) and time.monotonic() < end:
        time.sleep(0.1)
    run.kill()
    run.wait()
    end = time.monotonic() + 20
    while (left := _processes_in(pytester.path)) != [str(os.getpid())] and time.monotonic() < end:
        time.sleep(0.1)
    assert left == [str(os.getpid())], "a rank or a server is left"


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
