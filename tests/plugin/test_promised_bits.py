"""The argument bitwise of the marker attention, as a user sees it."""

import pytest

ONCE = pytest.mark.parametrize("run", ["serial"], indirect=True)
KERNELS = """
import os
import pytest
import torch
from pytest_attn import Workload

W = Workload(20, heads=2, head_dim=32, mask="causal-bottom-right", dtype="float16")


def attention(q, k, v, tile=8):
    q, k, v, dtype = q.float(), k.float(), v.float(), q.dtype
    out, before = torch.empty_like(q), k.shape[2] - q.shape[2]
    for b in range(len(q)):
        for row in range(q.shape[2]):
            keys, values = (t[b, :, : before + row + 1].contiguous() for t in (k, v))
            weights = (q[b, :, row : row + 1] @ keys.mT * q.shape[-1] ** -0.5).softmax(-1)
            parts = zip(weights.split(tile, -1), values.split(tile, -2))
            out[b, :, row] = sum(one @ two for one, two in parts)[:, 0]
    return out.to(dtype)
"""


@ONCE
def test_what_is_promised_is_required_and_the_rest_is_shown(run, pytester):
    pytester.makepyfile(f"""{KERNELS}
@pytest.mark.attention(W, device="cpu", bitwise=["batch", "rerun"])
def test_decodes_otherwise(attn):
    attn.check_invariants(lambda q, k, v: attention(q, k, v, 3 if q.shape[2] == 1 else 8), name="two paths")

@pytest.mark.attention(W, device="cpu", bitwise="decode")
def test_breaks(attn):
    attn.check_invariants(lambda q, k, v: attention(q, k, v, 3 if q.shape[2] == 1 else 8), only="bits-decode")
""")
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.re_match_lines(
        [
            r"E +bits-decode +changes its bits: equal up to kv_len \d+, not at kv_len \d+: out\[.*; .* apart; both are right",
            r"not promised +batch +chunks +decode +prefix +rerun +process",
            r"two paths +- +not at chunk 1 \(1 of 1\) +not at kv_len \d+ \(1 of 1\) +kept \(1\) +- +-",
        ],
        consecutive=False,
    )


@ONCE
def test_what_is_not_promised_may_be_refused_by_an_error(run, pytester):
    pytester.makepyfile(f"""{KERNELS}
def of_its_shape(q, k, v):
    if q.shape != (1, 2, 20, 32):
        raise ValueError("another shape")
    return attention(q, k, v)

@pytest.mark.attention(W, device="cpu", bitwise="rerun")
@pytest.mark.parametrize("only", ["bits-rerun", "seen-batch"])
def test_it(attn, only):
    attn.check_invariants(of_its_shape, only=only)
""")
    result = run("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["*seen-batch in other batches and lengths, for batch 2: the kernel raised ValueError: another shape*"]
    )


@ONCE
def test_a_promise_that_is_not_judged_is_said(run, pytester):
    pytester.makepyfile(f"""{KERNELS}
@pytest.mark.attention(W.replace(mask="causal"), device="cpu", bitwise=("decode", "rerun"))
def test_it(attn):
    attn.check_invariants(attention, only=("bits-decode", "bits-rerun"))
""")
    result = run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["not judged    bits-decode of attention* on *: needs a mask that is causal *"])


@ONCE
@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("bitwise='batches'", "bitwise must be names of promises, got 'batches'; known: batch, chunks, decode, prefix, rerun"),
        ("bitwise=3", "bitwise must be names of promises, got 3"),
        ("bitwise=[['batch']]", "bitwise must be names of promises, got [['batch']]"),
        ("bitwise='batch', ranks=2", "bitwise and ranks are of two kinds of tests; leave one out"),
    ],
)
def test_what_cannot_be_promised_is_refused_in_one_line(run, pytester, marker, said):
    pytester.makepyfile(f"""{KERNELS}
@pytest.mark.attention(W, {marker})
def test_it(attn):
    attn.check_invariants(attention)
""")
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*{said.replace('[', '[[]')}*"])


@ONCE
@pytest.mark.slow("starts five processes")
def test_new_processes_are_compared_with_this_one(run, pytester):
    """Of two configurations each process draws one; here the last one draws another."""
    pytester.makepyfile(f"""{KERNELS}
from pathlib import Path

before = Path("begun").read_text() if Path("begun").exists() else ""
Path("begun").write_text(before + "+")
TILE = 3 if len(before) == 3 else 8

@pytest.mark.attention(W, device="cpu", bitwise="process")
@pytest.mark.parametrize("tile", [TILE, 5], ids=["tuned", "fixed"])
def test_it(attn, tile):
    attn.check_invariants(lambda q, k, v: attention(q, k, v, tile), only="bits-process", name="mine")
""")
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.re_match_lines(
        [r"E +bits-process +changes its bits: equal up to process 3, not at process 4: out\[.*; both are right"]
    )
