"""The ranks that compute one callable together, as the judge sees them; what may become of them; how tensors reach them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from pytest_attn.session.deadline import DeadlineError

#: tensors by name: q, k, v or dout; out, lse, dq, dk, dv
Tensors: TypeAlias = Mapping[str, torch.Tensor]


class RankRaisedError(RuntimeError):
    """The callable raised an exception on a rank, which the text names."""


class RanksLostError(DeadlineError):
    """Ranks do not answer any more: one ended, or they wait for one another. The text says which, and for what.

    No `except Exception` of a judgment takes it for an answer of the kernel.
    """


class RankGroup(ABC):
    """Ranks with a callable each. Whole tensors go in, in the test's layout; each rank's shards come back, by rank.

    Raises RankRaisedError where the callable raised, ContractError where it returned something else than a result,
    RanksLostError.
    """

    @abstractmethod
    def forward(self, number: int, tensors: Tensors, backward: bool) -> list[Tensors]:
        """Call the callable on the shards of q, k and v. backward: whether `backward` may follow for this number."""

    @abstractmethod
    def backward(self, number: int, dout: torch.Tensor) -> list[Tensors]:
        """Return dq, dk and dv of the call of this number."""


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write tensors as they lie in memory, from whatever device."""
    torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, path)


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Read tensors that `write_tensors` wrote, onto the CPU."""
    found: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return found
