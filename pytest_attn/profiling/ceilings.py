"""The ceilings of a device: how many operations and how many bytes a second it can do at best, measured once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_REPEATS = 8


@functools.cache
def ceilings_of(device: torch.device, dtype: str) -> tuple[float, float]:
    """Measure (FLOP/s of a large square matrix product in `dtype`, bytes/s of a large copy, read and write together)."""
    import torch

    on_cuda = device.type == "cuda"
    size, copied = (8192, 1 << 30) if on_cuda else (1024, 1 << 26)
    a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    source = torch.empty(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _shortest(lambda: a @ a, device)
    copy = _shortest(lambda: target.copy_(source), device)
    return 2 * size**3 / product, 2 * copied / copy


def _shortest(call: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of several calls, in seconds: a ceiling is the best that was seen."""
    import torch

    def once() -> float:
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    once()
    return min(once() for _ in range(_REPEATS))
