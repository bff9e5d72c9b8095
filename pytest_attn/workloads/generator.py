"""Random tensors that are the same for every backend, process, device and torch version.

Values come from a counter-based generator (SplitMix64 of the element's index, then the normal quantile), not from torch's
own, whose streams differ between CPU and CUDA and whose CPU stream is too slow for a billion elements.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: elements computed at a time on a CPU
_CHUNK = 1 << 18


class Draw:
    """Random tensors that depend on a key, a tensor's name and an element's index, and on nothing else."""

    def __init__(self, key: str, dtype: torch.dtype, device: torch.device) -> None:
        self.key, self.dtype, self.device = key, dtype, device

    def bits(self, name: str, count: int, start: int = 0) -> torch.Tensor:
        """Return `count` 64-bit integers (int64), elements start .. start + count of the stream `name`."""
        import torch

        digest = hashlib.sha256(f"{self.key}/{name}".encode()).digest()
        offset = int.from_bytes(digest[:8], "little", signed=True)
        z = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=self._device64)
        z = z.mul_(_signed(0x9E3779B97F4A7C15)).add_(offset)
        z = z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
        z = z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(0x94D049BB133111EB))
        return z.bitwise_xor_(_shift_right(z, 31))

    def normal(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        """Return standard normal values times `scale`, rounded to the dtype."""
        import torch

        out = torch.empty(math.prod(shape), dtype=self.dtype, device=self.device)
        chunk = _CHUNK if self.device.type == "cpu" else _CHUNK << 6
        for start in range(0, out.numel(), chunk):
            part = out[start : start + chunk]
            uniform = _shift_right(self.bits(name, part.numel(), start), 11).to(torch.float64)
            uniform = uniform.add_(0.5).mul_(2.0**-52).sub_(1.0)
            part.copy_(uniform.erfinv_().mul_(math.sqrt(2) * scale))
        return out.view(shape)

    def whole(self, name: str, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        """Return whole numbers from low to high, both included, in the dtype."""
        return (self.bits(name, math.prod(shape)).remainder(high - low + 1) + low).view(shape).to(self.device, self.dtype)

    @property
    def _device64(self) -> torch.device:
        import torch

        return torch.device("cpu") if self.device.type == "mps" else self.device  # MPS has no float64


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 as if it were unsigned."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
