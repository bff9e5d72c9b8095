"""Whether other work shares the core that is timed: a fixed loop of the interpreter then takes longer.

Two threads of one core slow each other to 0.6 of their speed, for milliseconds or minutes. The other one may belong to
another virtual machine; then nothing that the operating system counts tells of it. docs/latency.md has the figures.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

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


class Core:
    """The core of the calling thread: its fastest pace so far, and how much of a measurement others had a share in.

    Of several threads, which are others to each other, nothing is said. pace: returns the seconds of a fixed piece of work.
    lost: seconds of this measurement that went by in waiting for others. fastest: its fastest pace, infinite where none was
    looked at.
    """

    def __init__(self, pace: Callable[[], float] | None = None) -> None:
        self._pace = pace or seconds_of_loop
        self._known = math.inf  # the fastest of all measurements
        self._patience = _PATIENCE
        self._forget()
        begun = time.perf_counter()
        while time.perf_counter() - begun < _ACQUAINTANCE:
            self._is_alone()

    def begin(self, subject: str) -> None:
        """Begin a measurement of `subject`, less patiently where the last one could not be had undisturbed."""
        import torch

        self._patience = max(self._patience / 2, _LEAST_PATIENCE) if self.disturbance() else _PATIENCE
        self._forget(subject)
        self._is_one_thread = torch.get_num_threads() == 1

    def undisturbed(self, name: str, sample: Callable[[], float]) -> float:
        """Take a sample, which returns its seconds, while this thread has the core to itself, as far as there is patience."""
        while self._is_one_thread and not self._is_long(name):
            begun = time.perf_counter()
            is_alone = self._wait(begun)
            waited = time.perf_counter() - begun
            seconds = self._take(name, sample)
            is_alone = is_alone and self._stayed_alone(name)
            if is_alone or self.lost + waited > self._patience:
                self.lost += waited
                self._taken[name, is_alone] += 1
                return seconds
            self.lost += time.perf_counter() - begun
        return self._take(name, sample)

    def disturbance(self) -> str | None:
        """Say how much of what was taken of the subject since begin() others had a share in, if that is much."""
        alone, shared = (self._taken[self._subject, is_alone] for is_alone in (True, False))
        if shared <= _MOST_SHARED * (alone + shared) or self._is_long(self._subject):
            return None
        share = shared / (alone + shared)
        slow = f"a fixed loop took more than {_SHARED} times its time"
        return f"other work shares the core: beside {share:.0%} of the samples {slow}"

    def _forget(self, subject: str = "") -> None:
        self.lost, self.fastest, self._is_one_thread = 0.0, math.inf, True
        self._subject = subject
        self._taken: Counter[tuple[str, bool]] = Counter()
        self._ended: Counter[tuple[str, bool]] = Counter()
        self._shortest: dict[str, float] = {}

    def _take(self, name: str, sample: Callable[[], float]) -> float:
        seconds = sample()
        self._shortest[name] = min(seconds, self._shortest.get(name, seconds))
        return seconds

    def _is_long(self, name: str) -> bool:
        return self._shortest.get(name, 0.0) > _LONG_SAMPLE

    def _wait(self, begun: float) -> bool:
        """Wait until this thread has the core to itself; return whether it has."""
        while not self._is_alone():
            if self.lost + time.perf_counter() - begun > self._patience:
                return False
        return True

    def _stayed_alone(self, name: str) -> bool:
        """Whether nothing came in between: where the core is slow after each of many samples, they slow it themselves."""
        is_alone = self._is_alone()
        self._ended[name, is_alone] += 1
        return is_alone or (self._ended[name, False] >= _TRIES and not self._ended[name, True])

    def _is_alone(self) -> bool:
        seconds = self._pace()
        self.fastest = min(self.fastest, seconds)
        self._known = min(self._known, seconds)
        return seconds <= _SHARED * self._known


def seconds_of_loop() -> float:
    """Return how long the loop takes now."""
    begun = time.perf_counter()
    sum(_LOOP)
    return time.perf_counter() - begun
