"""The clocks of a rank: each begins a sample together with those of the other ranks, and all make the same calls."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_attn.backends.contexts import no_collection
from pytest_attn.latency.cuda_timer import CudaTimer
from pytest_attn.latency.timer import Item
from pytest_attn.latency.work import Work, wait
from pytest_attn.ranks.collectives import Collectives
from pytest_attn.ranks.shares import RankTimes
from pytest_attn.ranks.start_barrier import StartBarrier

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


class Taken(NamedTuple):
    """A block of samples. enqueued: seconds of launching all. held: whether the device slept until then, and they count."""

    samples: list[RankTimes]
    enqueued: float = 0.0
    held: bool = True


class RankClock(ABC):
    """Takes a block of samples on one rank."""

    @abstractmethod
    def block(self, items: Sequence[Item], backlog: float) -> Taken:
        """Take one sample of each item. backlog: seconds for which a device is kept waiting for its host."""


class HostClock(RankClock):
    """The host's clock around calls, the device's work included, from a moment that all ranks have in common."""

    def __init__(self, device: torch.device, barrier: StartBarrier, collectives: Collectives) -> None:
        self._device, self._collectives = device, collectives
        self._start = collectives.watching("the timer's barrier", "", barrier.wait)

    def block(self, items: Sequence[Item], backlog: float = 0.0) -> Taken:
        """Take one sample of each item."""
        del backlog
        with no_collection():
            return Taken([self.sample(item) for item in items])

    def sample(self, item: Item) -> RankTimes:
        """Stage a call, meet the others, and time it."""
        call = item.stage()
        wait(self._device)
        late = self._start()
        seconds, inside = self.timed(call)
        return RankTimes(seconds / item.calls, inside / item.calls, late)

    def timed(self, call: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds of a call, and those of them that it spent in collectives."""
        inside, begun = self._collectives.seconds, time.perf_counter_ns()
        call()
        wait(self._device)
        return (time.perf_counter_ns() - begun) * 1e-9, self._collectives.seconds - inside


class DeviceClock(RankClock):
    """CUDA events behind a sleeping device; a small all-reduce before the first event of each sample aligns all devices."""

    def __init__(self, device: torch.device, cold: bool, group: ProcessGroup) -> None:
        self._timer = _AlignedTimer(device, cold, group)

    def block(self, items: Sequence[Item], backlog: float) -> Taken:
        """Enqueue a sample of each item once: whether all devices still slept is for the judge to say."""
        attempt = self._timer.attempt(items, backlog)
        return Taken([RankTimes(seconds) for seconds in attempt.seconds], attempt.enqueued, attempt.held)

    def renew(self, work: Work) -> None:
        """Give a work other memory, and its data another sign."""
        self._timer.move(work)


class _AlignedTimer(CudaTimer):
    """A timer whose samples begin when the device of the last rank comes to them."""

    def __init__(self, device: torch.device, cold: bool, group: ProcessGroup) -> None:
        import torch

        super().__init__(device, cold)
        self._group, self._word = group, torch.zeros(1, device=device)

    def _flush(self) -> None:
        import torch.distributed as dist

        super()._flush()
        dist.all_reduce(self._word, group=self._group)
