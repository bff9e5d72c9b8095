"""What a tensor should be, element by element, and how far a fault-free kernel may be from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Expected:
    """What one tensor should be: `value` (float64) and its budget `tau` (float32), both (batch, heads, rows, dim).

    `rows` lists the sampled positions along the third dimension, None for all. The expected lse has no dim. Its tau is 0
    unless the profile makes the scores noisy, and comes on top of what float32 sums allow.
    """

    value: torch.Tensor
    tau: torch.Tensor
    rows: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.value.nbytes + self.tau.nbytes)
