"""Whether other work shares the core that is timed: a fixed loop of the interpreter, the reference loop, then takes longer.

Two threads of one core slow each other to 0.6 of their speed, for milliseconds or minutes. The other one may belong to
another virtual machine; then nothing that the operating system counts tells of it.
docs/results/latency-cpu.md has the figures.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

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
        import torch

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
            if self._accepts(slower, waited):
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

    def _accepts(self, slower: float, waited: float) -> bool:
        """Whether a sample counts: the core was not shared, or there is no time to take it again.

        slower: of the loops before and after it. waited: seconds of waiting for the core before it.
        """
        return self._is_alone(slower) or self.lost + waited > self._may_lose

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
