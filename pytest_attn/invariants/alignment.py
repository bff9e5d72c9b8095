"""Strides and addresses that no model passes, and that end some kernels with the process's CUDA context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.invariants.invariant import Invariant
from pytest_attn.invariants.layout import CONTIGUOUS_ONLY, all_of, judge_arrangements
from pytest_attn.invariants.probe import Probe

if TYPE_CHECKING:
    from torch import Tensor


def odd_where_one(tensor: Tensor) -> Tensor:
    """Dimensions of size 1 have strides that mean nothing."""
    strides = [7 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def unaligned(tensor: Tensor) -> Tensor:
    """The first element lies one element behind an aligned address."""
    memory = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return memory.copy_(tensor)


_ARRANGEMENTS = (
    all_of("strides of 7 in dimensions of size 1", odd_where_one),
    all_of("first elements that are not aligned to 16 bytes", unaligned),
)


class Alignment(Invariant):
    """Tensors that are not aligned to 16 bytes give the same result, or are refused.

    Kernels that read by TMA descriptors may end with the CUDA context. So it comes last, on a GPU in a process of its own.
    """

    name = "alignment"
    summary = "tensors whose strides or addresses are not aligned to 16 bytes give what aligned ones give, or are refused"
    calls = len(_ARRANGEMENTS)
    thorough = True
    may_end_cuda = True

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Leave out kernels that are documented to take contiguous tensors."""
        return CONTIGUOUS_ONLY if probe.spec.contiguous else None

    def run(self, probe: Probe) -> str:
        """Call with each arrangement that the kernel does not refuse."""
        return judge_arrangements(probe, _ARRANGEMENTS)
