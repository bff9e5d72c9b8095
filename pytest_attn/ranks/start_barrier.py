"""Where ranks of one host begin a sample together, without a message: a few words of memory that all of them see."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

#: by how much the common moment lies after the last rank's arrival, so that the others have seen it
_AHEAD_NANOSECONDS = 20_000
_WORD = 8
#: lets others have the core: sleeping takes a hundred times as long
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class StartBarrier:
    """Each rank says from when on it can begin, on the clock that all processes of a host share; the latest moment counts.

    Moments of successive starts lie in two banks: a rank that is one start ahead must not overwrite what another still reads.
    """

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        size = 2 * ranks * _WORD
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, size)
            self._moments = memoryview(mmap.mmap(file, size)).cast("q")
        finally:
            os.close(file)
        self._bank, self._last = 0, 0

    def wait(self) -> float:
        """Wait for the others, then for the common moment; return how many seconds after it this rank begins."""
        self._bank = 1 - self._bank
        first = self._bank * self._ranks
        moments = self._moments[first : first + self._ranks]
        moments[self._rank] = time.perf_counter_ns() + _AHEAD_NANOSECONDS
        while min(moments) <= self._last:  # of the start before the last one, or of none yet
            _yield_core()
        self._last = max(moments)
        while (now := time.perf_counter_ns()) < self._last:
            pass
        return (now - self._last) * 1e-9
