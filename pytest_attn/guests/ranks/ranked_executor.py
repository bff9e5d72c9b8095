"""A case on several ranks, as the process that judges runs and times it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from pytest_attn.backends.builtin import OVER_RANKS
from pytest_attn.backends.over_ranks import RankBackend
from pytest_attn.backends.subject import CallableSubject, Subject
from pytest_attn.cases.executor import Executor
from pytest_attn.cases.measurement import Measurement
from pytest_attn.diagnosis.diagnose import Locate
from pytest_attn.diagnosis.ranks import with_ranks
from pytest_attn.guests.ranks.pool import Pool, PoolRegistry
from pytest_attn.guests.ranks.ranked_measurement import RankedMeasurement
from pytest_attn.guests.ranks.ranked_subject import RankedBackend, RankedCallable
from pytest_attn.session.devices import too_few_gpus_because
from pytest_attn.session.kinds import name_for_processes
from pytest_attn.session.progress import Progress
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.sharding import Sharding


class OnRanks(Executor):
    """Runs a callable on every rank of a pool, each with its shards; the test runs in each of their processes as well."""

    is_here = False
    is_expendable = True  # its ranks are processes of their own, and a pool that is lost is replaced
    has_deadline = True
    unnamed_because = "ran on several ranks"

    def __init__(self, item: pytest.Item, sharding: Sharding, device: str | None, session: AttentionSession) -> None:
        """Start nothing yet. device: the one that a marker names."""
        super().__init__(sharding)
        self._item, self._settings = item, session.settings
        self._device, self._machine = session.machines.device(device), session.machines.machine(device)
        self._pool: Pool | None = None
        self._placed: tuple[Subject, ...] = ()  # what was placed for this judgment, and what is called in its place

    def skip_reason(self) -> str | None:
        """Say that this device, torch or machine has no ranks, or that the workload cannot be split so."""
        device = self._device
        if device.type not in ("cpu", "cuda"):
            return f"ranks run on cpu and cuda, not on {device.type}"
        if not dist.is_available() or not (dist.is_gloo_available() if device.type == "cpu" else dist.is_nccl_available()):
            return f"this torch has no {'gloo' if device.type == 'cpu' else 'NCCL'}, which ranks on {device.type} need"
        return too_few_gpus_because(self.ranks, self._machine) or self.sharding.refused_because()

    def asked(self, subject: Subject | None) -> Subject | None:
        return RankedBackend(subject, None, self.sharding) if isinstance(subject, RankBackend) else subject

    def contains(self, subject: Subject) -> bool:
        return False

    def place(self, subject: Subject, progress: Progress) -> Subject:
        """Return what hands whole tensors to the ranks, once these have come to the judgment.

        Raises ValueError for what computes in one process only, RanksLostError.
        """
        __tracebackhide__ = True
        if any(subject is one for one in self._placed):
            return self._placed[1]
        if not isinstance(subject, CallableSubject | RankBackend):
            raise ValueError(
                f"{subject.name} computes in one process; with ranks, attn.check takes a callable of (q, k, v),"
                f" or one of {', '.join(OVER_RANKS)}"
            )
        if subject.is_approximate and isinstance(subject, CallableSubject):
            raise ValueError(
                "ranks: a callable that quantizes inside is judged in one process; leave out dequantized= or ranks="
            )
        with progress.during(f"starting {self.ranks} ranks", self.sharding.workload.id):
            pool = self._come_to_judgment()
        ranked: type[RankedCallable | RankedBackend] = RankedBackend if isinstance(subject, RankBackend) else RankedCallable
        placed = ranked(subject, pool, self.sharding)  # type: ignore[arg-type]
        self._placed = subject, placed
        return placed

    def leave(self, result: object) -> None:
        self._placed = ()
        self._ready().leave(result)

    @property
    def locate(self) -> Locate:
        return partial(with_ranks, sharding=self.sharding)

    def measurement(self, **facts: Any) -> Measurement:
        return RankedMeasurement(**facts, pool=self._ready, sharding=self.sharding)

    def _come_to_judgment(self) -> Pool:
        """Return the pool, whose ranks have come to their next judgment. Raises RanksLostError where they do not."""
        if self._pool is None:
            pools = PoolRegistry.of(self._item.config)
            self._pool = pools.pool(self.ranks, self._device.type, self._settings.rank_timeout)
            self._pool.run(name_for_processes(self._item))
        self._pool.await_callable()
        return self._pool

    def finish(self) -> None:
        """End the case on the ranks; fail the test where that of a rank has failed after its last judgment."""
        __tracebackhide__ = True
        if self._pool is not None and (wrong := self._pool.finish()):
            pytest.fail(wrong, pytrace=False)

    def _ready(self) -> Pool:
        assert self._pool is not None
        return self._pool
