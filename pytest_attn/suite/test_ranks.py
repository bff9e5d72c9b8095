"""Every backend that computes over ranks, forward and backward, over 2 and 4 of them, against exact attention.

On CUDA each rank needs a GPU of its own: with fewer, and without a library, a case is skipped with that reason.
"""

import pytest

from pytest_attn import AttentionCase, Backend, Workload

RANKS = (2, 4)
#: longer than those of the group smoke, and divisible: flex takes whole blocks on each rank, Ulysses heads for each
WORKLOADS = (
    "smoke",
    Workload(512, batch=2, heads=4, head_dim=64, name="ranks-full"),
    Workload(1024, heads=8, kv_heads=4, head_dim=64, mask="causal", name="ranks-causal-gqa"),
    Workload(512, heads=4, head_dim=64, mask="causal", dtype="float16", name="ranks-causal-half"),
    Workload(q_lens=(64, 256, 192), heads=4, head_dim=64, mask="causal", name="ranks-packed"),
)
CONTIGUOUS = (
    *("torch_cp", "torch_cp@rotate=alltoall", "torch_cp_flex", "ring_flash", "llama3", "ulysses", "usp", "usp@ulysses=2"),
    *("diffusers_cp", "diffusers_cp@ring=2", "diffusers_cp@ring=2:kernel=_native_cudnn"),
)
HEAD_TAIL = (
    *("torch_cp", "torch_cp@rotate=alltoall", "torch_cp@kernel=flash", "torch_cp@kernel=efficient", "torch_cp@kernel=cudnn"),
    *("torch_cp_flex", "zigzag", "usp@ulysses=1", "te_cp", "te_cp@comm=all_gather", "te_cp@comm=a2a"),
)
INPUTS = ("structured", "flat", "outlier")


@pytest.mark.attention(*WORKLOADS, backends=CONTIGUOUS, inputs=INPUTS, ranks=RANKS, shard="contiguous")
def test_forward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output, where each rank has one part of the sequence."""
    check(attn, attn_backend)


@pytest.mark.attention(*WORKLOADS, backends=CONTIGUOUS, inputs=INPUTS, ranks=RANKS, shard="contiguous", backward=True)
def test_backward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output and the gradients."""
    check(attn, attn_backend)


@pytest.mark.attention(*WORKLOADS, backends=HEAD_TAIL, inputs=INPUTS, ranks=RANKS, shard="head-tail")
def test_balanced_forward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output, where each rank has a chunk from the head and one from the tail."""
    check(attn, attn_backend)


@pytest.mark.attention(*WORKLOADS, backends=HEAD_TAIL, inputs=INPUTS, ranks=RANKS, shard="head-tail", backward=True)
def test_balanced_backward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output and the gradients; in this order torch's ring was reported wrong (pytorch#163075)."""
    check(attn, attn_backend)


def check(attn: AttentionCase, backend: Backend) -> None:
    """Check the case; on a CPU leave out most of the cases for which torch compiles a block mask."""
    is_short = attn.ranks == 2 and attn.workload.name == "ranks-causal-gqa"
    if attn.device.type == "cpu" and backend.name == "torch_cp_flex" and not is_short:
        pytest.skip("compiles a block mask for every shape; too long for a CPU")
    attn.check(backend)
