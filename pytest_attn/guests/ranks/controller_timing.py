"""A callable over ranks, timed as a kernel of one process is: a sample is over when the last rank is through with it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from pytest_attn.backends.machine import usable_cores
from pytest_attn.guests.ranks.communication import RankTimes, SharedSample
from pytest_attn.guests.ranks.rank_group import RankGroup
from pytest_attn.latency.anchors import NOT_BESIDE_ALL, Anchor, anchor_hashes
from pytest_attn.latency.cuda_timer import (
    ATTEMPTS,
    OWN_EVENTS_SECONDS,
    SHORTEST_BACKLOG_SECONDS,
    BacklogError,
    calls_per_sample,
    choose_mode,
    longer_backlog,
    too_slow,
    wanted_backlog,
)
from pytest_attn.latency.disturbance import DisturbanceMonitor
from pytest_attn.latency.protocol import SUBJECT, Stopwatch
from pytest_attn.latency.timer import SHORTEST_HOST_SAMPLE, Item, Mode, Plan, Timer
from pytest_attn.latency.work import LatencyDirection, Work

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: calls that warm up, and samples from which the seconds of a call are estimated
_FIRST_CALLS, _ESTIMATES = 3, 3
#: how long devices rest after a block, as a multiple of its time
_REST = 1.0


class RankedWork(Work):
    """A direction of a callable that ranks compute; its tensors, and what is kept of its results, are theirs."""

    def __init__(self, direction: LatencyDirection, steps: RankGroup) -> None:
        self.direction, self._steps = direction, steps

    def verify_kept(self, is_last: bool = False) -> None:
        """Have each rank look at the result that it kept. Raises StaleError."""
        self._steps.step("verify", is_last=is_last)


class RankedTimer(Timer):
    """The clocks of all ranks. device: whether by those of GPUs, where they can be; by the hosts' else.

    taken: what was seen of the callable since it was planned.
    """

    def __init__(self, steps: RankGroup, device: bool) -> None:
        self._steps, self._by_device = steps, device
        self._backlog = SHORTEST_BACKLOG_SECONDS
        self.taken: list[SharedSample] = []

    def plan(self, work: Work, mode: Mode | None = None) -> Plan:
        """Look at the results of first calls, and choose how many share a sample; on a GPU also whose clock counts."""
        for _ in range(_FIRST_CALLS):
            self._steps.step("call")
        if self._by_device and work.direction == "forward":
            self._steps.step("behind")
        device = None if mode == "host" or not self._by_device else self._device_seconds()
        launch = self._backlog if device is None else self._launch
        if device is None or choose_mode(mode, launch, device) == "host":
            self._by_device = False
            ranks = self._samples([SUBJECT] * _ESTIMATES, 1)
            seconds = min(max(rank[at].seconds for rank in ranks) for at in range(_ESTIMATES))
            return self._plan("host", max(1, math.ceil(SHORTEST_HOST_SAMPLE / max(seconds, 1e-9))), seconds, seconds)
        chosen: Mode = "events" if device >= OWN_EVENTS_SECONDS else "batched"
        return self._plan(chosen, calls_per_sample(device, chosen), device, launch)

    def block(self, items: Sequence[Item]) -> list[float]:
        """Return for each item the seconds of a call on the rank that took longest."""
        begun = time.perf_counter()
        calls = max((item.calls for item in items if item.name == SUBJECT), default=1)
        ranks = self._samples([item.name for item in items], calls)
        shared = [SharedSample(samples) for samples in zip(*ranks, strict=True)]
        self.taken += [one for one, item in zip(shared, items, strict=True) if item.name == SUBJECT]
        if self._by_device:
            time.sleep(_REST * (time.perf_counter() - begun))
        return [one.seconds for one in shared]

    def peak_memory(self, work: Work) -> int | None:
        if not self._by_device:
            return None
        self._steps.step("peak")  # whose first call may leave workspaces behind
        found = [peak for peak in self._steps.step("peak") if peak is not None]
        return max(found, default=None)

    def by_hosts(self) -> RankedTimer:
        """Return the timer that uses the hosts' clocks."""
        return RankedTimer(self._steps, device=False)

    def _plan(self, mode: Mode, calls: int, seconds: float, launch: float) -> Plan:
        self.taken = []
        renew: Callable[[], object] = partial(self._steps.step, "renew", clock="device" if self._by_device else "host")
        return Plan(mode, calls, seconds, launch, lambda: lambda: None, renew)

    def _device_seconds(self) -> float | None:
        """Return a call's seconds on the slowest device, None where devices cannot be kept waiting for their hosts."""
        try:
            ranks = self._samples([SUBJECT] * _ESTIMATES, 1)
        except BacklogError:
            return None
        self._launch = self._enqueued / _ESTIMATES
        return median(max(rank[at].seconds for rank in ranks) for at in range(_ESTIMATES))

    def _samples(self, names: list[str], calls: int) -> list[list[RankTimes]]:
        """Return by rank the samples of a block. Raises BacklogError where a device does not sleep until all is enqueued."""
        for _ in range(ATTEMPTS):
            found = self._steps.step(
                "block", names=names, calls=calls, clock="device" if self._by_device else "host", backlog=self._backlog
            )
            self._enqueued = max(rank["enqueued"] for rank in found)
            used, self._backlog = self._backlog, wanted_backlog(self._enqueued)
            if all(rank["held"] for rank in found):
                return [[RankTimes(*sample) for sample in rank["samples"]] for rank in found]
            self._backlog = longer_backlog(used, self._backlog)
        raise BacklogError(too_slow(len(names), self._enqueued))


class RankedMonitor(DisturbanceMonitor):
    """Watches all ranks: a disturbed rank disturbs the sample.

    share: why ranks cannot have a core each, "" where they can.
    """

    def __init__(self, steps: RankGroup, share: str = "") -> None:
        self._steps, self._share = steps, share
        self._state: dict[str, Any] = {}
        super().__init__(None)

    def begin_all(self, subject: str) -> None:
        super().begin_all(subject)
        self.notes += [self._share] if self._share else []

    def begin(self) -> None:
        """Have all ranks look from now on; the GPUs' state is that of rank 0's."""
        self._state = self._steps.step("watch")[0]

    def disturbance(self) -> str | None:
        """Say which rank was disturbed, and by what; None where ranks wait for cores as they share them."""
        found = self._steps.step("disturbance")
        self.notes[:] = dict.fromkeys((*self.notes, *(note for one in found for note in one["notes"])))
        said = [f"rank {rank}: {one['disturbance']}" for rank, one in enumerate(found) if one["disturbance"]]
        return None if self._share else next(iter(said), None)

    def conditions(self) -> dict[str, int | float | str]:
        return self._state


class RankedStopwatch(Stopwatch):
    """Times what ranks compute together, by the protocol of one process."""

    timer: RankedTimer

    def __init__(self, steps: RankGroup, device: torch.device, cold: bool, threads: int, ramp: bool) -> None:
        """threads: of each rank. ramp: whether a GPU has been idle since it was started."""
        self._steps, self.device, self.cold = steps, device, cold and device.type == "cuda"
        self.timer = RankedTimer(steps, device=device.type == "cuda")
        self.monitor = RankedMonitor(steps, _shared_cores(steps, threads))
        self.anchors: dict[str, Anchor] = {
            name: Anchor(name, lambda: None) for name in anchor_hashes(device.type) if name not in NOT_BESIDE_ALL
        }
        self._rested = 0.0
        self._used = self.timer
        if device.type == "cuda" and ramp:
            steps.step("warm", ramp=True)

    def shares(self) -> list[SharedSample]:
        """Return the samples of the callable that were taken, each with what all ranks say."""
        return self._used.taken

    def _timer_of(self, plan: Plan) -> Timer:
        if self.device.type == "cuda":
            self._steps.step("warm", ramp=False)
        self._used = self.timer
        return self.timer

    def _host_timer(self) -> Timer:
        self._used = self.timer.by_hosts()
        return self._used


def _shared_cores(steps: RankGroup, threads: int) -> str:
    cores = usable_cores()
    if steps.kind != "cpu" or steps.ranks * threads <= cores:
        return ""
    return f"{steps.ranks} ranks of {threads} thread{'s' * (threads > 1)} share {cores} core{'s' * (cores > 1)}"
