"""Every selected backend, forward and backward, against what holds for every right kernel, with no tolerance of its own."""

import pytest

from pytest_attn import AttentionCase, Backend

WORKLOADS = ("smoke", "edges", "features")
#: floating-point operations of the forward pass above which some twenty calls take a CPU too long
_TOO_LONG_FOR_A_CPU = 1e7


@pytest.mark.attention(*WORKLOADS, covering=1)
def test_forward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output, computed as in inference."""
    skip_long_ones(attn)
    attn.check_invariants(attn_backend)


@pytest.mark.attention(*WORKLOADS, backward=True, covering=1)
def test_backward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output and the gradients of q, k and v, computed as in training."""
    skip_long_ones(attn)
    attn.check_invariants(attn_backend)


def skip_long_ones(attn: AttentionCase) -> None:
    """On a CPU, leave out large workloads, and backends that compile anew for every layout and option they are asked about."""
    assert attn.backend is not None
    if attn.device.type == "cpu" and attn.workload.flops() > _TOO_LONG_FOR_A_CPU:
        pytest.skip("too long for a CPU")
    if attn.device.type == "cpu" and attn.backend.compiles:
        pytest.skip("compiles for every layout and option that it is run with; too long for a CPU")
