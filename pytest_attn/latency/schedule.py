"""When a measurement has blocks enough: its interval is narrow, or another block would end too late."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from pytest_attn.latency.statistics import median_interval

#: numbers of blocks after which the interval is looked at; after the last one a measurement ends
LOOKS = (6, 10, 16, 24)
_FEWEST_BLOCKS = 3
#: half-width of the 95 % interval, as a share of the p50, at which a measurement ends, by kind of device
WANTED_HALF_WIDTH = {"cuda": 0.002, "cpu": 0.005}
#: the same for kernels below so many seconds on a GPU: where their tensors lie moves them as far, in all blocks alike, so that
#: more blocks would cost time and tell nothing
_SHORT_SECONDS, _WANTED_OF_SHORT = 100e-6, 0.004
#: seconds of wall time, by kind of device, within which the blocks end, as far as the shortest of them tells
SECONDS = {"cuda": 0.3, "cpu": 0.8}
#: seconds that a measurement on a GPU takes in all, but for compilers and waiting for the clock, and that its blocks may take
#: in any case
_ALL_SECONDS, _FEWEST_SECONDS = 0.45, 0.1


class Schedule:
    """Says before each block of a measurement whether to take it.

    clock: returns seconds. seconds: of that clock, within which the blocks end. half_width: which is narrow enough, of the
    interval of block medians, as a share of their median.
    """

    def __init__(self, clock: Callable[[], float], seconds: float, half_width: float) -> None:
        self._clock, self._seconds, self._half_width = clock, seconds, half_width
        self._begun, self._shortest = clock(), math.inf

    def wants_another(self, blocks: Sequence[Sequence[float]]) -> bool:
        """Whether to take another block, which then begins. blocks: the kernel's samples in those that were taken."""
        if blocks and self._is_over(blocks):
            return False
        self._block_begun = self._clock()
        return True

    def _is_over(self, blocks: Sequence[Sequence[float]]) -> bool:
        ended = self._clock()
        self._shortest = min(self._shortest, ended - self._block_begun)  # the others were repeated
        is_late = ended + self._shortest - self._begun > self._seconds
        if len(blocks) >= LOOKS[-1] or (is_late and len(blocks) >= _FEWEST_BLOCKS):
            return True
        return len(blocks) in LOOKS and is_narrow(blocks, self._half_width)


def is_narrow(blocks: Sequence[Sequence[float]], half_width: float) -> bool:
    """Whether the interval of the block medians has at most this half-width, as a share of their median."""
    medians = [median(block) for block in blocks]
    return median_interval(medians).half_width <= half_width * median(medians)


def wanted_half_width(kind: str, seconds: float) -> float:
    """Return the half-width at which a measurement on a kind of device ends, for a call of so many seconds."""
    if kind == "cuda" and seconds < _SHORT_SECONDS:
        return _WANTED_OF_SHORT
    return WANTED_HALF_WIDTH.get(kind, WANTED_HALF_WIDTH["cpu"])


def seconds_for_blocks(kind: str, spent: float) -> float:
    """Return how long the blocks of a measurement may take that has taken so many seconds until now."""
    most = SECONDS.get(kind, SECONDS["cpu"])
    return min(most, max(_FEWEST_SECONDS, _ALL_SECONDS - spent)) if kind == "cuda" else most
