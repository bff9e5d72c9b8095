"""Whether the calling thread had to wait for its core while a CPU was timed, or to share it."""

from __future__ import annotations

import math
import time

from pytest_attn.latency.anchors import REFERENCE_LOOP
from pytest_attn.latency.contention import ContentionMonitor
from pytest_attn.latency.disturbance import DisturbanceMonitor
from pytest_attn.latency.waiting import thread_waited

#: of a block's wall time that the calling thread may have waited to run; what it sleeps by itself is part of its kernel
_MOST_WAITING = 0.1


class WaitingMonitor(DisturbanceMonitor):
    """Watches whether the operating system kept the calling thread waiting for its turn: a block is disturbed where it did.

    Linux counts that time per thread; elsewhere there is no verdict.
    """

    def __init__(self) -> None:
        super().__init__(None)

    def begin(self) -> None:
        """Read both clocks before a block."""
        self._wall, self._waited = time.perf_counter(), thread_waited()

    def disturbance(self) -> str | None:
        """Compare the time spent waiting for a core with all that passed."""
        wall, waited = time.perf_counter() - self._wall, thread_waited() - self._waited
        self.begin()
        if wall <= 0 or waited <= _MOST_WAITING * wall:
            return None
        return f"this thread waited {waited / wall:.0%} of the time for a core: other processes compute"


class CpuDisturbanceMonitor(WaitingMonitor):
    """The monitor of a CPU: a measurement is also disturbed if many of its samples had to share their core."""

    def __init__(self, contention: ContentionMonitor) -> None:
        super().__init__()
        self._contention = contention

    def begin_all(self, subject: str) -> None:
        """Begin a measurement of the samples of this name."""
        super().begin_all(subject)
        self._contention.begin(subject)

    def anchors(self) -> dict[str, float]:
        """Return the fastest reference loop since begin_all(), which is slow if others shared the core throughout."""
        return {REFERENCE_LOOP: self._contention.fastest} if math.isfinite(self._contention.fastest) else {}

    def lost(self) -> float:
        """Return the seconds that went by in waiting for the core since begin_all()."""
        return self._contention.lost

    def lasting_disturbance(self) -> str | None:
        """Say whether many samples had to share their core."""
        return self._contention.disturbance()
