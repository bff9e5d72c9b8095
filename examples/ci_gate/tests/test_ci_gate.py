"""Right, and not slower than the committed baseline of the machine that runs the gate."""

import pytest
from example_ci_gate import attention

from pytest_attn import Workload


@pytest.mark.attention(Workload(512, heads=4, name="prefill"), Workload(1, 512, heads=4, name="decode"))
def test_still_fast(attn):
    attn.measure(attention)
