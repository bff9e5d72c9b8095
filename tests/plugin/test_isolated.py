"""Invariants that may end CUDA are asked in a process of their own; here on a CPU, which is told to be such a device."""

import pytest

CONFTEST = """
from pytest_attn.cases import case

case._ISOLATED_ON = frozenset(("cuda", "cpu"))
"""
TEST = """
import ctypes, os, signal
import pytest
from pytest_attn import Workload
from pytest_attn.processes.worker import Worker
from torch.nn.functional import scaled_dot_product_attention as sdpa

def mine(q, k, v):
    if q.data_ptr() % 16:
        {fault}
    return sdpa(q, k, v)

@pytest.mark.attention(Workload(40, heads=2, head_dim=32), device="cpu")
def test_mine(attn):
    {before}
    attn.check_invariants(mine, only=("rerun", "layout", "alignment"))
"""


@pytest.fixture
def run(pytester):
    """Return a function that runs a story in which an unaligned tensor leads to a fault."""

    def with_fault(fault="pass", before="pass"):
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_mine=TEST.format(fault=fault, before=before))
        return pytester.runpytest("-rs", "-p", "no:cacheprovider", "--attn-thorough", "--attn-output=records.jsonl")

    return with_fault


@pytest.mark.slow
def test_an_honest_kernel_keeps_them(run):
    run().assert_outcomes(passed=1)


def test_what_it_raises_there_is_named_with_its_arrangement(run):
    result = run("raise RuntimeError('CUDA error: an illegal instruction was encountered')")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*1 invariant broken by mine*", "E * alignment *aligned to 16 bytes: the kernel raised RuntimeError: CUDA error*"]
    )


@pytest.mark.parametrize(
    "fault",
    [pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", marks=pytest.mark.slow), "ctypes.CDLL(None)._exit(0)"],
)
def test_a_kernel_that_ends_its_process_is_broken_and_the_run_goes_on(run, fault):
    result = run(fault)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*1 invariant broken by mine*", "E * alignment *the process of its own ended while it ran: *"]
    )


@pytest.mark.slow
def test_a_test_that_does_not_come_so_far_there_breaks_nothing(run, pytester):
    run(before="assert Worker.of_this_process() is None").assert_outcomes(passed=1)
    told = (pytester.path / "records.jsonl").read_text()
    assert "alignment: not run in a process of its own: " in told


def test_what_leaves_that_process_before_an_invariant_begins_excuses_none(run):
    result = run(before="Worker.of_this_process() is None or ctypes.CDLL(None)._exit(0)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * alignment *not run in a process of its own: it left the interpreter *"])


@pytest.mark.parametrize("fault", ["pytest.skip('no memory')", "os._exit(0)"])
def test_what_would_end_its_test_is_a_fault_there_too(run, fault):
    result = run(f"Worker.of_this_process() is None or {fault}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * alignment *mine *: a kernel cannot end, skip or excuse its test"])


def test_what_finds_too_little_memory_there_breaks_nothing(run):
    run("raise RuntimeError('CUDA out of memory. Tried to allocate')").assert_outcomes(passed=1)
