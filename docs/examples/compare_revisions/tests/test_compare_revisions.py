"""Right, and as fast as before: the workflow times the revision before a change and the one after it, in one job."""

import pytest
from example_compare_revisions import attention

from pytest_attn import Workload


@pytest.mark.attention(Workload(512, heads=4, name="prefill"), Workload(1, 512, heads=4, name="decode"))
def test_not_slower(attn):
    attn.measure(attention)
