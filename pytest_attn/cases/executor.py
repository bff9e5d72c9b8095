"""Where a callable runs: in this process, or on several ranks. What is judged, and how, is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from pytest_attn.backends.builtin import OVER_RANKS
from pytest_attn.backends.over_ranks import RankBackend
from pytest_attn.backends.subject import CallableSubject, Subject
from pytest_attn.cases.judgment import Evaluator, Starting
from pytest_attn.cases.measurement import TimedOnRanks, TimingPlace
from pytest_attn.guests.ranks.pool import Pool, PoolRegistry
from pytest_attn.guests.ranks.ranked_subject import RankedBackend, RankedCallable
from pytest_attn.session.devices import too_few_gpus_because
from pytest_attn.session.kinds import name_for_processes
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.sharding import Sharding
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which not every build of torch has
    from torch.distributed.device_mesh import DeviceMesh

#: `CaseRun.conclude`
Conclude = Callable[[Evaluator[Any]], Any]


class Executor:
    """Runs a callable in this process.

    sharding: which rows and keys each rank has; here one has all.
    """

    #: the number of this process among the ranks; 0 where it judges what the others compute
    rank = 0
    group: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    #: whether this is the process that computes, so that an output of the test's own is that of the whole workload
    is_here = True
    #: whether what runs there may be lost without this process
    is_expendable = False
    #: whether calls there have a time limit of their own
    has_deadline = False
    #: why a saved failure cannot name the callable of a test; None where it can
    unnamed_because: str | None = None

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding

    @classmethod
    def in_process(cls, workload: Workload) -> Executor:
        """Return the one of this process."""
        return cls(Sharding(workload, "contiguous", 1))

    @property
    def ranks(self) -> int:
        """How many processes compute the case together."""
        return self.sharding.ranks

    def asked(self, subject: Subject | None) -> Subject | None:
        """Return what is asked whether it takes the case there."""
        return subject

    def place(self, subject: Subject, conclude: Conclude) -> Subject:
        """Return what computes there what a subject computes. conclude: of the case, for what goes wrong meanwhile."""
        return subject

    def leave(self, result: object) -> None:
        """Let the test go on there, after a judgment that passed with this result."""

    @property
    def timing(self) -> TimingPlace:
        """Where a subject is timed that was placed."""
        return TimingPlace()


# -- on ranks ----------------------------------------------------------------------------------------------------------


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

    def place(self, subject: Subject, conclude: Conclude) -> Subject:
        """Return what hands whole tensors to the ranks, once these have come to the judgment.

        Raises ValueError for what computes in one process only.
        """
        __tracebackhide__ = True
        if not isinstance(subject, CallableSubject | RankBackend):
            raise ValueError(
                f"{subject.name} computes in one process; with ranks, attn.check takes a callable of (q, k, v),"
                f" or one of {', '.join(OVER_RANKS)}"
            )
        if subject.is_approximate and isinstance(subject, CallableSubject):
            raise ValueError(
                "ranks: a callable that quantizes inside is judged in one process; leave out dequantized= or ranks="
            )
        doing = f"starting {self.ranks} ranks"
        pool: Pool = conclude(Starting(subject, self.sharding.workload, doing, self._come_to_judgment))
        if isinstance(subject, RankBackend):
            return RankedBackend(subject, pool, self.sharding)
        return RankedCallable(subject, pool, self.sharding)

    def leave(self, result: object) -> None:
        self._ready().leave(result)

    @property
    def timing(self) -> TimedOnRanks:
        return TimedOnRanks(self._ready(), self.sharding)

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
