"""The operator against exact attention, forward and backward, and against what holds of every attention kernel."""

import pytest
from example_torch_extension import attention

from pytest_attn import Workload

PLAIN = Workload(48, heads=2, head_dim=32)
CAUSAL = PLAIN.replace(mask="causal")


@pytest.mark.attention(PLAIN, CAUSAL, backward=True)
def test_right(attn):
    causal = attn.workload.mask is not None
    attn.check(lambda q, k, v: attention(q, k, v, causal)[0], name="example::attention")


@pytest.mark.attention(PLAIN, backward=True)
def test_invariants(attn):
    attn.check_invariants(lambda q, k, v: attention(q, k, v, False)[0], name="example::attention")
