"""Defects of libraries that are known and reported, and those of kernels that several backends have."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pytest_attn.backends.dense import is_plain_causal, needs_dense_mask
from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.masks import interval
from pytest_attn.workloads.workload import Workload, sequence_lengths


@dataclass(frozen=True)
class KnownDefect:
    """A known, reported defect of a library: it turns exactly this failure into an expected one.

    Args:
        issue: where it was reported.
        summary: what is wrong, in one line.
        applies: whether a workload and machine are in the defect's reach; by default all are.
        tensors: which results are wrong; by default none, where only invariants show it.
        only_nan: it shows as NaN or infinity, not as a value that is off.
        inputs: the input distribution that shows it; None for any.
        changes_input: inputs ("q", "k", "v") that it changes in place.
        shows: whether a failed `TensorComparison` looks like it; by default every failure of these tensors does.
        invariants: names of those that it may break; empty where it may break any.
        kernel: a word of the kernel that has it, where a backend leaves the choice to a library; empty for any.
        evidence: a regular expression that is found in what shows such an invariant broken.
        ends_cuda: these invariants would end the process's CUDA context, and are not asked.
    """

    issue: str
    summary: str
    applies: Callable[[Workload, Machine], bool] = lambda workload, machine: True
    tensors: tuple[str, ...] = ()
    only_nan: bool = False
    inputs: str | None = None
    changes_input: tuple[str, ...] = ()
    shows: Callable[[Any, Workload], bool] = lambda comparison, workload: True
    invariants: tuple[str, ...] = ()
    kernel: str = ""
    evidence: str = ""
    ends_cuda: bool = False

    def spoils(self, workload: Workload, machine: Machine, backward: bool) -> bool:
        """Return whether a workload is in its reach: one of gradients only is in a backward pass."""
        is_of_gradients = bool(self.tensors) and not self.changes_input and all(name.startswith("d") for name in self.tensors)
        return (backward or not is_of_gradients) and self.applies(workload, machine)

    def breaks(self, invariant: str, evidence: str) -> bool:
        """Return whether a broken invariant looks like it."""
        return (not self.invariants or invariant in self.invariants) and re.search(self.evidence, evidence) is not None

    def explains(self, comparison: Any, workload: Workload) -> bool:
        """Return whether everything that failed in a `Comparison` is what the defect spoils, and looks like it."""
        failed = [t for t in comparison.tensors if not t.passed]
        unchanged = set(comparison.changed) <= set(self.changes_input)
        return unchanged and all(
            t.name in self.tensors and (t.wrong_positions or not self.only_nan) and self.shows(t, workload) for t in failed
        )


# -- those that several backends have ----------------------------------------------------------------------------------------


def sees_nothing(workload: Workload, row: int = 0) -> bool:
    """Return whether this query row of a causal mask or window sees no key, in any of the sequences."""
    lengths = [(q_len, kv_len) for q_len, kv_len in sequence_lengths(workload) if q_len > row]
    spans = (interval(workload.plain_mask, row, q_len, kv_len) for q_len, kv_len in lengths)
    return any(span is not None and span[0] == span[1] for span in spans)


def in_fully_masked_rows(comparison: Any, workload: Workload) -> bool:
    """Return whether the worst of a `TensorComparison` lies in a row that sees no key; gradients of keys lie in none."""
    is_of_rows = comparison.name in ("out", "dq") and not workload.is_packed
    return not is_of_rows or sees_nothing(workload, comparison.worst[2])


def is_on_affected_cudnn(workload: Workload, machine: Machine) -> bool:
    """Return whether a machine has a GPU and a cuDNN that write NaN into dq."""
    is_affected = machine.capability == (9, 0) and (2, 11) <= machine.torch_release <= (2, 13)
    return is_affected and workload.dtype != "float32"


def is_half_tile(rows: int) -> bool:
    """Return whether the last of cuDNN's tiles of rows is filled by half."""
    return rows % 128 == 64


#: Reported with an explicit attn_mask; on an H200 with torch 2.11 it shows without any mask as well.
CUDNN_NAN = KnownDefect(
    issue="pytorch#196678",
    summary="NaN in dq where q_len % 128 == 64 and a row's lse is below -88",
    applies=lambda w, machine: (
        w.q_len > 128 and is_half_tile(w.q_len) and is_on_affected_cudnn(w, machine) and not is_plain_causal(w)
    ),
    tensors=("dq",),
    only_nan=True,
    inputs="outlier",
)

CUDNN_NAN_OF_ONE_TILE = replace(
    CUDNN_NAN,
    summary="NaN in dq where q_len is 64 and scores are large",
    applies=lambda workload, machine: workload.q_len == 64 and is_on_affected_cudnn(workload, machine),
    inputs=None,
    invariants=("magnitude",),
)

#: relative L2 of gradients that come from other elements of dout, or from beyond it: 0.9 and more was seen; memory that nobody
#: wrote may hold NaN, too
_GARBAGE_L2 = 0.3
#: torch keeps cuDNN's plan of a backward pass by the strides of q, k, v and the bias, and builds dout's strides into it
CUDNN_STALE_STRIDES = KnownDefect(
    issue="docs/results/findings.md, seen on an H200 with torch 2.11, no report found",
    summary="dout is read with the strides that it had when q, k and v were first of these shapes and strides",
    applies=is_on_affected_cudnn,
    tensors=("dq", "dk", "dv"),
    invariants=("layout",),
    kernel="cudnn",
    evidence=r"^[^:]*dout[^:]*: d[qkv]\[",
    shows=lambda found, workload: 2 * found.wrong_positions > found.elements or not found.relative_l2 < _GARBAGE_L2,
)


def _fully_masked_rows_on_cudnn(workload: Workload, machine: Machine) -> bool:
    on_cudnn = machine.capability == (9, 0) and (2, 9) <= machine.torch_release <= (2, 13) and workload.dtype != "float32"
    return on_cudnn and not workload.is_packed and sees_nothing(workload)


CUDNN_FULLY_MASKED_ROWS = KnownDefect(
    issue="seen on an H200 with torch 2.11, no report found",
    summary="rows that see no key are not zero",
    applies=_fully_masked_rows_on_cudnn,
    tensors=("out", "dq", "dk", "dv"),
    shows=in_fully_masked_rows,
)

#: torch gives cuDNN a boolean attn_mask as 0 and -65504: a row without a visible key then sees them all
SDPA_FULLY_MASKED_ROWS = replace(
    CUDNN_FULLY_MASKED_ROWS, issue="pytorch#177842", summary="-65504 in place of -inf: rows that see no key see them all"
)

#: the backward kernel rounds head_dim to 16, and the pass that reads its dq to 32
FLASH4_DQ = KnownDefect(
    issue="Dao-AILab/flash-attention#2896",
    summary="wrong dq on sm90 where head_dim rounded up to 16 is not a multiple of 32",
    applies=lambda w, machine: machine.capability == (9, 0) and w.head_dim <= 128 and 0 < w.head_dim % 32 <= 16,
    tensors=("dq",),
)

_OF_CUTLASS = "docs/results/findings.md, seen on an H200 with torch 2.11 and xformers 0.0.35"


def _last_row_alone(workload: Workload, machine: Machine) -> bool:
    """Return whether the last tile of 64 query rows holds one row, and a mask or bias tells rows apart."""
    lengths = workload.q_lens or (workload.q_len,)
    is_alone = workload.heads > 1 and any(length > 1 and length % 64 == 1 for length in lengths)
    return is_alone and (workload.mask is not None or workload.bias is not None)


CUTLASS_SHARED_HEAD = KnownDefect(
    issue=_OF_CUTLASS,
    summary="k and v of stride 0 over heads, without gradients: a last row alone in its tile gets the mask of other rows",
    applies=_last_row_alone,
    invariants=("layout",),
)

CUTLASS_OFFSETS = KnownDefect(
    issue=_OF_CUTLASS,
    summary="rows or heads more than 2^31 elements apart: an illegal memory access, which ends the process's CUDA context",
    invariants=("offsets",),
)

#: some rows may score all that they see 65,504 below what is hidden from them
SDPA_LARGE_SCORES = KnownDefect(
    issue="pytorch#177842",
    summary="-65504 in place of -inf: keys that may not be seen, and score that much more, are",
    applies=lambda w, machine: machine.capability == (9, 0) and needs_dense_mask(w) and not w.bias and not w.alibi,
    invariants=("magnitude",),
)
