"""Whether the calling thread had its core for itself while a CPU was timed."""

from __future__ import annotations

import time

from pytest_attn.latency.guard import Guard

#: of a block's wall time that the calling thread must have computed; timing itself neither sleeps nor waits
_LEAST_SHARE = 0.8


class HostGuard(Guard):
    """A guard for CPUs: a block is disturbed where the thread that timed it was kept from its core."""

    def __init__(self) -> None:
        super().__init__(None)
        self.begin()

    def begin(self) -> None:
        """Read both clocks before a block."""
        self._wall, self._own = time.perf_counter(), time.thread_time()

    def disturbance(self) -> str | None:
        """Compare the thread's own seconds with those that passed."""
        wall, own = time.perf_counter() - self._wall, time.thread_time() - self._own
        self.begin()
        if wall <= 0 or own >= _LEAST_SHARE * wall:
            return None
        return f"this thread had its core for {own / wall:.0%} of the time: other processes compute"
