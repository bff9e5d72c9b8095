"""How a block of calls is timed, and by the host's clock; by that of a GPU: latency/cuda_timer.py."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from pytest_attn.backends.contexts import no_collection
from pytest_attn.latency.core import Core
from pytest_attn.latency.work import StaleError, Work

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: how a sample was taken: one call between two events; several; one graph of several, in the device's memory; such a graph as
#: torch makes it; on the host's clock
Mode: TypeAlias = Literal["events", "batched", "graph", "replay", "host"]

#: those of graphs
GRAPHS: tuple[Mode, ...] = ("graph", "replay")

#: does what is not timed, and returns what is
Stage: TypeAlias = Callable[[], Callable[[], object]]

_SHORTEST_HOST_SAMPLE = 1e-3
#: how much longer a call may take after its data changed, in the shortest of a few: 1.4 times, or 10 us, were seen on a CPU
_KEPT_RATIO, _KEPT_SECONDS, _KEPT_LOOKS = 3.0, 20e-6, 5


class Item(NamedTuple):
    """One sample of a block: do what `stage` does, untimed, then time what it returns, which is `calls` calls."""

    name: str
    stage: Stage
    calls: int = 1


class Plan(NamedTuple):
    """How a work is timed. seconds: the estimate of one call on the device; host: of launching it; renew: between blocks."""

    mode: Mode
    calls: int
    seconds: float
    host: float
    stage: Stage
    renew: Callable[[], None]


class Call(NamedTuple):
    """One call on an idle device: its result, and the host's seconds until it was launched, and until it was done."""

    value: object
    launched: float
    done: float


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
            for _ in range(3):  # peak_memory has called nothing
                work.stage()()
            seconds = min(self._one(work.stage()) for _ in range(3))
            calls = max(1, math.ceil(_SHORTEST_HOST_SAMPLE / max(seconds, 1e-9)))
            refuse_kept_results(work, seconds)
            work.rotate_over(2)
        return Plan("host", calls, seconds, seconds, repeated(work.stage, calls), work.refresh)

    def block(self, items: Sequence[Item]) -> list[float]:
        """Time each item by itself."""
        with no_collection():
            return [self._sample(item) / item.calls for item in items]

    def _sample(self, item: Item) -> float:
        return self._core.undisturbed(item.name, item.stage, self._one) if self._core else self._one(item.stage())

    def _one(self, call: Callable[[], object]) -> float:
        wait(self.device)
        start = time.perf_counter_ns()
        call()
        wait(self.device)
        return (time.perf_counter_ns() - start) * 1e-9


def verified(work: Work) -> Call:
    """Call a work and look at the result, which must be that of the data as it is; then change the data for the next look."""
    call = called(work)
    work.verify("called again after its data changed in place", work.result(call.value))
    work.refresh()
    return call


def refuse_kept_results(work: Work, seconds: float) -> None:
    """Raise StaleError where a call takes far longer than the `seconds` that it took again and again on the same data."""
    verified(work)  # on the same data still
    limit = _KEPT_RATIO * seconds + _KEPT_SECONDS
    shortest = verified(work).done
    for _ in range(_KEPT_LOOKS - 1):
        if shortest > limit:
            shortest = min(shortest, verified(work).done)
    if shortest > limit:
        known, new = f"{seconds * 1e6:.3g} us", f"{shortest * 1e6:.3g} us"
        raise StaleError(
            f"takes {known} on the data of the call before, and {new} on changed data: it keeps what it has computed"
        )


def called(work: Work) -> Call:
    """Call a work once."""
    call = work.stage()
    wait(work.device)
    begun = time.perf_counter()
    value = call()
    launched = time.perf_counter() - begun
    wait(work.device)
    return Call(value, launched, time.perf_counter() - begun)


def repeated(stage: Stage, calls: int) -> Stage:
    """Return the stage of several calls, each of which is staged before the first is made."""
    if calls == 1:
        return stage

    def stage_all() -> Callable[[], object]:
        staged = [stage() for _ in range(calls)]

        def all_calls() -> None:
            for call in staged:
                call()

        return all_calls

    return stage_all


def wait(device: torch.device) -> None:
    """Wait for all that a device was asked to do."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type in ("xpu", "mps"):
        getattr(torch, device.type).synchronize()
