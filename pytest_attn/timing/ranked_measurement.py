"""One `attn.measure` over ranks: the p50 of the rank that takes longest, and what each rank says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from pytest_attn.latency.result import Latency
from pytest_attn.latency.timer import Mode
from pytest_attn.ranks.communication_share import figures_of, topology_of
from pytest_attn.ranks.controller_timing import RankedStopwatch, RankedWork
from pytest_attn.ranks.pool import Pool
from pytest_attn.ranks.worker_timing import threads_of_rank
from pytest_attn.reports.terminal import count
from pytest_attn.session.session import AttentionSession
from pytest_attn.timing.measurement import Measurement, TimingPlace
from pytest_attn.workloads.functions import function_label
from pytest_attn.workloads.sharding import Sharding

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


class TimedOnRanks(TimingPlace):
    """The ranks of a pool, which time a callable together, each with its shards."""

    def __init__(self, pool: Pool, sharding: Sharding) -> None:
        self._pool, self._sharding, self._ranks = pool, sharding, sharding.ranks

    def label(self, key: bool = False, kind: str = "cpu") -> str:
        """Say how many; in a key also which shards and links: others are another case."""
        ranks = count(self._ranks, "rank")
        return f" | {ranks}, {self._shard}, {topology_of(kind, self._ranks)}" if key else f", on {ranks}"

    def untimed_because(self, device: torch.device, session: AttentionSession) -> str:
        """Say that ranks share a GPU, where they do: each waits for the kernels of the others."""
        there = session.machines.machine(str(device)).device_count
        is_shared = device.type == "cuda" and there < self._ranks
        return f"{self._ranks} ranks share {count(there, 'GPU')}" if is_shared else ""

    def devices(self, device: torch.device) -> list[torch.device]:
        """Return each rank's own."""
        return [torch.device("cuda", number) for number in range(self._ranks)] if device.type == "cuda" else [device]

    def threads(self) -> int:
        """Return those of each rank."""
        return threads_of_rank()

    def contexts(self, measurement: Measurement) -> Iterator[AbstractContextManager[object]]:
        """Yield nothing: the subject is called in other processes."""
        return iter(())

    def take(self, measurement: Measurement, mode: Mode | None) -> Latency:
        """Have all ranks make their tensors, and time them at once. Raises RanksLostError, too."""
        pool, device, direction = self._pool, measurement.spec.device, measurement.direction
        cold, threads = measurement.session.settings.l2 == "cold", measurement.threads
        pool.step("begin", direction=direction, cold=cold, threads=threads or 1)
        stopwatch = RankedStopwatch(pool, device, cold, threads or 1, ramp=not pool.is_warm)
        pool.is_warm = True
        latency = stopwatch.measure(RankedWork(direction), measurement.spec.workload.id, measurement.subject.name, mode)
        profiled = pool.step("communication") if device.type == "cuda" else []
        return replace(latency, ranks=self._figures(stopwatch, profiled, device.type), threads=threads)

    def _figures(self, stopwatch: RankedStopwatch, profiled: Sequence[dict[str, float] | None], kind: str) -> dict[str, Any]:
        where = {"number": self._ranks, "shard": self._shard, "topology": topology_of(kind, self._ranks)}
        return {**where, **figures_of(stopwatch.shares(), profiled)}

    @property
    def _shard(self) -> str:
        shard = self._sharding.shard
        return shard if isinstance(shard, str) else function_label(shard)
