"""Whether the calling thread had to wait for its core while a CPU was timed, or to share it."""

from __future__ import annotations

import math
import time

from pytest_attn.latency.anchors import PACE
from pytest_attn.latency.core import Core
from pytest_attn.latency.guard import Guard

#: of a block's wall time that the calling thread may have waited to run; what it sleeps by itself is part of its kernel
_MOST_WAITING = 0.1


class HostGuard(Guard):
    """A guard for CPUs: a block is disturbed where the kernel kept the thread that timed it waiting for its turn.

    Linux counts that time per thread; elsewhere nothing is said. A measurement is disturbed where many of its samples had to
    share their core.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(None)
        self._core = core

    def begin_all(self, subject: str) -> None:
        """Begin a measurement of the samples of this name."""
        super().begin_all(subject)
        self._core.begin(subject)

    def anchors(self) -> dict[str, float]:
        """Return the fastest pace of the core since begin_all(), which is slow where others shared it throughout."""
        return {PACE: self._core.fastest} if math.isfinite(self._core.fastest) else {}

    def lost(self) -> float:
        """Return the seconds that went by in waiting for the core since begin_all()."""
        return self._core.lost

    def lasting_disturbance(self) -> str | None:
        """Say whether many samples had to share their core."""
        return self._core.disturbance()

    def begin(self) -> None:
        """Read both clocks before a block."""
        self._wall, self._waited = time.perf_counter(), _waited()

    def disturbance(self) -> str | None:
        """Compare the time spent waiting for a core with all that passed."""
        wall, waited = time.perf_counter() - self._wall, _waited() - self._waited
        self.begin()
        if wall <= 0 or waited <= _MOST_WAITING * wall:
            return None
        return f"this thread waited {waited / wall:.0%} of the time for a core: other processes compute"


def _waited() -> float:
    """Return the seconds that this thread has been ready to run and did not, 0 where nobody counts them."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
