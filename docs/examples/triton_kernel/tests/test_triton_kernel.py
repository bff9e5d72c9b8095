"""The kernel is right, and not slower than the committed baseline of the machine that runs the gate."""

import pytest
from example_triton_kernel import attention, has_triton

from pytest_attn import Workload

PLAIN = Workload(70, heads=2, head_dim=32, dtype="float16")
CAUSAL = PLAIN.replace(mask="causal")
GROUPED = Workload(64, heads=4, kv_heads=2, head_dim=32, dtype="float16")
PREFILL = Workload(256, heads=2, dtype="float16", mask="causal", name="prefill")


def kernel(attn):
    """Return the kernel for the case's mask, and the name that reports give it: of what really runs."""
    causal = attn.workload.mask is not None
    return lambda q, k, v: attention(q, k, v, causal), "triton" if has_triton(attn.device) else "torch instead of triton"


@pytest.mark.attention(PLAIN, CAUSAL, GROUPED)
def test_right(attn):
    """The kernel declines grouped heads, which makes that case a skip with its words."""
    fn, name = kernel(attn)
    attn.check(fn, name=name)


@pytest.mark.attention(PREFILL)
def test_still_fast(attn):
    """With --attn-latency=off it checks alone: where Triton is interpreted, or a machine is shared."""
    fn, name = kernel(attn)
    attn.measure(fn, name=name)
