"""How many bytes a workload takes."""

from __future__ import annotations

from pytest_attn.workloads.positions import has_long_sequences
from pytest_attn.workloads.workload import Workload

#: how many times the tensors of a kernel the check of a long workload may take
LONG_CHECK = 3


def scores_bytes(workload: Workload, backward: bool, copies: int = 2) -> int:
    """Estimate the bytes of an attention that writes out its scores in float32, `copies` times."""
    scores = workload.batch * workload.heads * workload.q_len * workload.kv_len
    return scores * 4 * copies * (2 if backward else 1)


def tensor_bytes(workload: Workload, backward: bool) -> int:
    """Count the bytes of inputs, outputs and gradients, kept twice: once pristine, once for the kernel.

    For a long workload it is what its check may take at its peak, with results of other calls and the reference's chunks.
    """
    times = LONG_CHECK if has_long_sequences(workload) else 2
    return times * (workload.bytes("backward") if backward else workload.bytes())
