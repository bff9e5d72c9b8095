"""What disturbs a GPU while it is timed, and in which state it is; latency/nvml.py asks."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from pytest_attn.latency.nvml import FIELDS, POWER_CAP, AbsentError, Gpu

if TYPE_CHECKING:
    import torch

_DISTURBING = (*FIELDS.values(), "hardware slowdown", "thermal violation")
#: NVML averages what processes compute over up to a second; a block is shorter and has mostly no sample of its own
_SAMPLE_MICROSECONDS = 1_000_000


class DisturbanceMonitor:
    """Watches, by NVML, what disturbs one GPU while it is timed.

    absent_because: why NVML is unavailable, or None. notes: what should be marked, but not discarded.
    """

    def __init__(self, gpu: Gpu | None, own: frozenset[int] = frozenset(), absent_because: str | None = None) -> None:
        self.absent_because = absent_because
        self.notes: list[str] = []
        self._gpu = gpu
        running = gpu.running() if gpu else None
        self._processes = None if running is None else _ProcessList(running, own | {os.getpid()})
        self.begin()

    @classmethod
    def of(cls, device: torch.device, own: frozenset[int] = frozenset()) -> DisturbanceMonitor:
        """Return the monitor of a device, made before it is timed. own: pids of ours, besides this process's."""
        try:
            return cls(Gpu(device), own)
        except AbsentError as absent:
            return cls(None, own, str(absent))

    def begin_all(self, subject: str) -> None:
        """Begin a measurement of the samples of this name."""
        del subject
        self.notes.clear()

    def begin(self) -> None:
        """Read the counters before a block."""
        self._since = time.time_ns() // 1000
        self._counters = self._gpu.counters() if self._gpu else {}

    def disturbance(self) -> str | None:
        """Say in few words what disturbed the GPU since begin(), None if nothing did. The next block begins here."""
        if self._gpu is None:
            return None
        seen = set(self._gpu.reasons() or ())  # first: a GPU that has nothing more to do soon forgets them
        since, before = self._since, self._counters
        self.begin()
        seen |= {word for word, count in self._counters.items() if count > before.get(word, count)}
        if POWER_CAP in seen and POWER_CAP not in self.notes:
            self.notes.append(POWER_CAP)
        found = [word for word in _DISTURBING if word in seen] + self._foreign_processes(since)
        return ", ".join(found) or None

    def anchors(self) -> dict[str, float]:
        """Return what was looked at meanwhile and serves as an anchor, in seconds."""
        return {}

    def lost(self) -> float:
        """Return the seconds that went by in waiting for others since begin_all()."""
        return 0.0

    def lasting_disturbance(self) -> str | None:
        """Say what disturbed too many of the samples since begin_all(), None if nothing did."""
        return None

    def is_capped(self) -> bool:
        """Say whether its power holds the clocks of the GPU down right now; False where nobody knows."""
        return self._gpu is not None and POWER_CAP in (self._gpu.reasons() or ())

    def conditions(self) -> dict[str, int | float | str]:
        """Return the state of the GPU now, as far as NVML reports it; the units are in the names (MHz, degrees C, W)."""
        return self._gpu.conditions() if self._gpu else {}

    def _foreign_processes(self, since: int) -> list[str]:
        listed = self._gpu.running() if self._gpu else None
        if self._gpu is None or self._processes is None or listed is None:
            return []
        pids = self._processes.foreign_pids(listed, self._gpu.computing(since - _SAMPLE_MICROSECONDS))
        return [f"another process on this GPU (pid {', '.join(map(str, sorted(pids)))})"] if pids else []


class _ProcessList:
    """Whose processes are on the GPU. In a container NVML may know our own by other pids, or list none at all.

    at_start: the pids on the GPU when its monitor began. known: those of our own processes, as they know themselves.
    """

    def __init__(self, at_start: set[int], known: frozenset[int]) -> None:
        are_renamed = not at_start & known
        is_alone = are_renamed and len(at_start) == 1
        self._at_start = at_start
        self._ours = known | at_start if is_alone else known
        self._renamed = len(known) - is_alone if are_renamed else 0  # so many of ours may bear a pid that nobody knows

    def foreign_pids(self, listed: set[int], computing: set[int] | None) -> set[int]:
        """Return the pids of others that compute; where NVML does not tell who does, of those that came after the start."""
        if computing is None or (computing and computing.isdisjoint(listed)):  # disjoint: the pids of two namespaces
            computing = listed - self._at_start
        found = (listed & computing) - self._ours
        return found if len(found) > self._renamed else set()
