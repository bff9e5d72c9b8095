"""The steps of a rank while one callable is timed over all ranks, which all of them make in the same order.

A callable meets the other ranks in its collectives, so no rank may call it once more, or once less, than the others. The judge
decides what comes next (ranks/controller_timing.py); nothing here depends on what this rank alone has seen.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from pytest_attn.backends.contexts import no_collection
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.machine import wait
from pytest_attn.correctness.contract import native_shape, plain
from pytest_attn.correctness.reference import Held
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.ranks.communication import Collectives, RankTimes, communication_of
from pytest_attn.guests.ranks.over_ranks import profile_over
from pytest_attn.guests.ranks.rank_server import Rank, StartBarrier
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.guests.ranks.shards import RankCache, cut, parts_of, whole_of
from pytest_attn.latency.anchors import anchor_item, make_anchors
from pytest_attn.latency.cuda_timer import CudaTimer
from pytest_attn.latency.disturbance import DisturbanceMonitor, WaitingMonitor
from pytest_attn.latency.exact_results import Attention
from pytest_attn.latency.fresh_data import APART, Places, RandomPool, TensorSets
from pytest_attn.latency.kernel_work import KernelWork, of_timed
from pytest_attn.latency.protocol import SUBJECT, Warmer
from pytest_attn.latency.timer import Item, several
from pytest_attn.latency.work import DISTRIBUTION, LatencyDirection, first_of, peak_of, verified
from pytest_attn.processes.worker import own_processes
from pytest_attn.workloads.dtypes import movable
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.kv_layout import copies_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which not every build of torch has

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: sets of tensors that calls take in turn, at least: each call of a sample has its own
_FEWEST_SETS = 2


class PartSets(TensorSets):
    """Sets of a part of what is in the pool. part: returns it, of q, k and v."""

    def __init__(self, pool: RandomPool, number: int, part: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> None:
        self._part = part
        super().__init__(pool, number)

    def move(self) -> None:
        self.tensors = [copies_of(tensors, APART * at) for at, tensors in enumerate(self.tensors)]

    def _allocated(self, number: int) -> list[list[torch.Tensor]]:
        part = self._part(self._pool.at(self._pool.draw()[0]))
        return [copies_of(part, APART * at) for at in range(number)]

    def _copy(self, first: int, places: Sequence[Places]) -> None:
        with torch.no_grad():
            for at, where in enumerate(places, first):
                data = self._part(self._pool.at(where))
                torch._foreach_copy_([movable(t) for t in self.tensors[at]], [movable(t) for t in data])


class RankTiming:
    """Times one callable on one rank."""

    def __init__(
        self, fn: Callable[..., Any], spec: CheckSpec, sharding: Sharding, rank: Rank, defects: Sequence[KnownDefect] = ()
    ) -> None:
        """defects: those known of the callable on this workload and machine."""
        self._fn, self._spec, self._sharding, self._rank = fn, spec, sharding, rank
        self._defects = of_timed(defects)

    def step(self, what: str, given: Mapping[str, Any]) -> Any:
        """Make a step, a method below, of these keyword arguments; return what the judge learns from it, as JSON has it."""
        if what == "begin":
            return self.begin(**given)
        with self._work.context():
            return getattr(self, what)(**given)

    def begin(self, direction: Any, cold: bool, threads: int, seed: int) -> None:
        """Make this rank's tensors. cold: whether a GPU's L2 is written before each sample. threads: of a CPU's rank.

        seed: of the data, from which all ranks draw alike: they make the same steps.
        """
        self._rank.collectives.is_late = False
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        self._cold = cold
        self._work = self._work_of(direction, seed)
        self._clocks: dict[str, HostClock | DeviceClock] = {
            "host": HostClock(self._device, self._rank.barrier, self._rank.collectives)
        }
        if self._device.type == "cuda":
            self._clocks["device"] = DeviceClock(self._device, cold, self._rank.group)

    def call(self) -> None:
        """Make a call whose result must be that of its data."""
        verified(self._work)

    def behind(self) -> None:
        """Look at a result while other work lies ahead on the device."""
        self._plain_timer.verify_behind_backlog(self._work)

    def peak(self) -> int:
        """Return the bytes that a call asks for on this rank's GPU."""
        return peak_of(self._work.stage(), self._device)

    def warm(self, ramp: bool) -> None:
        """Bring this rank's GPU to its clock. ramp: from idle."""
        warmer = Warmer(self._plain_timer, self._anchors, self._monitor)
        (warmer.ramp_up if ramp else warmer.warm_up)()

    def block(self, names: list[str], calls: int, clock: str, backlog: float) -> dict[str, Any]:
        """Take one sample of each name."""
        self._work.rotate_over(max(_FEWEST_SETS, calls))
        op = Item(SUBJECT, several(self._work, calls), calls, self._work.keep)
        others = {name: anchor_item(name, anchor) for name, anchor in self._anchors.items()}
        taken = self._clocks[clock].take([others.get(name, op) for name in names], backlog)
        return {**taken._asdict(), "samples": [list(sample) for sample in taken.samples]}

    def renew(self, clock: str) -> None:
        """Have other memory, on a GPU."""
        found = self._clocks[clock]
        if isinstance(found, DeviceClock):
            found.move(self._work)

    def verify(self, is_last: bool) -> None:
        """Look at a result that was kept."""
        self._work.verify_kept(is_last)

    def watch(self) -> dict[str, Any]:
        """Begin to look for disturbances; return the state of the device."""
        self._monitor.begin_all(SUBJECT)
        self._monitor.begin()
        return self._monitor.conditions()

    def disturbance(self) -> dict[str, Any]:
        """Return what disturbed this rank since it was last asked, and what else is to be marked."""
        return {"disturbance": self._monitor.disturbance(), "notes": list(self._monitor.notes)}

    def communication(self) -> dict[str, float] | None:
        """Return seconds of a call's span, of NCCL's kernels in it, and of all others."""
        return communication_of(self._work, self._device)

    @property
    def _device(self) -> torch.device:
        return self._rank.device

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        return make_anchors(self._device)

    @cached_property
    def _monitor(self) -> DisturbanceMonitor:
        if self._device.type == "cpu":
            return WaitingMonitor()
        return DisturbanceMonitor.of(self._device, own_processes())

    @cached_property
    def _plain_timer(self) -> CudaTimer:
        return CudaTimer(self._device, self._cold)

    def _work_of(self, direction: LatencyDirection, seed: int) -> KernelWork:
        """Return the rank's part of the work: shards that lie in memory as those of the check do."""
        spec, sharding = self._spec, self._sharding
        inputs = draw_inputs(spec.workload, DISTRIBUTION, spec.seed, self._device)
        whole = [*whole_of(inputs, spec).values()]
        attention = AttentionOfShard(spec, inputs, direction, sharding, self._rank.rank, self._defects)
        if direction != "forward":
            with torch.no_grad():
                attention.tell_what_is_held(plain("out", first_of(self._fn(*attention.given(whole)))))
        dout = spec.in_layout(inputs.dout)
        return KernelWork(self._fn, whole, dout, direction, attention, needs_sets=True, chosen=random.Random(seed))


class AttentionOfShard(Attention):
    """A rank's timed result: its rows of attention on the whole tensors, or all rows where it returns these."""

    def __init__(
        self,
        spec: CheckSpec,
        inputs: Inputs,
        direction: LatencyDirection,
        sharding: Sharding,
        rank: int,
        defects: Sequence[KnownDefect] = (),
    ) -> None:
        declared = replace(spec.declared, precision=profile_over(spec.profile, sharding.ranks))
        super().__init__(replace(spec, declared=declared), inputs, direction, defects=defects)
        self._sharding, self._rank, self._is_whole = sharding, rank, False
        self._cache = RankCache(sharding, rank) if sharding.shares_pages else None
        heads: Iterable[int] = range(spec.workload.heads)
        if sharding.shares_pages:  # whose rows are everywhere
            heads = torch.arange(spec.workload.heads).tensor_split(sharding.ranks)[rank].tolist()
        self._held = _held(heads, sharding.rows[rank])
        self._held_keys = _held(range(spec.workload.kv_heads), sharding.keys[rank])

    def sets_of(self, pool: RandomPool, number: int) -> TensorSets:
        """Return sets of the rank's shards."""
        return PartSets(pool, number, self.given)

    def given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rank's shards of q, k and v, without waiting for the device."""
        whole = dict(zip("qkv", tensors, strict=True))
        return [*parts_of(whole, self._sharding, self._spec.layout, self._rank, cache=self._cache).values()]

    def dout(self, drawn: torch.Tensor) -> torch.Tensor:
        """Return the rank's shard of dout, or all of it, as its out is."""
        whole = super().dout(drawn)
        return whole if self._is_whole else cut(whole, "dout", self._sharding, self._spec.layout, self._rank)

    def tell_what_is_held(self, out: torch.Tensor) -> None:
        """See whether out has all rows."""
        self._is_whole = tuple(self._native(out).shape) == native_shape("out", self._spec.workload)

    def _expected_of(self, name: str, native: torch.Tensor) -> tuple[tuple[int, ...], Held | None]:
        whole, held = native_shape(name, self._spec.workload), self._held_keys if name in ("dk", "dv") else self._held
        if tuple(native.shape) == whole:
            return whole, None
        heads, rows = map(len, held)
        return ((rows, heads, whole[-1]) if self._spec.workload.is_packed else (whole[0], heads, rows, whole[-1])), held

    def _as_inputs(self, tensors: Sequence[torch.Tensor], dout: torch.Tensor) -> Inputs:
        """Keys in pages are dense here: each rank has pages of its own."""
        if not self._sharding.shares_pages:
            return super()._as_inputs(tensors, dout)
        q, k, v = tensors
        return replace(self._inputs, q=self._native(q), k=k, v=v, dout=self._native(dout), page_table=None)


def _held(heads: Iterable[int], rows: torch.Tensor) -> Held:
    return Held(*({one: at for at, one in enumerate(ones)} for ones in (heads, rows.tolist())))


def threads_of_rank() -> int:
    """Return how many threads of a CPU a rank uses: as with torchrun, one unless OMP_NUM_THREADS says more."""
    return int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0])


class Taken(NamedTuple):
    """A block of samples. enqueued: seconds of launching all. held: whether the device slept until then, and they count."""

    samples: list[RankTimes]
    enqueued: float = 0.0
    held: bool = True


class HostClock:
    """The host's clock around calls, the device's work included, from a moment that all ranks have in common."""

    def __init__(self, device: torch.device, barrier: StartBarrier, collectives: Collectives) -> None:
        self._device, self._collectives = device, collectives
        self._start = collectives.watching("the timer's barrier", "", barrier.wait)

    def take(self, items: Sequence[Item], backlog: float) -> Taken:
        """Take a sample of each item."""
        with no_collection():
            return Taken([self.sample(item) for item in items])

    def sample(self, item: Item) -> RankTimes:
        """Stage a call, meet the others, and time it."""
        call = item.stage()
        wait(self._device)
        late = self._start()
        before, begun = self._collectives.seconds, time.perf_counter_ns()
        value = call()
        wait(self._device)
        seconds, inside = (time.perf_counter_ns() - begun) * 1e-9, self._collectives.seconds - before
        item.keep(call, value)
        return RankTimes(seconds / item.calls, inside / item.calls, late)


class DeviceClock(CudaTimer):
    """CUDA events behind a sleeping device; a small all-reduce before the first event of each sample aligns all devices."""

    def __init__(self, device: torch.device, cold: bool, group: ProcessGroup) -> None:
        super().__init__(device, cold)
        self._group, self._word = group, torch.zeros(1, device=device)

    def take(self, items: Sequence[Item], backlog: float) -> Taken:
        """Enqueue a sample of each item once: whether all devices still slept is for the judge to say."""
        attempt = self.attempt(items, backlog)
        return Taken([RankTimes(seconds) for seconds in attempt.seconds], attempt.enqueued, attempt.held)

    def _flush(self) -> None:
        super()._flush()
        dist.all_reduce(self._word, group=self._group)
