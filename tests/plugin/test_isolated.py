"""Invariants that may end CUDA are asked in a process of their own; here on a CPU, which is told to be such a device."""

from fnmatch import fnmatch

from left_out import one_in

CONFTEST = """
from pytest_attn.cases import case

case._ISOLATED_ON = frozenset(("cuda", "cpu"))
"""
HEAD = """
import ctypes, os, signal
import pytest
from pytest_attn import Workload
from pytest_attn.processes.worker import Worker
from torch.nn.functional import scaled_dot_product_attention as sdpa
"""
TEST = """
def {name}(q, k, v):
    if q.data_ptr() % 16:
        {fault}
    return sdpa(q, k, v)

@pytest.mark.attention(Workload(40, heads=2, head_dim=32), device="cpu")
def test_{name}(attn):
    {before}
    attn.check_invariants({name}, only=("rerun", "layout", "alignment"))
"""
HERE = "Worker.of_this_process() is None"
ENDED = "*the process of its own ended while it ran: *"
#: kernel -> what an unaligned tensor leads to, what its test does before, and what the failure says, "" where it passes
KERNELS = {
    "is_killed": ("os.kill(os.getpid(), signal.SIGSEGV)", "pass", ENDED),
    "honest": ("pass", "pass", ""),
    "raises": (
        "raise RuntimeError('CUDA error: an illegal instruction was encountered')",
        "pass",
        "*aligned to 16 bytes: the kernel raised RuntimeError: CUDA error*",
    ),
    "comes_not_so_far": ("pass", f"assert {HERE}", ""),
    "leaves": ("ctypes.CDLL(None)._exit(0)", "pass", ENDED),
    "leaves_before": ("pass", f"{HERE} or ctypes.CDLL(None)._exit(0)", "*in a process of its own: it left the interpreter *"),
    "skips": (f"{HERE} or pytest.skip('no memory')", "pass", "*skips *: a kernel cannot end, skip or excuse its test"),
    "exits": (f"{HERE} or os._exit(0)", "pass", "*exits *: a kernel cannot end, skip or excuse its test"),
    "finds_no_memory": ("raise RuntimeError('CUDA out of memory. Tried to allocate')", "pass", ""),
}


def test_each_kernel_is_judged_by_itself_and_the_run_goes_on(pytester):
    pytester.makeconftest(CONFTEST)
    kernels = {name: KERNELS[name] for name in one_in(3, KERNELS)}
    tests = [TEST.format(name=name, fault=fault, before=before) for name, (fault, before, _) in kernels.items()]
    pytester.makepyfile(test_mine="".join((HEAD, *tests)))
    result = pytester.runpytest("-p", "no:cacheprovider", "--attn-thorough", "--attn-output=records.jsonl")
    wrong = [name for name, (_, _, said) in kernels.items() if said]
    result.assert_outcomes(passed=len(kernels) - len(wrong), failed=len(wrong))
    printed = str(result.stdout).split("\n_____")
    for name in wrong:
        (failure,) = (part for part in printed if f" test_{name}[" in part.partition("\n")[0])
        assert f"1 invariant broken by {name}" in failure
        assert any(fnmatch(line, f"E * alignment {KERNELS[name][2]}") for line in failure.splitlines()), failure
    told = (pytester.path / "records.jsonl").read_text().splitlines()
    (record,) = (line for line in told if '"subject":"comes_not_so_far"' in line)
    assert "alignment: not run in a process of its own: " in record
