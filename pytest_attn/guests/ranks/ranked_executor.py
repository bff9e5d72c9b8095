"""A case on several ranks, as the process that judges runs and times it.

What is tested is handed whole tensors, and whole tensors come back: so it is judged by all that judges a callable of one
process, distributions, odd strides, equal calls, invariants.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn, CallableSubject, Subject
from pytest_attn.cases.case import AttentionCase, context_of
from pytest_attn.cases.executor import Executor
from pytest_attn.cases.measurement import Measurement
from pytest_attn.correctness.contract import ContractError, native_shape
from pytest_attn.diagnosis.diagnose import Locate
from pytest_attn.guests.ranks.communication import figures_of, topology_of
from pytest_attn.guests.ranks.controller_timing import RankedStopwatch, RankedWork
from pytest_attn.guests.ranks.nccl import too_few_gpus_because
from pytest_attn.guests.ranks.over_ranks import RankBackend, profile_over
from pytest_attn.guests.ranks.pool import Pool, PoolRegistry
from pytest_attn.guests.ranks.rank_faults import with_ranks
from pytest_attn.guests.ranks.rank_group import RankGroup, Tensors
from pytest_attn.guests.ranks.ranks_guest import BACKENDS
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.guests.ranks.shards import join
from pytest_attn.guests.ranks.worker_timing import threads_of_rank
from pytest_attn.latency.result import Latency
from pytest_attn.latency.timer import Mode
from pytest_attn.reports.lines import count
from pytest_attn.session.kinds import name_for_processes
from pytest_attn.session.progress import Progress
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.functions import function_label
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.kv_layout import canonical
from pytest_attn.workloads.workload import Workload


class RankedSubject(Subject):
    """A subject that is called on every rank of a team with its shards."""

    needs_all_gradients = True
    is_contained = False
    team: RankGroup
    sharding: Sharding
    _numbers: itertools.count[int]

    def declares(self, asked: Declaration, kind: str) -> Declaration:
        """Return what is declared, with a rounding of each rank's part."""
        declared = super().declares(asked, kind)
        return replace(declared, precision=profile_over(declared.profile, self.sharding.ranks))

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        layout = "thd" if self.sharding.workload.is_packed else self.layout
        gathered = partial(_gathered, inputs)

        class OverRanks(torch.autograd.Function):
            """One call of the callable on all ranks, and its backward pass."""

            @staticmethod
            def forward(ctx: Any, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
                ctx.number = number
                out, *lse = self._forward(number, {"q": q, "k": k, "v": v}, layout, backward=True)
                ctx.mark_non_differentiable(*lse)
                return (out, *lse) if self.returns_lse else out

            @staticmethod
            def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> Any:
                shards = self.team.backward(ctx.number, dout)
                return None, *(self._joined(shards, f"d{name}", layout, dout.device) for name in "qkv")

        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            number, (k, v) = next(self._numbers), gathered(k, v)
            if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
                return OverRanks.apply(number, q, k, v)  # type: ignore[no-untyped-call]
            results = self._forward(number, {"q": q, "k": k, "v": v}, layout, backward=False)
            return tuple(results) if self.returns_lse else results[0]

        return kernel

    def _forward(self, number: int, tensors: Tensors, layout: str, backward: bool) -> list[torch.Tensor]:
        shards = self.team.forward(number, tensors, backward)
        names = ("out", "lse") if self.returns_lse else ("out",)
        return [self._joined(shards, name, layout, tensors["q"].device) for name in names]

    def _joined(self, shards: list[Tensors], name: str, layout: str, device: torch.device) -> torch.Tensor:
        for rank, one in enumerate(shards):
            if name not in one:
                raise ContractError(f"rank {rank}: {name} is missing")
        shape = native_shape(name, self.sharding.workload)
        if layout == "bshd" and name != "lse":
            shape = (shape[0], shape[2], shape[1], *shape[3:])
        return join([one[name] for one in shards], name, shape, self.sharding, layout).to(device)


class RankedCallable(RankedSubject, CallableSubject):
    """A user's callable over ranks."""

    def __init__(self, callable_: CallableSubject, team: RankGroup, sharding: Sharding) -> None:
        super().__init__(callable_.user_function, callable_.name, callable_.declared)
        self.given_name = callable_.given_name
        self.team, self.sharding, self._numbers = team, sharding, itertools.count(1)


#: what it says, and is asked, as the backend
_OF_THE_BACKEND = (
    *("name", "library", "capabilities", "known_defects", "version", "precision_on", "unavailable_because"),
    "broken_because",
)


class RankedBackend(RankedSubject):
    """A backend over ranks, which computes one workload, split in one way. team: None where it is only asked what it takes."""

    def __init__(self, backend: RankBackend, team: RankGroup | None, sharding: Sharding) -> None:
        for said in _OF_THE_BACKEND:
            setattr(self, said, getattr(backend, said))
        self.backend, self.sharding, self._numbers = backend, sharding, itertools.count(1)
        if team is not None:
            self.team = team

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Ask the backend about its workload and split; other workloads would need other shards."""
        if workload != self.sharding.workload:
            return ["is asked about one workload over ranks"]
        return self.backend.refusals_over(self.sharding, machine, backward)

    def defects_on(self, workload: Workload, machine: Machine, backward: bool) -> list[KnownDefect]:
        return self.backend.defects_over(self.sharding, machine, backward) if workload == self.sharding.workload else []


def _gathered(inputs: Inputs, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values out of their pages, (batch, kv_heads, kv_len, dim): each rank puts its own into other pages."""
    if not inputs.workload.kv_pages:
        return k, v
    k, v = canonical(inputs.workload, k, v)
    return replace(inputs, k=k, v=v).gathered()


__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


class OnRanks(Executor):
    """Runs a callable on every rank of a pool, each with its shards; the test runs in each of their processes as well."""

    elsewhere = "a test with ranks compares with attn.check(fn); leave out ranks to compare an output of one process"
    is_expendable = True  # its ranks are processes of their own, and a pool that is lost is replaced
    has_deadline = True
    unnamed_because = "ran on several ranks"

    def __init__(self, item: pytest.Item, sharding: Sharding, device: str | None, session: AttentionSession) -> None:
        """Start nothing yet. device: the one that a marker names."""
        super().__init__(sharding.workload)
        self.sharding, self.ranks = sharding, sharding.ranks
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
                f" or one of {', '.join(BACKENDS)}"
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
            self._pool = pools.pool(self.ranks, self._device.type, self._settings.more["rank_timeout"])
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


# -- what `attn` has of ranks in the process that judges, where no callable over ranks is called ------------------------


def rank_of(case: AttentionCase) -> int:
    """Return 0, as of a single process."""
    return 0


def ranks_of(case: AttentionCase) -> int:
    """Return how many ranks compute the case together; 1 in a test without ranks=."""
    return _sharding_of(case).ranks


def group_of(case: AttentionCase) -> None:
    """Return no process group."""


def mesh_of(case: AttentionCase) -> None:
    """Return no DeviceMesh."""


def shards_of(case: AttentionCase) -> list[torch.Tensor]:
    """Return for each rank the positions of its query rows; int64, on the CPU."""
    return _sharding_of(case).rows


def kv_shards_of(case: AttentionCase) -> list[torch.Tensor]:
    """Return for each rank the positions of its keys."""
    return _sharding_of(case).keys


def _sharding_of(case: AttentionCase) -> Sharding:
    executor = context_of(case).executor
    return executor.sharding if isinstance(executor, OnRanks) else Sharding(executor.workload, "contiguous", 1)


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
        figures = {**where, **figures_of(stopwatch.shares(), profiled)}
        return replace(latency, more={"ranks": figures}, threads=threads)

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
