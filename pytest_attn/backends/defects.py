"""Known defects of kernels that more than one backend reaches: cuDNN's and FlashAttention-4's."""

from __future__ import annotations

from pytest_attn.backends.backend import KnownDefect
from pytest_attn.backends.dense import is_plain_causal
from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.masks import interval
from pytest_attn.workloads.workload import Workload


def _half_tile_without_causal(workload: Workload, machine: Machine) -> bool:
    affected = machine.capability == (9, 0) and machine.torch_release >= (2, 11) and workload.dtype != "float32"
    return affected and workload.q_len > 128 and workload.q_len % 128 == 64 and not is_plain_causal(workload)


#: Reported with an explicit attn_mask; on an H200 with torch 2.11 it shows without any mask as well.
CUDNN_NAN = KnownDefect(
    issue="pytorch#196678",
    summary="NaN in dq where q_len % 128 == 64 and a row's lse is below -88",
    applies=_half_tile_without_causal,
    tensors=("dq",),
    only_nan=True,
    inputs="outlier",
)


def _rows_without_a_key(workload: Workload, machine: Machine) -> bool:
    blind = interval(workload.plain_mask, 0, workload.q_len, workload.kv_len)
    on_cudnn = machine.capability == (9, 0) and machine.torch_release >= (2, 9) and workload.dtype != "float32"
    return on_cudnn and not workload.is_packed and blind is not None and blind[0] == blind[1]


CUDNN_BLIND_ROWS = KnownDefect(
    issue="seen on an H200 with torch 2.11, no report found",
    summary="rows that see no key are not zero",
    applies=_rows_without_a_key,
    tensors=("out", "dq", "dk", "dv"),
)


def _dq_tiles_of_another_width(workload: Workload, machine: Machine) -> bool:
    """Whether the backward kernel, which rounds head_dim to 16, and the pass that reads its dq, to 32, disagree."""
    return machine.capability == (9, 0) and workload.head_dim <= 128 and 0 < workload.head_dim % 32 <= 16


FLASH4_DQ = KnownDefect(
    issue="Dao-AILab/flash-attention#2896",
    summary="wrong dq on sm90 where head_dim rounded up to 16 is no multiple of 32",
    applies=_dq_tiles_of_another_width,
    tensors=("dq",),
)
