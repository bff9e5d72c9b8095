"""Work as those see it that time it; of a kernel: latency/kernel_work.py."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from pytest_attn.backends.machine import wait
from pytest_attn.correctness.contract import elements
from pytest_attn.workloads.workload import Workload

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

LatencyDirection: TypeAlias = Literal["forward", "backward", "forward+backward"]
DIRECTIONS: tuple[LatencyDirection, ...] = ("forward", "backward", "forward+backward")
#: values like those of a model's activations; the power that a GPU draws, and so its clock, depends on them
DISTRIBUTION = "randn"


def direction_of(backward: bool | Literal["both"]) -> LatencyDirection:
    """Return what `backward` asks for. Raises ValueError for anything but False, True and "both"."""
    if backward is False:
        return "forward"
    if backward is True:
        return "backward"
    if backward == "both":
        return "forward+backward"
    raise ValueError(f'measure: backward must be False, True or "both", got {backward!r}')


class StaleError(Exception):
    """A timed call left a wrong result, or its time is not that of a call that computes."""


class WrongResultError(StaleError):
    """A timed call left behind what is not the result of the data that it was given."""


class Work:
    """Work in one direction, on `sets` of tensors that calls take in turn.

    What other processes compute is staged and looked at by them, and has no tensors here.
    """

    #: told, while nothing is timed, that another call comes: of a time limit that each call has
    on_call: Callable[[], object] = staticmethod(lambda: None)
    #: whose exact attention is timed in turns with it on a CPU
    workload: Workload | None = None
    direction: LatencyDirection
    sets: list[list[torch.Tensor]]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The bytes of one set."""
        raise NotImplementedError

    def rotate_over(self, number: int) -> None:
        """Have `number` sets, each at another offset within its allocation."""
        raise NotImplementedError

    def move(self) -> None:
        """Have the same data in other memory."""
        raise NotImplementedError

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Without autograd, where only the forward pass is timed."""
        return torch.no_grad() if self.direction == "forward" else contextlib.nullcontext()

    def stage(self, replayed: bool = False) -> Callable[[], Any]:
        """Do what is not timed, and return the call that is.

        replayed: it is captured in a graph and runs many times: what it starts from stays as long as the call is kept.
        """
        raise NotImplementedError

    def stage_several(self, number: int) -> Sequence[Callable[[], Any]]:
        """Do what is not timed of several calls, and return these."""
        return [self.stage() for _ in range(number)]

    def result(self, value: Any) -> torch.Tensor:
        """Return what is looked at of what a call has returned, or of the first of it."""
        raise NotImplementedError

    def verify_call(self, what: str, call: Callable[[], Any], value: Any) -> None:
        """Raise StaleError unless what a call returned is the result of its data."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin to be timed: what is left behind from now on to run later is its own."""

    def glance(self, values: Sequence[Any]) -> Callable[[], object]:
        """Look at what calls have just returned, once their time was taken; return what sees later that it is the same.

        That raises ContractError where something can run later, which may be what computes.
        """
        return lambda: None

    def keep(self, call: Callable[[], Any], value: Any) -> None:
        """Keep what a timed call has returned, for `verify_kept`, or do not, as chance has it."""

    def verify_kept(self, is_last: bool = False) -> None:
        """Raise StaleError unless the result that was kept is that of the data of its call. is_last: none is kept any more."""


def names_of(direction: LatencyDirection, results: tuple[str, ...] = ("out",)) -> tuple[str, ...]:
    """Return what a call of a direction returns, in order. results: those of a forward pass."""
    passes = {"forward": results, "backward": ("dq", "dk", "dv")}
    return tuple(name for one in direction.split("+") for name in passes[one])


def first_of(value: Any) -> Any:
    """Return a result, or the first of several."""
    several = elements(value)
    return several[0] if several else value


class TimedCall(NamedTuple):
    """One call on an idle device: its result, and the host's seconds until it was launched, and until it was done.

    What was staged is let go of. Where a graph of autograd lives on, leaves belong to the stream of its forward pass, and no
    other stream can capture their next backward pass.
    """

    value: object
    launched: float
    done: float


def verified(work: Work) -> TimedCall:
    """Call a work and look at the result, which must be that of the data."""
    call = work.stage()
    one = _timed(work, call)
    work.verify_call("called on new data", call, one.value)
    return one


def called(work: Work) -> TimedCall:
    """Call a work once."""
    return _timed(work, work.stage())


def _timed(work: Work, call: Callable[[], Any]) -> TimedCall:
    wait(work.device)
    begun = time.perf_counter()
    value = call()
    launched = time.perf_counter() - begun
    wait(work.device)
    return TimedCall(value, launched, time.perf_counter() - begun)


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Return the bytes that a call asks for at its peak, beyond what was held on a CUDA device before.

    What was asked for, not what the allocator handed out. A free block may be up to 1 MiB larger for each of the tensors, in
    one process and not in another.
    """
    torch.cuda.synchronize(device)
    torch.empty(1, device=device)  # has the allocator take back what waited for another stream
    with PeakMemory(device) as peak:
        call()
        torch.cuda.synchronize(device)
    return peak.bytes


class PeakMemory:
    """Counts what the work inside holds on a device at its peak, with all that it frees again, beyond what was held before.

    bytes: once the work is done; 0 where none counts them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._counts, self.bytes = device, device.type == "cuda", 0

    def __enter__(self) -> PeakMemory:
        if self._counts:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = _bytes(self._device, "current")
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._counts and kind is None:
            self.bytes = _bytes(self._device, "peak") - self._before


def _bytes(device: torch.device, when: Literal["current", "peak"]) -> int:
    statistics = torch.cuda.memory_stats(device)
    asked_for = statistics.get(f"requested_bytes.all.{when}", 0)  # which cudaMallocAsync's allocator does not count
    return int(asked_for or statistics[f"allocated_bytes.all.{when}"])
