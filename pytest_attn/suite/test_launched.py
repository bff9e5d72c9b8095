"""Every backend that names a kernel family launches it: no dispatcher silently took another kernel. CUDA only."""

import pytest

from pytest_attn import AttentionCase, Backend, Neighborhood, Workload

WORKLOADS = (
    Workload(512, heads=8, name="launched-prefill"),
    Workload(1, 2048, heads=8, mask="causal-bottom-right", name="launched-decode"),
    Workload(256, heads=8, mask=Neighborhood((16, 16), (5, 5)), name="launched-neighborhood"),
)


@pytest.mark.attention(*WORKLOADS, covering=1)
def test_forward(attn: AttentionCase, attn_backend: Backend) -> None:
    """As in inference."""
    launches_its_own(attn, attn_backend)


@pytest.mark.attention(*WORKLOADS, backward=True, covering=1)
def test_backward(attn: AttentionCase, attn_backend: Backend) -> None:
    """As in training."""
    launches_its_own(attn, attn_backend)


def launches_its_own(attn: AttentionCase, backend: Backend) -> None:
    """Check the case, then look at what ran."""
    if attn.device.type != "cuda":
        pytest.skip("kernels have names on CUDA only")
    if not backend.launches:
        pytest.skip(f"{backend.name} names no kernel of its own")
    attn.check(backend)
    attn.assert_launched(*backend.launches)
