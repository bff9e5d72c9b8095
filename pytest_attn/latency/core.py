"""Whether other work shares the core that is timed: a fixed loop of the interpreter then takes longer.

Two threads of one core slow each other to 0.6 of their speed, for milliseconds or minutes. The other one may belong to
another virtual machine; then nothing that the operating system counts tells of it. docs/latency.md has the figures.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

#: some 70 us of the interpreter's own arithmetic, in one call, so that what traces lines of Python does not see it
_LOOP = range(6000)
#: how many times as long as it can take the loop takes where the core is shared
_SHARED = 1.25
#: seconds of a measurement that may be lost to waiting and to samples taken again, at most and at least: half as many as the
#: last time where that was in vain
_PATIENCE, _LEAST_PATIENCE = 4.0, 0.1
#: seconds of a sample from which on the loop before and after it tells too little of it
_LONG_SAMPLE = 20e-3
#: samples after each of which the core is slow slow it themselves, if they are so many: their threads still spin, say
_TRIES = 40
#: seconds in which a new core is got to know
_ACQUAINTANCE = 0.1
#: share of samples from which on the whole measurement is disturbed
_MOST_SHARED = 0.25
#: measurements after which a pace is forgotten: a clock may fall for good
_REMEMBERED = 8

_Staged = TypeVar("_Staged")


class Core:
    """The core of the calling thread: its fastest pace of late, and how much of a measurement others had a share in.

    Of several threads, which are others to each other, nothing is said. pace: returns the seconds of a fixed piece of work.
    lost: seconds of this measurement that went by in waiting for others. fastest: its fastest pace, infinite where none was
    looked at.
    """

    def __init__(self, pace: Callable[[], float] | None = None) -> None:
        self._pace = pace or seconds_of_loop
        self._before: deque[float] = deque(maxlen=_REMEMBERED)
        self._patience = _PATIENCE
        self._forget()
        begun = time.perf_counter()
        while time.perf_counter() - begun < _ACQUAINTANCE:
            self._look()

    def begin(self, subject: str) -> None:
        """Begin a measurement of `subject`, less patiently where the last one could not be had undisturbed."""
        import torch

        self._patience = max(self._patience / 2, _LEAST_PATIENCE) if self.disturbance() else _PATIENCE
        self._before += [self.fastest] if math.isfinite(self.fastest) else []
        self._forget(subject)
        self._is_one_thread = torch.get_num_threads() == 1

    def undisturbed(self, name: str, stage: Callable[[], _Staged], sample: Callable[[_Staged], float]) -> float:
        """Take a sample of what is staged while this thread has the core to itself, as far as there is patience.

        sample: returns its seconds.
        """
        while self._is_one_thread and not self._is_long(name):
            begun = time.perf_counter()
            staged = stage()
            staged_at = time.perf_counter()
            before = self._wait()
            waited = time.perf_counter() - staged_at
            seconds = sample(staged)
            pace = max(before, self._after(name, self._is_alone(before)))
            is_alone = self._is_alone(pace)
            self._shortest[name] = min(seconds if is_alone else seconds / 2, self._shortest.get(name, math.inf))
            if is_alone or self.lost + waited > self._patience:
                self.lost += waited
                self._taken.setdefault(name, []).append(pace)
                return seconds
            self.lost += time.perf_counter() - begun
        seconds = sample(stage())
        self._shortest[name] = min(seconds, self._shortest.get(name, math.inf))
        return seconds

    def disturbance(self) -> str | None:
        """Say how much of what was taken of the subject since begin() others had a share in, if that is much."""
        taken = self._taken.get(self._subject, [])  # judged once more: a core may turn out faster than it seemed
        shared = sum(not self._is_alone(pace) for pace in taken)
        if shared <= _MOST_SHARED * len(taken) or self._is_long(self._subject):
            return None
        slow = f"a fixed loop took more than {_SHARED} times its time"
        return f"the core is shared, or slower than it was: beside {shared / len(taken):.0%} of the samples {slow}"

    def _forget(self, subject: str = "") -> None:
        self.lost, self.fastest, self._is_one_thread = 0.0, math.inf, True
        self._subject = subject
        self._taken: dict[str, list[float]] = {}  # the slower pace, before or after, of each sample
        self._ended: Counter[tuple[str, bool]] = Counter()
        self._shortest: dict[str, float] = {}

    def _is_long(self, name: str) -> bool:
        return self._shortest.get(name, 0.0) > _LONG_SAMPLE

    def _wait(self) -> float:
        """Wait until this thread has the core to itself, as far as there is patience; return its pace then."""
        begun = time.perf_counter()
        while not self._is_alone(pace := self._look()):
            if self.lost + time.perf_counter() - begun > self._patience:
                break
        return pace

    def _after(self, name: str, began_alone: bool) -> float:
        """Return the pace after a sample, 0 where the core is slow after each of many: then they slow it themselves."""
        pace = self._look()
        if began_alone:
            self._ended[name, self._is_alone(pace)] += 1
        is_own = self._ended[name, False] >= _TRIES and not self._ended[name, True]
        return 0.0 if is_own else pace

    def _look(self) -> float:
        pace = self._pace()
        self.fastest = min(self.fastest, pace)
        return pace

    def _is_alone(self, pace: float) -> bool:
        return pace <= _SHARED * min((self.fastest, *self._before))


def seconds_of_loop() -> float:
    """Return how long the loop takes now."""
    begun = time.perf_counter()
    sum(_LOOP)
    return time.perf_counter() - begun
