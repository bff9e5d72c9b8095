"""The same values in other memory: how models, and awkward callers, hand tensors over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.contract import ContractError
from pytest_attn.workloads.arithmetic import beside

if TYPE_CHECKING:
    from torch import Tensor

#: What a kernel raises that does not take some strides; some libraries assert.
_REFUSALS = (ValueError, NotImplementedError, RefusedError, TypeError, RuntimeError, AssertionError)


#: what a device says of a kernel that has run, and after which nothing runs any more
_ENDS_CONTEXT = (
    *("illegal memory access", "illegal address", "illegal instruction", "misaligned address", "device-side assert"),
    *("launch failure", "hardware stack error", "invalid program counter", "invalid device context"),
)


def is_cuda_error(error: Exception) -> bool:
    """Whether an exception says that a kernel did what ends the process's context, in CUDA's, HIP's or Triton's words."""
    said = str(error)
    return any(name in said for name in ("CUDA", "HIP")) and any(words in said for words in _ENDS_CONTEXT)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what a kernel raises that does not take some strides into RefusedError.

    A broken contract stays one, and the end of a device's context does not count as a refusal: the kernel has run.
    """
    try:
        yield
    except ContractError:
        raise
    except _REFUSALS as error:
        if is_cuda_error(error):
            raise
        raise RefusedError(str(error) or type(error).__name__) from error


def swapped(tensor: Tensor) -> Tensor:
    """Heads and rows lie in memory the other way round, as between "bhsd" and "bshd"."""
    import torch

    other_way = tensor.transpose(-3, -2).clone(memory_format=torch.contiguous_format)  # a copy where one of both is 1, too
    return other_way.transpose(-3, -2)


def fused(tensor: Tensor) -> Tensor:
    """The middle slice of a tensor three times as wide, as q, k and v are of one projection."""
    import torch

    return torch.cat([beside(tensor, 1), tensor, beside(tensor, -1)], -1)[..., tensor.shape[-1] : 2 * tensor.shape[-1]]


@dataclass(frozen=True)
class StridePattern:
    """Which of q, k, v and dout are views, as models hand them over, and which contiguous."""

    views: frozenset[str]

    def of(self, name: str, tensor: Tensor, layout: str) -> Tensor:
        """Return a copy of the tensor that lies so."""
        if name not in self.views:
            return tensor.clone()
        return swapped(tensor) if layout == "bhsd" else fused(tensor)

    def describe(self, layout: str) -> str:
        """Say how q, k and v lie."""
        how = "transposed views of (batch, row, head, dim) tensors" if layout == "bhsd" else "slices of wider tensors"
        return f"q, k and v are {how}" if "k" in self.views else f"q and v are {how}, k is contiguous"


CONTIGUOUS = StridePattern(frozenset())
#: q, k and v are one projection's, seen by heads
PROJECTED = StridePattern(frozenset(("q", "k", "v", "dout")))
#: k has been written anew, as rotary embeddings and caches do
REWRITTEN_KEYS = StridePattern(frozenset(("q", "v", "dout")))
