"""Timer of a block of calls by the host's clock; by that of a GPU: latency/cuda_timer.py."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from pytest_attn.backends.contexts import no_collection
from pytest_attn.backends.machine import wait
from pytest_attn.correctness.switches import unwatch, watchers
from pytest_attn.latency.disturbance import ContentionMonitor
from pytest_attn.latency.work import Work, verified

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: how a sample was taken: one call between two events; several; one graph of several, in the device's memory; such a graph as
#: torch makes it; on the host's clock
Mode: TypeAlias = Literal["events", "batched", "graph", "replay", "host"]

#: those of graphs
GRAPHS: tuple[Mode, ...] = ("graph", "replay")

#: does what is not timed, and returns what is
Stage: TypeAlias = Callable[[], Callable[[], Any]]

SHORTEST_HOST_SAMPLE = 1e-3
#: by how much longer, as a share of a sample, results may take to be seen for the first time than for the second
_LATE = 0.1


class Item(NamedTuple):
    """One sample of a block: do what `stage` does, untimed, then time what it returns, which is `calls` calls.

    keep: told, untimed again, what was staged, and what it has returned. glance: as `Work.glance`.
    """

    name: str
    stage: Stage
    calls: int = 1
    keep: Callable[[Callable[[], Any], Any], object] = lambda call, value: None
    glance: Callable[[Sequence[Any]], Callable[[], object]] = lambda values: lambda: None


class Plan(NamedTuple):
    """Plan of how a work is timed.

    seconds: the estimate of one call on the device; launch: of launching it; renew: between blocks.
    """

    mode: Mode
    calls: int
    seconds: float
    launch: float
    stage: Stage
    renew: Callable[[], object] = lambda: None


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
        return None


class HostTimer(Timer):
    """Wall clock around calls, the device's work included: for CPUs, and for kernels that wait for their device.

    contention: the monitor of a CPU, which has samples wait until they have the core to themselves.
    """

    def __init__(self, device: torch.device, contention: ContentionMonitor | None = None) -> None:
        self.device, self._contention = device, contention

    def plan(self, work: Work, mode: Mode | None = None) -> Plan:
        work.rotate_over(1)
        with work.context():
            for _ in range(3):  # peak_memory has called nothing
                verified(work)
            work.rotate_over(0)
            item = Item("", work.stage, glance=work.glance)
            seconds = min(self._seen(item, work.stage())[0] for _ in range(3))
            calls = max(1, math.ceil(SHORTEST_HOST_SAMPLE / max(seconds, 1e-9)))
        return Plan("host", calls, seconds, seconds, several(work, calls))

    def block(self, items: Sequence[Item]) -> list[float]:
        with no_collection():
            return [self._sample(item) / item.calls for item in items]

    def _sample(self, item: Item) -> float:
        last: list[Any] = []

        def keep() -> None:
            if last:
                call, value, look_again = last
                look_again()
                item.keep(call, value)
                last.clear()  # before another is made

        def stage() -> Callable[[], Any]:
            keep()  # after which a sample that is repeated is not on data of which a kernel may have kept something
            return item.stage()

        def sample(call: Callable[[], Any]) -> float:
            seconds, *last[:] = self._seen(item, call)
            return seconds

        seconds = sample(stage()) if self._contention is None else self._contention.undisturbed(item.name, stage, sample)
        keep()
        return seconds

    def _seen(self, item: Item, call: Callable[[], Any]) -> tuple[float, Callable[[], Any], Any, Callable[[], object]]:
        """Return the seconds of a sample's calls, these, what they return, and what sees that it is the same still.

        What computes a result as it is looked at does so once: looking for the first time takes as long as all the others.
        """
        seconds, value = self._one(call)
        values = [value, *call.others] if isinstance(call, Calls) else [value]
        begun = time.perf_counter()
        look_again = item.glance(values)
        looked = time.perf_counter()
        look_again()
        late = 2 * looked - begun - time.perf_counter()
        return seconds + (late * item.calls / len(values) if late > _LATE * seconds else 0.0), call, value, look_again

    def _one(self, call: Callable[[], Any]) -> tuple[float, Any]:
        wait(self.device)
        before = watchers()
        start = time.perf_counter_ns()
        value = call()
        wait(self.device)
        unwatch(before)  # by the clock: what a call has had Python tell would compute as soon as it stands still
        return (time.perf_counter_ns() - start) * 1e-9, value


#: which of several results is looked at
CHANCE = SystemRandom()
#: how many results of a sample are kept, on average: more take memory that is new, and time
KEPT = 4


class Calls:
    """Several calls, each staged before the first is made; returns what one of them returned, which chance has chosen.

    Each result is kept until the last call, or is not, as chance has it: a kernel that sees that its last one lives does
    not learn that no other will be looked at. others: those that are kept beside the returned one.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        number = len(calls)
        kept = [at for at in range(number) if CHANCE.randrange(number) < KEPT] or [CHANCE.randrange(number)]
        self._calls = [(call, at in kept) for at, call in enumerate(calls)]
        self._at = CHANCE.randrange(len(kept))
        self._chosen = calls[kept[self._at]]
        self.others: list[Any] = []

    def __call__(self) -> Any:
        """Make them."""
        kept = self.others
        for call, is_kept in self._calls:
            if is_kept:
                kept.append(call())
            else:
                call()
        return kept.pop(self._at)

    def seen(self, value: Any) -> Any:
        """Return what the call says that was chosen."""
        chosen: Any = self._chosen
        return chosen.seen(value)


def several(work: Work, calls: int) -> Stage:
    """Return the stage of several calls of a work."""
    return work.stage if calls == 1 else lambda: Calls(work.stage_several(calls))


def repeated(stage: Stage, calls: int) -> Stage:
    """Return the stage of several calls, each of which is staged before the first is made."""
    return stage if calls == 1 else lambda: Calls([stage() for _ in range(calls)])
