"""Every selected backend, forward and backward, against exact attention.

Without --attn-workloads a CPU chooses from the groups smoke, edges and features, a GPU from the whole catalog.
"""

import pytest

from pytest_attn import AttentionCase, Backend

INPUTS = ("structured", "flat", "outlier")


@pytest.mark.attention(inputs=INPUTS, covering=2)
def test_forward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output, computed as in inference."""
    attn.check(attn_backend)


@pytest.mark.attention(inputs=INPUTS, backward=True, covering=2)
def test_backward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output and the gradients of q, k and v, computed as in training."""
    attn.check(attn_backend)
