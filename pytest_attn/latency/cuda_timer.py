"""How long a block of calls takes on a GPU: CUDA events behind a backlog, so that the host is never waited for."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from pytest_attn.backends.contexts import no_collection
from pytest_attn.latency.calls import TimedCall, called, verified
from pytest_attn.latency.cuda_graphs import graphs_of
from pytest_attn.latency.device_graph import DeviceGraphError
from pytest_attn.latency.peak import peak_of
from pytest_attn.latency.sampling import calls_per_sample, choose_mode, replays_per_sample
from pytest_attn.latency.timer import GRAPHS, HostTimer, Item, Mode, Plan, Timer, repeated
from pytest_attn.latency.work import StaleError, Work

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: sets of tensors per call of a sample, and graphs: where tensors lie decides on a percent of a short kernel's time
_PLACES = 6
#: MiB that are kept from the allocator in turn, so that it gives a kernel other memory than before
_GAPS = (2, 34, 10, 58, 18, 46, 26)
#: seconds for which the device is kept waiting for the host, and how much longer than it took to launch
SHORTEST_BACKLOG_SECONDS, _MOST_BACKLOG_SECONDS, _BACKLOG_MARGIN = 1e-3, 0.2, 1.5
#: how often a block is enqueued behind a device that sleeps longer each time
ATTEMPTS = 4
#: seconds of a call from which as few as possible are made before it is timed
SLOW_SECONDS = 3e-3
_SHARE_OF_FREE_MEMORY = 0.25


class Attempt(NamedTuple):
    """A block that was enqueued once, within so many seconds: seconds of one call of each item.

    held: whether the device slept until all was enqueued.
    """

    seconds: list[float]
    enqueued: float
    held: bool

    @property
    def wanted(self) -> float:
        """For how many seconds the device should sleep the next time."""
        return wanted_backlog(self.enqueued)


class CudaTimer(Timer):
    """CUDA events behind a backlog: the device is kept asleep until all of a block is in its queue.

    cold: write twice the L2 cache before each sample, so that no call finds its data there.
    """

    def __init__(self, device: torch.device, cold: bool = True) -> None:
        import torch

        self.device, self.cold = device, cold
        self.host_timer = HostTimer(device)
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
        self._flushed = torch.empty(2 * l2, dtype=torch.uint8, device=device) if cold else None
        self._cycles = self._cycles_per_second()
        self._backlogs: dict[tuple[str, ...], float] = {}  # which blocks of this work wanted the last time
        self._gaps = itertools.cycle(_GAPS)
        self._gap: torch.Tensor | None = None

    def plan(self, work: Work, mode: Mode | None = None) -> Plan:
        """Choose by the device's and the host's time: see `Mode`."""
        with work.context():
            self._backlogs.clear()
            looks = [verified(work) for _ in range(2)]  # whose results stay in memory until all is planned
            launch, device = self._launch_and_device_time(work, looks)
            wanted = choose_mode(mode, launch, device)
            if device is None or wanted == "host":
                return self.host_timer.plan(work)._replace(launch=launch)
            most = max(1, int(torch_free_memory(self.device) * _SHARE_OF_FREE_MEMORY // max(1, 2 * work.nbytes)))
            if wanted in GRAPHS:
                if plan := _plan_in_graphs(work, wanted, launch, device, most):
                    return plan
                wanted = "batched"
            calls = _calls_on_own_sets(work, device, wanted, most)
            renew = functools.partial(self.move, work) if most >= 2 * len(work.sets) else work.refresh
            return Plan("batched" if calls > 1 else "events", calls, device, launch, repeated(work.stage, calls), renew)

    def block(self, items: Sequence[Item]) -> list[float]:
        """Enqueue the whole block behind a sleeping device; HostTimer where it would not stay asleep."""
        names = tuple(item.name for item in items)
        needed = self._backlogs.get(names, SHORTEST_BACKLOG_SECONDS)
        for _ in range(ATTEMPTS):
            attempt = self.attempt(items, needed)
            self._backlogs[names] = attempt.wanted
            if attempt.held:
                return attempt.seconds
            needed = longer_backlog(needed, attempt.wanted)
        raise BacklogError(too_slow(len(items), attempt.enqueued))

    def attempt(self, items: Sequence[Item], backlog: float) -> Attempt:
        """Enqueue a block once, behind a device that sleeps for `backlog` seconds."""
        import torch

        pairs = []
        with no_collection():
            self._sleep(backlog)
            begun = time.perf_counter()
            for item in items:
                call = item.stage()
                self._flush()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                call()
                end.record()
                pairs.append((begin, end))
            held = not pairs[0][0].query()  # type: ignore[no-untyped-call]
            enqueued = time.perf_counter() - begun
            torch.cuda.synchronize(self.device)
        seconds = [b.elapsed_time(e) * 1e-3 / item.calls for (b, e), item in zip(pairs, items, strict=True)]
        return Attempt(seconds, enqueued, held)

    def peak_memory(self, work: Work) -> int | None:
        """From torch's allocator, of a second call: the first one may leave workspaces behind."""
        with work.context():
            work.stage()()
            return peak_of(work.stage(), self.device)

    def move(self, work: Work) -> None:
        """Give the work, and what its kernel allocates, other memory, and its data another sign."""
        import torch

        self._gap = None
        work.move()
        work.refresh()
        torch.cuda.empty_cache()
        self._gap = torch.empty(next(self._gaps) << 20, dtype=torch.uint8, device=self.device)
        work.stage()()
        torch.cuda.synchronize(self.device)

    def _flush(self) -> None:
        if self._flushed is not None:
            self._flushed.zero_()

    def _sleep(self, seconds: float) -> None:
        import torch

        torch.cuda._sleep(int(seconds * self._cycles))  # type: ignore[no-untyped-call]

    def _cycles_per_second(self) -> float:
        import torch

        cycles = 4_000_000
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(3):
            begin.record()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            end.record()
            end.synchronize()
        return float(cycles / (begin.elapsed_time(end) * 1e-3))

    def _launch_and_device_time(self, work: Work, looks: Sequence[TimedCall]) -> tuple[float, float | None]:
        """Return the host's seconds for launching a call, and the device's for it; see `_estimate`.

        A kernel that is slow, as the first calls tell, is called as few times as possible.
        """
        is_slow = min(call.done for call in looks) > SLOW_SECONDS
        self.verify_behind_backlog(work)
        launch = min(call.launched for call in looks) if is_slow else self._launching(work)
        return launch, self._estimate(work, launch, samples=1 if is_slow else 3)

    def _launching(self, work: Work) -> float:
        """Return the host's seconds for launching one call on an idle device, the median of a few."""
        return median(called(work).launched for _ in range(5))

    def _estimate(self, work: Work, launch: float, samples: int) -> float | None:
        """Return the device's seconds for one call, None where the device cannot be kept waiting for the host."""
        if launch > _MOST_BACKLOG_SECONDS / 4:
            return None
        try:
            return median(self.block([Item("estimate", work.stage)] * samples))
        except BacklogError:
            return None

    def verify_behind_backlog(self, work: Work) -> None:
        """Change the data, call and look at the result, all while the device sleeps, over poisoned free memory.

        A kernel on another stream that does not wait reads the old data; if nobody waits for it, the poison stays.
        """
        import torch

        if work.direction != "forward":
            return
        like = work.result(work.stage()())
        torch.cuda.synchronize(self.device)
        poison = [torch.full_like(like, math.nan) for _ in range(2)]
        del like
        torch.cuda.synchronize(self.device)
        del poison
        self._sleep(2e-3)
        work.refresh()
        seen = work.result(work.stage()()).clone()
        torch.cuda.synchronize(self.device)
        try:
            work.verify("called behind other work of its stream", seen)
        except StaleError as error:
            raise StaleError(
                f"{error}; does it launch on another stream? torch.cuda.current_stream().wait_stream(side) joins that"
            ) from None


class BacklogError(Exception):
    """The device did not stay behind the host: the host waits for it, or launches too slowly."""


def wanted_backlog(enqueued: float) -> float:
    """Return for how many seconds a device should sleep while a block is enqueued that took so many."""
    return min(max(SHORTEST_BACKLOG_SECONDS, _BACKLOG_MARGIN * enqueued), _MOST_BACKLOG_SECONDS)


def longer_backlog(backlog: float, wanted: float) -> float:
    """Return for how many seconds it should sleep where `backlog` were too few."""
    return min(max(2 * backlog, wanted), _MOST_BACKLOG_SECONDS)


def too_slow(items: int, enqueued: float) -> str:
    """Say that a device cannot be kept waiting for so long."""
    return f"launching {items} samples took {enqueued:.3g} s, longer than the device can be kept waiting"


def torch_free_memory(device: torch.device) -> int:
    """Return the free bytes of a CUDA device, what torch keeps for itself included."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _plan_in_graphs(work: Work, wanted: Mode, launch: float, device: float, most: int) -> Plan | None:
    """Return the plan of samples that replay graphs, None where no graph can be had."""
    calls = _calls_on_own_sets(work, device, wanted, most)
    mode, graphs = _graphs(work, calls, wanted)
    if not graphs:
        return None
    replays = replays_per_sample(calls, device, len(work.sets))
    stage = repeated(itertools.cycle(graphs).__next__, replays)
    return Plan(mode, calls * replays, device, launch, stage, work.refresh)


def _graphs(work: Work, calls: int, wanted: Mode) -> tuple[Mode, list[Callable[[], object]]]:
    """Return which graphs can be had, those wanted or those that torch makes, and them; none of one call, or of no capture."""
    if calls == 1:
        return wanted, []
    if wanted == "graph":
        with suppress(DeviceGraphError):
            return "graph", graphs_of(work, calls, _PLACES, on_device=True)
    return "replay", graphs_of(work, calls, _PLACES, on_device=False)


def _calls_on_own_sets(work: Work, seconds: float, mode: Mode, most: int) -> int:
    """Return how many calls share a sample, each on a set of its own where there are so many; at most `most` of both."""
    calls = min(calls_per_sample(seconds, mode), most)
    work.rotate_over(min(_PLACES * calls, most))
    return calls
