"""What a result was: a copy, or of a large one a fingerprint, which tells whether it has changed and takes no memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: bytes of a result from which its fingerprint is kept, and elements that are looked at together
_LARGE, _PART = 1 << 28, 1 << 24
#: SplitMix64's odd constant, as int64: consecutive multiples of it share no pattern
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


class KeptResult:
    """A result as it was."""

    def __init__(self, tensor: Tensor, large: int | None = None) -> None:
        is_large = tensor.nbytes >= (_LARGE if large is None else large)
        self._print = fingerprint(tensor) if is_large else None
        self._copy = None if is_large else tensor.clone()

    @property
    def is_large(self) -> bool:
        """Whether only its fingerprint is kept."""
        return self._copy is None

    def is_same(self, tensor: Tensor) -> bool:
        """Whether a tensor has the same elements, NaN where NaN was; for a fingerprint, the same bits."""
        import torch

        if self._copy is None:
            return fingerprint(tensor) == self._print
        one, other = tensor, self._copy
        return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def fingerprint(tensor: Tensor) -> int:
    """Return a sum of all elements' bits, each times an odd number of its own, modulo 2^64."""
    import torch

    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = start = 0
    for part in _parts(tensor.detach()):
        bits = part.reshape(-1).view(integer).long()
        weights = torch.arange(start + 1, start + 1 + len(bits), device=bits.device).mul_(_STEP)
        weights.bitwise_xor_(weights >> 29).bitwise_or_(1)
        total += int(bits.add_(1).mul_(weights).sum())
        start += len(bits)
    return total % (1 << 64)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield parts of a tensor that are small enough to be copied, in an order that its shape alone gives."""
    if tensor.numel() <= _PART or tensor.dim() == 0:
        yield tensor
        return
    axis = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    for part in tensor.tensor_split(2, axis):
        yield from _parts(part)
