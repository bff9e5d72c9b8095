"""One `attn.measure` over ranks: the p50 of the rank that takes longest, and what each rank says of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_attn.latency.result import Latency
from pytest_attn.latency.timer import Mode
from pytest_attn.ranks.pool import Pool
from pytest_attn.ranks.shares import figures_of
from pytest_attn.ranks.timed import RankedStopwatch, RankedWork
from pytest_attn.ranks.timing import threads_of_rank
from pytest_attn.ranks.topology import topology_of
from pytest_attn.reports.terminal import count
from pytest_attn.timing.measurement import Measurement
from pytest_attn.workloads.functions import function_label
from pytest_attn.workloads.sharding import Sharding

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


@dataclass(frozen=True, kw_only=True)
class RankedMeasurement(Measurement):
    """A callable that the ranks of a pool compute together, each with its shards."""

    pool: Pool
    sharding: Sharding

    @property
    def name(self) -> str:
        """What is timed, for messages."""
        return f"{super().name}, on {count(self.sharding.ranks, 'rank')}"

    @property
    def key(self) -> str:
        """The key of its baseline: another number of ranks, other shards, or other links, are another case."""
        ranks = self.sharding.ranks
        links = topology_of(self.spec.device.type, ranks)
        return f"{super().key} | {count(ranks, 'rank')}, {self._shard}, {links}"

    @property
    def untimed_because(self) -> str:
        """That ranks share a GPU, where they do: each waits for the kernels of the others."""
        there = self.session.machines.machine(str(self.spec.device)).device_count
        is_shared = self.spec.device.type == "cuda" and there < self.sharding.ranks
        return f"{self.sharding.ranks} ranks share {count(there, 'GPU')}" if is_shared else ""

    @property
    def devices(self) -> list[torch.device]:
        """Each rank's own."""
        import torch

        if self.spec.device.type != "cuda":
            return [self.spec.device]
        return [torch.device("cuda", number) for number in range(self.sharding.ranks)]

    def time(self, mode: Mode | None) -> Latency:
        """Time the callable on all ranks at once. Raises as `Measurement.time` does, and RanksLostError."""
        with ExitStack() as stack:
            self._lock_clocks(stack)
            return self._take(mode)

    def _take(self, mode: Mode | None) -> Latency:
        """Have all ranks make their tensors, and time them."""
        pool, device = self.pool, self.spec.device
        cold = self.session.settings.l2 == "cold"
        pool.step("begin", direction=self.direction, cold=cold, threads=self._threads or 1)
        stopwatch = RankedStopwatch(pool, device, cold, self._threads or 1, ramp=not pool.is_warm)
        pool.is_warm = True
        latency = stopwatch.measure(RankedWork(self.direction), self.spec.workload.id, self.subject.name, mode)
        profiled = pool.step("communication") if device.type == "cuda" else []
        return replace(latency, ranks=self._figures(stopwatch, profiled), threads=self._threads)

    def _figures(self, stopwatch: RankedStopwatch, profiled: Sequence[dict[str, float] | None]) -> dict[str, Any]:
        ranks = self.sharding.ranks
        where = {"number": ranks, "shard": self._shard, "topology": topology_of(self.spec.device.type, ranks)}
        return {**where, **figures_of(stopwatch.shares(), profiled)}

    @property
    def _shard(self) -> str:
        shard = self.sharding.shard
        return shard if isinstance(shard, str) else function_label(shard)

    @property
    def _threads(self) -> int | None:
        """Of each rank."""
        if self.spec.device.type != "cpu":
            return None
        return self.session.settings.threads or threads_of_rank()
