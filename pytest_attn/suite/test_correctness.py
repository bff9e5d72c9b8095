"""Every selected backend, forward and backward, against exact attention.

Without --attn-workloads a CPU chooses from the groups smoke, edges and features, a GPU from the whole catalog.
"""

import pytest

from pytest_attn import AttentionCase, Backend

pytestmark = pytest.mark.attention_chosen

INPUTS = ("structured", "flat", "outlier")


@pytest.mark.attention(inputs=INPUTS)
def test_forward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output, computed as in inference; what compiles, but for few cases, with the kernel for training."""
    attn.check(attn_backend)


@pytest.mark.attention(inputs=INPUTS, backward=True)
def test_backward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output and the gradients of q, k and v, computed as in training."""
    attn.check(attn_backend)
