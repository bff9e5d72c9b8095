"""The measurement of a callable over ranks: all of them at once, each with its shards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from pytest_attn.cases.measurement import Measurement
from pytest_attn.guests.ranks.communication import figures_of, topology_of
from pytest_attn.guests.ranks.controller_timing import RankedStopwatch, RankedWork
from pytest_attn.guests.ranks.pool import Pool
from pytest_attn.guests.ranks.worker_timing import threads_of_rank
from pytest_attn.latency.result import Latency
from pytest_attn.latency.timer import Mode
from pytest_attn.reports.lines import count
from pytest_attn.workloads.functions import function_label
from pytest_attn.workloads.sharding import Sharding

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


@dataclass(frozen=True, kw_only=True)
class RankedMeasurement(Measurement):
    """A callable that the ranks of a pool time together. pool: returns it, once ranks have come to their judgment."""

    pool: Callable[[], Pool]
    sharding: Sharding

    @property
    def name(self) -> str:
        return f"{super().name}, on {self._ranks}"

    @property
    def key(self) -> str:
        """The key of its baseline, with the shards and links: others are another case."""
        return f"{super().key} | {self._ranks}, {self._shard}, {self._topology}"

    @property
    def untimed_because(self) -> str | None:
        """Reason for which it cannot be timed: ranks share a GPU, where each waits for the kernels of the others."""
        device, number = self.spec.device, self.sharding.ranks
        there = self.session.machines.machine(str(device)).device_count
        is_shared = device.type == "cuda" and there < number
        return f"{number} ranks share {count(there, 'GPU')}" if is_shared else None

    @property
    def devices(self) -> list[torch.device]:
        device = self.spec.device
        return [torch.device("cuda", rank) for rank in range(self.sharding.ranks)] if device.type == "cuda" else [device]

    def _own_threads(self) -> int:
        return threads_of_rank()

    def _contexts(self) -> Iterator[AbstractContextManager[object]]:
        return iter(())

    def _take(self, mode: Mode | None) -> Latency:
        """Have all ranks make their tensors, and time them at once. Raises RanksLostError, too."""
        pool, device = self.pool(), self.spec.device
        cold, threads = self.session.settings.l2 == "cold", self.threads
        seed = random.SystemRandom().getrandbits(64)
        pool.step("begin", direction=self.direction, cold=cold, threads=threads or 1, seed=seed)
        stopwatch = RankedStopwatch(pool, device, cold, threads or 1, ramp=not pool.is_warm)
        pool.is_warm = True
        work = RankedWork(self.direction, pool)
        latency = stopwatch.measure(work, self.spec.workload.id, self.subject.name, mode)
        profiled = pool.step("communication") if device.type == "cuda" else []
        where = {"number": self.sharding.ranks, "shard": self._shard, "topology": self._topology}
        return replace(latency, ranks={**where, **figures_of(stopwatch.shares(), profiled)}, threads=threads)

    @property
    def _ranks(self) -> str:
        return count(self.sharding.ranks, "rank")

    @property
    def _topology(self) -> str:
        return topology_of(self.spec.device.type, self.sharding.ranks)

    @property
    def _shard(self) -> str:
        shard = self.sharding.shard
        return shard if isinstance(shard, str) else function_label(shard)
