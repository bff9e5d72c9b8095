"""What is timed: one direction of a kernel, on several sets of tensors, so that neither its data nor its result is at hand."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from pytest_attn.backends.streams import wait
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.correctness.contract import elements, plain
from pytest_attn.workloads.dtypes import negate
from pytest_attn.workloads.kv_layout import copies_of

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

LatencyDirection: TypeAlias = Literal["forward", "backward", "forward+backward"]
DIRECTIONS: tuple[LatencyDirection, ...] = ("forward", "backward", "forward+backward")
#: values like those of a model's activations; the power that a GPU draws, and so its clock, depends on them
DISTRIBUTION = "randn"
#: by how much of its norm an output may differ from what it was before, for order of summation and atomics
_SAME = 0.05


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
    """What a timed call left behind is not the result of its data, or its time is not that of such a call."""


class WrongResultError(StaleError):
    """What a timed call left behind is not the result of the data that it was given."""


class Work:
    """A kernel in one direction with `sets` copies of its tensors, which calls take in turn.

    Attention is linear in v: negating v in place negates out, dq and dk and nothing else changes. Each block of samples
    does so to every set, so that a result from a cache or of an earlier launch is the negative of the right one. A backward
    pass alone, which starts from what its forward pass left, is linear in dout, which is negated there.
    """

    #: told, while nothing is timed, that another call comes: of a time limit that each call has
    on_call: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        kernel: AttentionFn,
        tensors: list[torch.Tensor],
        dout: torch.Tensor,
        direction: LatencyDirection,
        counted: Callable[[torch.Tensor], torch.Tensor] = lambda result: result,
        v_width: int | None = None,
    ) -> None:
        """counted: what of a result is looked at. v_width: how many of k's elements are v, where it is a part."""
        self._v_width = v_width
        self.kernel, self.dout, self.direction, self._counted = kernel, dout, direction, counted
        self.sets = [self._own(tensors)]
        self._sign = 1
        self._turn = 0
        self._first: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.dout.device

    @property
    def nbytes(self) -> int:
        """The bytes of one set."""
        return sum(t.nbytes for t in self.sets[0])

    def rotate_over(self, number: int) -> None:
        """Have `number` sets, each at another offset within its allocation."""
        del self.sets[max(1, number) :]
        while len(self.sets) < number:
            self.sets.append(self._own(self.sets[0], offset=len(self.sets)))

    def move(self) -> None:
        """Have the same data in other memory."""
        self.sets = [self._own(tensors, offset) for offset, tensors in enumerate(self.sets)]
        self.dout = self.dout.clone()

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Without autograd, where only the forward pass is timed."""
        return torch.no_grad() if self.direction == "forward" else contextlib.nullcontext()

    def stage(self, replayed: bool = False) -> Callable[[], Any]:
        """Do what is not timed for the next set of tensors, and return the call that is.

        replayed: it is captured in a graph and runs many times: what it starts from stays as long as the call is kept.
        """
        self.on_call()
        tensors = self.sets[self._turn % len(self.sets)]
        self._turn += 1
        return self._call_on(tensors, replayed)

    def refresh(self) -> None:
        """Negate v of every set in place, for a backward pass alone dout."""
        self.on_call()
        self._sign = -self._sign
        with torch.no_grad():
            for tensor in [self.dout] if self.direction == "backward" else self._negated:
                negate(tensor)

    @property
    def _negated(self) -> list[torch.Tensor]:
        """What is negated to negate out: v, or q and k where v is a part of k."""
        return [tensor for tensors in self.sets for tensor in (tensors[:2] if self._v_width else tensors[2:])]

    def keep(self, call: Callable[[], Any], value: Any) -> None:
        """Keep what a timed call has returned, for `verify_kept`, or do not, as chance has it."""

    def verify_kept(self, is_last: bool = False) -> None:
        """Raise StaleError unless the result that was kept is that of the data of its call. is_last: none is kept any more."""

    def verify_call(self, what: str, call: Callable[[], Any], value: Any) -> None:
        """Raise StaleError unless what a call returned is the result of its data."""
        del call
        self.verify(what, self.result(value))

    def result(self, value: Any) -> torch.Tensor:
        """Return what `verify` looks at: out, or dq."""
        return self._counted(self.looked_at(value))

    def looked_at(self, value: Any) -> torch.Tensor:
        """Return out, or dq, of what a call has returned. Raises ContractError for what is not a plain tensor."""
        tensor: torch.Tensor = plain(names_of(self.direction)[0], first_of(value))
        return tensor.detach()

    def verify(self, what: str, *results: torch.Tensor) -> None:
        """Raise StaleError unless each result is that of the data as it stands; the very first one is taken as it is."""
        if self._first is None:
            self._first = (results[0] * self._sign).clone()
            if self.direction == "forward" and not bool(self._first.any()):
                raise WrongResultError(f"{what}: its result is zero everywhere, as if it had not been written yet")
        expected = self._first.double() * self._sign
        norms = [expected.norm(), *((result.double() - expected).norm() for result in results)]
        norm, *differences = torch.stack(norms).tolist()  # waits for the device once
        for difference in differences:
            if not difference <= _SAME * norm:
                share = _share(difference, norm)
                raise WrongResultError(f"{what}: its result is not that of the data it was given (it differs by {share})")

    def _call_on(self, tensors: list[torch.Tensor], replayed: bool) -> Callable[[], Any]:
        if self.direction == "forward":
            return lambda: self.kernel(*tensors)
        if self.direction == "forward+backward":
            return lambda: torch.autograd.grad(self._out(tensors), tensors, self.dout)
        out = self._out(tensors)
        return lambda: torch.autograd.grad(out, tensors, self.dout, retain_graph=replayed)

    def _out(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        tensor: torch.Tensor = plain("out", first_of(self.kernel(*tensors)))
        return tensor

    def _own(self, tensors: list[torch.Tensor], offset: int = 0) -> list[torch.Tensor]:
        """Copy tensors with their strides, `offset` times 256 bytes into allocations of their own."""
        return [copy.requires_grad_(self.direction != "forward") for copy in copies_of(tensors, 256 * offset)]


def names_of(direction: LatencyDirection) -> tuple[str, ...]:
    """Return what a call of a direction returns."""
    return ("out",) if direction == "forward" else ("dq", "dk", "dv")


def first_of(value: Any) -> Any:
    """Return a result, or the first of several."""
    several = elements(value)
    return several[0] if several else value


def _share(difference: float, norm: float) -> str:
    if math.isnan(difference):
        return "NaN: memory that was not written"
    return f"{difference / norm:.0%} of its norm" if norm else f"{difference:.3g} from zero"


class TimedCall(NamedTuple):
    """One call on an idle device: its result, and the host's seconds until it was launched, and until it was done.

    What was staged is let go of. Where a graph of autograd lives on, leaves belong to the stream of its forward pass, and no
    other stream can capture their next backward pass.
    """

    value: object
    launched: float
    done: float


def verified(work: Work) -> TimedCall:
    """Call a work and look at the result, which must be that of the data as it is; then change the data for the next look."""
    call = work.stage()
    one = _timed(work, call)
    work.verify_call("called on new data", call, one.value)
    work.refresh()
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
    torch.cuda.reset_peak_memory_stats(device)
    before = _bytes(device, "current")
    call()
    torch.cuda.synchronize(device)
    return _bytes(device, "peak") - before


@dataclass
class Peak:
    """The bytes that were held on a device at the peak of some work, beyond what was held before; 0 where none counts them."""

    bytes: int = 0


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Peak]:
    """Count what the work inside holds at its peak, with all that it frees again."""
    peak = Peak()
    if device.type != "cuda":
        yield peak
        return

    torch.cuda.reset_peak_memory_stats(device)
    before = _bytes(device, "current")
    yield peak
    peak.bytes = _bytes(device, "peak") - before


def _bytes(device: torch.device, when: Literal["current", "peak"]) -> int:
    statistics = torch.cuda.memory_stats(device)
    asked_for = statistics.get(f"requested_bytes.all.{when}", 0)  # which cudaMallocAsync's allocator does not count
    return int(asked_for or statistics[f"allocated_bytes.all.{when}"])
