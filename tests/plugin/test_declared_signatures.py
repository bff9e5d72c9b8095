"""Marker arguments that say what a kernel takes and returns, through everything that a run does with it."""

import pytest

import pytest_attn

KERNEL = """
import math
import torch

def attention(q, k, v, out, space):
    '''(rows, heads, d) in and out, which it writes; returns lse as (rows, heads) in base 2, and the weights.'''
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    assert space.isnan().all()
    torch.matmul(q.float(), k.float().mT / math.sqrt(q.shape[-1]), out=space)
    hidden = torch.ones(space.shape[-2:], dtype=torch.bool).triu(1)
    space.masked_fill_(hidden, -math.inf)
    lse = space.logsumexp(-1)
    weights = (space - lse[..., None]).exp()
    out.copy_((weights @ v.float()).transpose(0, 1) FAULT)
    return lse.T / math.log(2), weights
"""
TEST = """
import pytest, torch
from kernels import attention
from pytest_attn import Workload

@pytest.mark.attention(
    Workload(36, heads=2, head_dim=16, mask="causal"), layout="shd", returns=("lse", "weights"),
    lse_base=2, lse_layout="sh", takes_out=True, device="cpu",
)
def test_it(attn):
    w = attn.workload

    def kernel(q, k, v, out):
        return attention(q, k, v, out, attn.workspace((w.heads, q.shape[0], k.shape[0]), torch.float32))

    assert attn.q.shape == (36, 2, 16) or w.q_len != 36
    out = torch.empty_like(attn.v)
    lse, _ = kernel(attn.q, attn.k, attn.v, out)
    attn.assert_close(out)
    assert lse.shape == attn.reference.lse.shape
    torch.testing.assert_close(lse.double(), attn.reference.lse, atol=1e-4, rtol=1e-4)
    attn.check(kernel)
    attn.check_invariants(kernel)
    attn.measure(kernel)
"""


def run(pytester, *arguments, fault="", test=TEST):
    pytester.makepyfile(kernels=KERNEL.replace("FAULT", fault), test_it=test)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def test_a_signature_through_a_whole_run(pytester):
    result = run(pytester, "--attn-fuzz=2", "--attn-latency=off")
    result.assert_outcomes(passed=1, skipped=1)  # the case ends with a time that is not taken, its draws do not
    result.stdout.fnmatch_lines(["3 right, 1 with all invariants*"])


def test_a_failure_is_saved_and_judged_again(pytester):
    test = TEST.replace("    attn.assert_close(out)\n", "")
    run(pytester, "--attn-save-failures=out", fault="* 1.5", test=test).assert_outcomes(failed=1)
    (folder,) = (pytester.path / "out").iterdir()
    saved = pytest_attn.load_failure(folder)

    def kernel_of(factor):
        def kernel(q, k, v, out):
            q, k, v = (t.transpose(0, 1).float() for t in (q, k, v))
            scores = q @ k.mT / 4
            scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), -float("inf"))
            out.copy_((scores.softmax(-1) @ v).transpose(0, 1) * factor)
            return scores.logsumexp(-1).T / 0.6931471805599453, scores.softmax(-1)

        return kernel

    assert {row.name for row in saved.check(kernel_of(1)).tensors} == {"out", "lse", "weights"}
    with pytest.raises(AssertionError, match="mismatch: out of"):
        saved.check(kernel_of(1.5))
