"""Disturbances of a GPU while it is timed, and the state that it is in; latency/nvml.py asks."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

import torch

from pytest_attn.latency.nvml import FIELDS, POWER_CAP, AbsentError, Gpu


def thread_waited(process: int | None = None) -> float:
    """Return the seconds that the calling thread has waited for a core, or the first one of another process."""
    counts = "thread-self" if process is None else f"{process}/task/{process}"
    try:
        with open(f"/proc/{counts}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


#: the anchor of a CPU that is timed by one thread, by the key that baselines have for it
REFERENCE_LOOP = "pace"
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
    """Processes on the GPU. In a container NVML may know our own by other pids, or list none at all.

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


#: about 70 us of the interpreter's own arithmetic, in one call, so that what traces lines of Python does not see it
_LOOP = range(6000)
#: how many times its shortest time the reference loop takes where the core is shared
_SHARED = 1.25
#: seconds of a measurement that may be lost to waiting and to samples taken again, at most and at least: half as many as the
#: last time if that did not help
_MOST_LOST_SECONDS, _LEAST_LOST_SECONDS = 4.0, 0.1
#: seconds of a sample from which on the loop before and after it tells too little of it
_LONG_SAMPLE_SECONDS = 20e-3
#: a kernel slows the core itself if the core is slow after each of so many samples: its threads still spin, say
_SAMPLES_SLOW_AFTER = 40
#: seconds in which the speed of a new core is found
_CALIBRATION_SECONDS = 0.1
#: share of samples from which on the whole measurement is disturbed
_MOST_SHARED = 0.25
#: measurements after which a speed is forgotten: a clock may fall for good
_REMEMBERED = 8

_Staged = TypeVar("_Staged")


class ContentionMonitor:
    """Watches whether other work shares the core of the calling thread; has samples wait for it, or taken again.

    Disabled with more than one torch thread, as they contend with each other. reference_loop: does a fixed piece of work and
    returns its seconds. lost: seconds of this measurement that went by in waiting for others. fastest: the seconds of the
    fastest reference loop of this measurement, infinite if there was none.
    """

    def __init__(self, reference_loop: Callable[[], float] | None = None) -> None:
        self._reference_loop = reference_loop or time_reference_loop
        self._fastest_before: deque[float] = deque(maxlen=_REMEMBERED)
        self._may_lose = _MOST_LOST_SECONDS
        self._forget()
        begun = time.perf_counter()
        while time.perf_counter() - begun < _CALIBRATION_SECONDS:
            self._look()

    def begin(self, subject: str) -> None:
        """Begin a measurement of `subject`, with fewer seconds to lose if the last one could not be had undisturbed."""
        self._may_lose = max(self._may_lose / 2, _LEAST_LOST_SECONDS) if self.disturbance() else _MOST_LOST_SECONDS
        self._fastest_before += [self.fastest] if math.isfinite(self.fastest) else []
        self._forget(subject)
        self._is_one_thread = torch.get_num_threads() == 1

    def undisturbed(self, name: str, stage: Callable[[], _Staged], sample: Callable[[_Staged], float]) -> float:
        """Take a sample of what is staged while this thread has the core to itself, unless that would lose too much time.

        sample: returns its seconds.
        """
        while self._is_one_thread and not self._is_long(name):
            begun = time.perf_counter()
            staged = stage()
            staged_at = time.perf_counter()
            before = self._wait_for_core()
            waited = time.perf_counter() - staged_at
            seconds = sample(staged)
            slower = max(before, self._look_after(name, self._is_alone(before)))
            self._note_length(name, seconds if self._is_alone(slower) else seconds / 2)
            # it counts where the core was not shared, or where there is no time to take it again
            if self._is_alone(slower) or self.lost + waited > self._may_lose:
                self.lost += waited
                self._slower_loops.setdefault(name, []).append(slower)
                return seconds
            self.lost += time.perf_counter() - begun
        seconds = sample(stage())
        self._note_length(name, seconds)
        return seconds

    def disturbance(self) -> str | None:
        """Say how much of what was taken of the subject since begin() others had a share in, if that is much."""
        loops = self._slower_loops.get(self._subject, [])  # judged once more: a core may turn out faster than it seemed
        shared = sum(not self._is_alone(loop) for loop in loops)
        if shared <= _MOST_SHARED * len(loops) or self._is_long(self._subject):
            return None
        slow = f"a fixed loop took more than {_SHARED} times its time"
        return f"the core is shared, or slower than it was: beside {shared / len(loops):.0%} of the samples {slow}"

    def _forget(self, subject: str = "") -> None:
        self.lost, self.fastest, self._is_one_thread = 0.0, math.inf, True
        self._subject = subject
        self._slower_loops: dict[str, list[float]] = {}  # by sample: the slower of the loops before and after it
        self._ended: Counter[tuple[str, bool]] = Counter()  # samples that began alone, by whether they ended so
        self._shortest: dict[str, float] = {}

    def _note_length(self, name: str, seconds: float) -> None:
        self._shortest[name] = min(seconds, self._shortest.get(name, math.inf))

    def _is_long(self, name: str) -> bool:
        return self._shortest.get(name, 0.0) > _LONG_SAMPLE_SECONDS

    def _wait_for_core(self) -> float:
        """Wait until this thread has the core to itself, or too much time is lost; return the seconds of the loop then."""
        begun = time.perf_counter()
        while not self._is_alone(loop := self._look()):
            if self.lost + time.perf_counter() - begun > self._may_lose:
                break
        return loop

    def _look_after(self, name: str, began_alone: bool) -> float:
        """Return the seconds of the loop after a sample, 0 if the samples themselves slow the core: it is slow after many."""
        loop = self._look()
        if began_alone:
            self._ended[name, self._is_alone(loop)] += 1
        slow_by_itself = self._ended[name, False] >= _SAMPLES_SLOW_AFTER and not self._ended[name, True]
        return 0.0 if slow_by_itself else loop

    def _look(self) -> float:
        loop = self._reference_loop()
        self.fastest = min(self.fastest, loop)
        return loop

    def _is_alone(self, loop: float) -> bool:
        return loop <= _SHARED * min((self.fastest, *self._fastest_before))


def time_reference_loop() -> float:
    """Return the seconds that the reference loop takes now."""
    begun = time.perf_counter()
    sum(_LOOP)
    return time.perf_counter() - begun


#: of a block's wall time that the calling thread may have waited to run; what it sleeps by itself is part of its kernel
_MOST_WAITING = 0.1


class WaitingMonitor(DisturbanceMonitor):
    """Watches whether the operating system kept the calling thread waiting for its turn: a block is disturbed where it did.

    Linux counts that time per thread; elsewhere there is no verdict.
    """

    def __init__(self) -> None:
        super().__init__(None)

    def begin(self) -> None:
        self._wall, self._waited = time.perf_counter(), thread_waited()

    def disturbance(self) -> str | None:
        wall, waited = time.perf_counter() - self._wall, thread_waited() - self._waited
        self.begin()
        if wall <= 0 or waited <= _MOST_WAITING * wall:
            return None
        return f"this thread waited {waited / wall:.0%} of the time for a core, which other processes used"


class CpuDisturbanceMonitor(WaitingMonitor):
    """The monitor of a CPU: a measurement is also disturbed if many of its samples had to share their core."""

    def __init__(self, contention: ContentionMonitor) -> None:
        super().__init__()
        self._contention = contention

    def begin_all(self, subject: str) -> None:
        super().begin_all(subject)
        self._contention.begin(subject)

    def anchors(self) -> dict[str, float]:
        """Return the fastest reference loop since begin_all(), which is slow if others shared the core throughout."""
        return {REFERENCE_LOOP: self._contention.fastest} if math.isfinite(self._contention.fastest) else {}

    def lost(self) -> float:
        return self._contention.lost

    def lasting_disturbance(self) -> str | None:
        return self._contention.disturbance()
