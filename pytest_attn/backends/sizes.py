"""How many bytes a workload takes."""

from __future__ import annotations

from pytest_attn.workloads.workload import Workload


def scores_bytes(workload: Workload, backward: bool, copies: int = 2) -> int:
    """Estimate the bytes of an attention that writes out its scores in float32, `copies` times."""
    scores = workload.batch * workload.heads * workload.q_len * workload.kv_len
    return scores * 4 * copies * (2 if backward else 1)


def tensor_bytes(workload: Workload, backward: bool) -> int:
    """Count the bytes of inputs, outputs and gradients, kept twice: once pristine, once for the kernel."""
    return 2 * (workload.bytes("backward") if backward else workload.bytes())
