"""How long a block of calls takes: on a GPU behind a backlog, so that the host is never waited for; on a CPU by its clock."""

from __future__ import annotations

import functools
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from pytest_attn.backends.contexts import no_collection
from pytest_attn.latency.captures import graphs_of
from pytest_attn.latency.core import Core
from pytest_attn.latency.peak import peak_of
from pytest_attn.latency.resident import ResidencyError
from pytest_attn.latency.work import StaleError, Work

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: how a sample was taken: one call between two events; several; one graph of several, in the device's memory; such a graph as
#: torch makes it; on the host's clock
Mode: TypeAlias = Literal["events", "batched", "graph", "replay", "host"]

#: those of graphs
GRAPHS: tuple[Mode, ...] = ("graph", "replay")

#: seconds of device time from which a call has a pair of events of its own; below, calls share what a pair adds (about 4 us)
_OWN_EVENTS_SECONDS = 250e-6
#: seconds of a shared sample, and the most calls of one: the host launches batches anew while the device is kept waiting
_SAMPLE_SECONDS: dict[Mode, float] = {"graph": 0.8e-3, "replay": 0.8e-3, "batched": 0.2e-3}
_MOST_CALLS: dict[Mode, int] = {"graph": 40, "replay": 40, "batched": 20}
_FEWEST_CALLS = 4
#: a host that needs longer than both to launch a call is what the user waits for, and is timed; below, the gate looks at it
_HOST_BOUND_SECONDS, _HOST_BOUND_RATIO = 2e-3, 4.0
#: sets of tensors per call of a sample, and graphs: where tensors lie decides on a percent of a short kernel's time
_PLACES = 6
#: MiB that are kept from the allocator in turn, so that it gives a kernel other memory than before
_GAPS = (2, 34, 10, 58, 18, 46, 26)
_MOST_BACKLOG_SECONDS = 0.2
_SHORTEST_HOST_SAMPLE = 1e-3
_SHARE_OF_FREE_MEMORY = 0.25


class Item(NamedTuple):
    """One sample of a block: do what `stage` does, untimed, then time what it returns, which is `calls` calls."""

    name: str
    stage: Callable[[], Callable[[], object]]
    calls: int = 1


class Plan(NamedTuple):
    """How a work is timed. seconds: the estimate of one call on the device; host: of launching it; renew: between blocks."""

    mode: Mode
    calls: int
    seconds: float
    host: float
    stage: Callable[[], Callable[[], object]]
    renew: Callable[[], None]


class Timer(ABC):
    """A clock for blocks of samples."""

    @abstractmethod
    def plan(self, work: Work, mode: Mode | None = None) -> Plan:
        """Prime the work (just-in-time compilers, workspaces), verify its results and choose how to time it.

        mode: what a baseline was recorded with, kept where the work still can. Raises StaleError for a result that is not
        that of the data; exceptions of the kernel pass through. To be called after `peak_memory`, which primes it first.
        """

    @abstractmethod
    def block(self, items: Sequence[Item]) -> list[float]:
        """Return the seconds of one call for each item, in order; waits for the device once, at the end."""

    def peak_memory(self, work: Work) -> int | None:
        """Return the bytes that one call asks for beyond what was there, None where it cannot be known."""
        del work
        return None


class HostTimer(Timer):
    """Wall clock around calls, the device's work included: for CPUs, and for kernels that wait for their device.

    core: of a CPU, which samples are to have to themselves.
    """

    def __init__(self, device: torch.device, core: Core | None = None) -> None:
        self.device, self._core = device, core

    def plan(self, work: Work, mode: Mode | None = None) -> Plan:
        """Take as many calls as make a sample of a millisecond."""
        del mode
        work.rotate_over(1)
        with work.context():
            _prime(work, 3)  # peak_memory has called nothing
            seconds = min(self._one(work.stage()) for _ in range(3))
            calls = max(1, math.ceil(_SHORTEST_HOST_SAMPLE / max(seconds, 1e-9)))
            for _ in range(2):
                _verify_now(work)
            work.rotate_over(2)
        return Plan("host", calls, seconds, seconds, _repeat(work, calls), work.refresh)

    def block(self, items: Sequence[Item]) -> list[float]:
        """Time each item by itself."""
        with no_collection():
            return [self._sample(item) / item.calls for item in items]

    def _sample(self, item: Item) -> float:
        return self._core.undisturbed(item.name, item.stage, self._one) if self._core else self._one(item.stage())

    def _one(self, call: Callable[[], object]) -> float:
        _wait(self.device)
        start = time.perf_counter_ns()
        call()
        _wait(self.device)
        return (time.perf_counter_ns() - start) * 1e-9


class CudaTimer(Timer):
    """CUDA events behind a backlog: the device is kept asleep until all of a block is in its queue.

    cold: write twice the L2 cache before each sample, so that no call finds its data there.
    """

    def __init__(self, device: torch.device, cold: bool = True) -> None:
        import torch

        self.device, self.cold = device, cold
        self.host = HostTimer(device)
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
        self._flushed = torch.empty(2 * l2, dtype=torch.uint8, device=device) if cold else None
        self._cycles = self._cycles_per_second()
        self._margin = 1.5
        self._gaps = itertools.cycle(_GAPS)
        self._gap: torch.Tensor | None = None

    def plan(self, work: Work, mode: Mode | None = None) -> Plan:
        """Choose by the device's and the host's time: see `Mode`."""
        with work.context():
            _prime(work, 1)  # after the two calls of peak_memory
            for _ in range(2):
                _verify_now(work)
            self._verify_behind_backlog(work)
            host = self._launching(work)
            device = self._estimate(work, host)
            bound = max(_HOST_BOUND_SECONDS, _HOST_BOUND_RATIO * (device or 0.0))
            bound *= 2.0 if mode not in (None, "host") else 0.5 if mode == "host" else 1.0  # no flapping at the limit
            if device is None or host > bound:
                return self._host_plan(work, host)
            most = max(1, int(torch_free_memory(self.device) * _SHARE_OF_FREE_MEMORY // max(1, 2 * work.nbytes)))
            wanted = mode if mode not in (None, "host") else "graph" if device < _OWN_EVENTS_SECONDS else "events"
            if wanted in GRAPHS:
                calls = _calls_on_own_sets(work, device, wanted, most)
                kind, graphs = _graphs(work, calls, wanted)
                if graphs:
                    return Plan(kind, calls, device, host, itertools.cycle(graphs).__next__, work.refresh)
                wanted = "batched"
            calls = _calls_on_own_sets(work, device, wanted, most)
            renew = functools.partial(self._move, work) if most >= 2 * len(work.sets) else work.refresh
            return Plan("batched" if calls > 1 else "events", calls, device, host, _repeat(work, calls), renew)

    def block(self, items: Sequence[Item]) -> list[float]:
        """Enqueue the whole block behind a sleeping device; HostTimer where it would not stay asleep."""
        import torch

        needed = 1e-3
        for _ in range(4):
            pairs = []
            with no_collection():
                self._sleep(needed)
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
            if held:
                return [b.elapsed_time(e) * 1e-3 / item.calls for (b, e), item in zip(pairs, items, strict=True)]
            needed = min(_MOST_BACKLOG_SECONDS, max(2 * needed, self._margin * enqueued))
        raise BacklogError(f"launching {len(items)} samples took {enqueued:.3g} s, longer than the device can be kept waiting")

    def peak_memory(self, work: Work) -> int | None:
        """From torch's allocator, of a second call: the first one may leave workspaces behind."""
        with work.context():
            work.stage()()
            return peak_of(work.stage(), self.device)

    def _host_plan(self, work: Work, host: float) -> Plan:
        return self.host.plan(work)._replace(host=host)

    def _move(self, work: Work) -> None:
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

    def _launching(self, work: Work) -> float:
        """Return the host's seconds for launching one call on an idle device, the median of a few."""
        import torch

        found = []
        for _ in range(5):
            call = work.stage()
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        torch.cuda.synchronize(self.device)
        return median(found)

    def _estimate(self, work: Work, host: float) -> float | None:
        """Return the device's seconds for one call, None where the device cannot be kept waiting for the host."""
        if host > _MOST_BACKLOG_SECONDS / 4:
            return None
        try:
            return median(self.block([Item("estimate", work.stage)] * 3))
        except BacklogError:
            return None

    def _verify_behind_backlog(self, work: Work) -> None:
        """Change the data, call and look at the result, all while the device sleeps, over poisoned free memory.

        A kernel on another stream that does not wait reads the old data; one that is not waited for leaves the poison.
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


def timer_for(device: torch.device, cold: bool = True, core: Core | None = None) -> Timer:
    """Return the timer of a device. On CPUs and devices without CUDA's events, the host's clock."""
    return CudaTimer(device, cold) if device.type == "cuda" else HostTimer(device, core)


def torch_free_memory(device: torch.device) -> int:
    """Return the free bytes of a CUDA device, what torch keeps for itself included."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _graphs(work: Work, calls: int, wanted: Mode) -> tuple[Mode, list[Callable[[], object]]]:
    """Return which graphs can be had, those wanted or those that torch makes, and them; none of one call, or of no capture."""
    if calls == 1:
        return wanted, []
    if wanted == "graph":
        with suppress(ResidencyError):
            return "graph", graphs_of(work, calls, _PLACES, are_resident=True)
    return "replay", graphs_of(work, calls, _PLACES, are_resident=False)


def _calls_on_own_sets(work: Work, seconds: float, mode: Mode, most: int) -> int:
    """Return how many calls share a sample, each on a set of its own where there are so many; at most `most` of both."""
    calls = min(_calls_per_sample(seconds, mode), most)
    work.rotate_over(min(_PLACES * calls, most))
    return calls


def _calls_per_sample(seconds: float, mode: Mode) -> int:
    """Return how many calls share a sample of a mode, by the device's time of one."""
    if mode == "events":
        return 1
    return min(max(_FEWEST_CALLS, math.ceil(_SAMPLE_SECONDS[mode] / max(seconds, 1e-9))), _MOST_CALLS[mode])


def _prime(work: Work, calls: int) -> None:
    for _ in range(calls):
        work.stage()()
    _wait(work.device)


def _verify_now(work: Work) -> None:
    """Look at the result of the data as it is, then change the data: the next look must see that."""
    result = work.result(work.stage()())
    _wait(work.device)
    work.verify("called again after its data changed in place", result)
    work.refresh()


def _repeat(work: Work, calls: int) -> Callable[[], Callable[[], object]]:
    if calls == 1:
        return work.stage

    def stage() -> Callable[[], object]:
        staged = [work.stage() for _ in range(calls)]

        def all_calls() -> None:
            for call in staged:
                call()

        return all_calls

    return stage


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type in ("xpu", "mps"):
        getattr(torch, device.type).synchronize()
