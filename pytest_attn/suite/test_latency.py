"""Every selected backend, forward and backward: right, and as fast as recorded for this machine."""

import pytest

from pytest_attn import AttentionCase, Backend

pytestmark = pytest.mark.attention_requires(timed=True)

WORKLOADS = ("flux", "vit", "llama3-8b", "edges-s129", "edges-s257", "edges-gqa5", "smoke-full", "smoke-causal-gqa")
#: floating-point operations of the forward pass above which a CPU takes seconds for each call
_TOO_LONG_FOR_A_CPU = 1e9


@pytest.mark.attention(*WORKLOADS)
def test_forward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The forward pass, as in inference."""
    skip_long_ones(attn)
    attn.measure(attn_backend)


@pytest.mark.attention(*WORKLOADS, backward=True)
def test_backward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The backward pass alone."""
    skip_long_ones(attn)
    attn.measure(attn_backend, backward=True)


def skip_long_ones(attn: AttentionCase) -> None:
    """On a CPU, time the small workloads only."""
    if attn.device.type == "cpu" and attn.workload.flops() > _TOO_LONG_FOR_A_CPU:
        pytest.skip("too long to be timed on a CPU")
