"""How much memory a call takes at its peak, from torch's allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Return the bytes that a call asks for at its peak, beyond what was held on a CUDA device before.

    What was asked for, not what the allocator handed out. A free block may be up to 1 MiB larger for each of the tensors, in
    one process and not in another.
    """
    torch.cuda.synchronize(device)
    torch.empty(1, device=device)  # has the allocator take back what waited for another stream
    torch.cuda.reset_peak_memory_stats(device)
    before = _bytes(device, "current")
    call()
    torch.cuda.synchronize(device)
    return _bytes(device, "peak") - before


@dataclass
class Peak:
    """The bytes that were held on a device at the peak of some work, beyond what was held before; 0 where none counts them."""

    bytes: int = 0


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Peak]:
    """Count what the work inside holds at its peak, with all that it frees again."""
    peak = Peak()
    if device.type != "cuda":
        yield peak
        return

    torch.cuda.reset_peak_memory_stats(device)
    before = _bytes(device, "current")
    yield peak
    peak.bytes = _bytes(device, "peak") - before


def _bytes(device: torch.device, when: Literal["current", "peak"]) -> int:
    statistics = torch.cuda.memory_stats(device)
    asked_for = statistics.get(f"requested_bytes.all.{when}", 0)  # which cudaMallocAsync's allocator does not count
    return int(asked_for or statistics[f"allocated_bytes.all.{when}"])
