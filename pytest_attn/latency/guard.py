"""What disturbs a GPU while it is timed, in which state it is, and its clocks locked on request; latency/nvml.py asks."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_attn.latency.nvml import FIELDS, POWER_CAP, AbsentError, Gpu

if TYPE_CHECKING:
    import torch

_DISTURBING = (*FIELDS.values(), "hardware slowdown", "thermal violation")
#: NVML averages what processes compute over up to a second; a block is shorter and has mostly no sample of its own
_SAMPLE_MICROSECONDS = 1_000_000
_NO_PERMISSION = 4

_log = logging.getLogger(__name__)


class ClockError(Exception):
    """The clocks of a device cannot be locked, in NVML's words."""


class Guard:
    """What NVML says of one GPU while it is timed.

    absent_because: why it says nothing, None where it speaks. notes: what should be marked, but is no reason to discard.
    """

    def __init__(self, gpu: Gpu | None, own: frozenset[int] = frozenset(), absent_because: str | None = None) -> None:
        self.absent_because = absent_because
        self.notes: list[str] = []
        self._gpu = gpu
        there = gpu.running() if gpu else None
        self._company = None if there is None else _Company(there, own | {os.getpid()})
        self.begin()

    @classmethod
    def of(cls, device: torch.device, own: frozenset[int] = frozenset()) -> Guard:
        """Return the guard of a device, made before it is timed. own: pids, besides this process's, that are no strangers."""
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
        found = [word for word in _DISTURBING if word in seen] + self._strangers(since)
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
        """Return the state of the GPU now, as far as it can be read; the units are in the names (MHz, degrees C, W)."""
        return self._gpu.conditions() if self._gpu else {}

    def _strangers(self, since: int) -> list[str]:
        listed = self._gpu.running() if self._gpu else None
        if self._gpu is None or self._company is None or listed is None:
            return []
        pids = self._company.strangers(listed, self._gpu.computing(since - _SAMPLE_MICROSECONDS))
        return [f"another process on this GPU (pid {', '.join(map(str, sorted(pids)))})"] if pids else []


class _Company:
    """Whose processes are on the GPU. In a container NVML may know our own by other pids, or list none at all.

    there: the pids on the GPU when its guard began. known: those of our own processes, as they know themselves.
    """

    def __init__(self, there: set[int], known: frozenset[int]) -> None:
        renamed = not there & known
        alone = renamed and len(there) == 1
        self._there = there
        self._ours = known | there if alone else known
        self._renamed = len(known) - alone if renamed else 0  # so many of ours may bear a pid that nobody knows

    def strangers(self, listed: set[int], computing: set[int] | None) -> set[int]:
        """Return the pids of others that compute; where NVML does not tell who does, of those that came after the start."""
        if computing is None or (computing and computing.isdisjoint(listed)):  # disjoint: the pids of two namespaces
            computing = listed - self._there
        found = (listed & computing) - self._ours
        return found if len(found) > self._renamed else set()


@contextmanager
def locked_clocks(device: torch.device, megahertz: int | None) -> Iterator[int]:
    """Hold a GPU's SM clock at `megahertz` (None: the highest that it says it supports), and yield it.

    Undone when the block or the process ends, not when a signal kills it; a lock of somebody else goes with it, for NVML
    does not tell of one. Raises ClockError where the clock cannot be locked.
    """
    try:
        lock = _ClockLock(device, Gpu(device))
    except AbsentError as absent:
        raise ClockError(f"the clocks of {device} cannot be locked: {absent}; leave out --attn-lock-clocks") from absent
    atexit.register(lock.release)
    try:
        yield lock.hold(megahertz)
    finally:
        lock.release()
        atexit.unregister(lock.release)


class _ClockLock:
    """The SM clock of one GPU, held and let go once."""

    def __init__(self, device: torch.device, gpu: Gpu) -> None:
        self._device, self._gpu = device, gpu
        self._held = False

    def hold(self, megahertz: int | None) -> int:
        """Lock the clock and return it, in MHz. Raises ClockError."""
        wanted = self._gpu.highest_clock() if megahertz is None else megahertz
        refused = f"the clocks of {self._device} cannot be locked"
        if wanted is None:
            raise ClockError(f"{refused}: NVML does not say which it supports; name one")
        self._held = True  # before the call: what interrupts it may come after the lock
        try:
            self._gpu.lock_clocks(wanted)
        except Exception as error:
            self._held = False
            remedy = "run as root or " if getattr(error, "value", None) == _NO_PERMISSION else ""
            raise ClockError(f"{refused} at {wanted} MHz: {error}; {remedy}leave out --attn-lock-clocks") from error
        return wanted

    def release(self) -> None:
        """Unlock the clock, if it is held; a refusal is logged, since the test has had its result."""
        if not self._held:
            return
        try:
            self._gpu.unlock_clocks()
        except Exception as error:
            _log.warning("%s keeps its locked clocks: %s; nvidia-smi --reset-gpu-clocks", self._device, error)
        self._held = False
