"""The protocol of a measurement: blocks of samples between anchors, a guard around each, looks at sizes fixed beforehand."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_attn.latency.anchors import COMPUTE, MEMORY, Anchor, make_anchors
from pytest_attn.latency.core import Core
from pytest_attn.latency.cuda_timer import SLOW_SECONDS, BacklogError, CudaTimer
from pytest_attn.latency.guard import Guard
from pytest_attn.latency.host_guard import HostGuard
from pytest_attn.latency.statistics import Interval, median_interval
from pytest_attn.latency.timer import GRAPHS, HostTimer, Item, Mode, Plan, Timer
from pytest_attn.latency.work import LatencyDirection, Work

if TYPE_CHECKING:
    import torch

    from pytest_attn.latency.gate import Decision

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: by kind of device, kept with every baseline; a change of what follows that moves times as far as the gate would see makes
#: another protocol, whose times cannot be compared. How long a measurement lasts only changes how far it scatters.
PROTOCOLS = {"cuda": 3, "cpu": 2}
#: numbers of blocks after which the interval is looked at
LOOKS = (6, 10, 16, 24)
#: half-width of the 95 % interval, as a share of the p50, at which a measurement ends, by kind of device
WANTED_HALF_WIDTH = {"cuda": 0.002, "cpu": 0.005}
#: the same for kernels below so many seconds on a GPU: where their tensors lie moves them as far, in all blocks alike, so that
#: more blocks would cost time and tell nothing
_SHORT_SECONDS, _WANTED_OF_SHORT = 100e-6, 0.004
#: seconds of wall time, by kind of device, within which its blocks end, as far as the shortest of them tells
SECONDS = {"cuda": 0.3, "cpu": 0.8}
#: seconds that a measurement on a GPU takes in all, but for compilers and waiting for the clock, and that its blocks may take
#: in any case
_ALL_SECONDS, _FEWEST_SECONDS = 0.45, 0.1
_FEWEST_BLOCKS = 3
#: what the samples of the kernel are called; the others are those of the anchors
_SUBJECT = "op"
#: said of a kernel that was recorded in a graph: the gaps between its launches are part of its time now
_NO_GRAPH = "recorded in a CUDA graph, which cannot be captured now: timed call by call, which takes longer"
_NOT_RESIDENT = (
    "recorded in a CUDA graph in the device's memory, which torch or the driver cannot make: a replay takes another time"
)
#: how long the device rests after a block, as a multiple of the block's time: it draws less power on average
_REST = 1.0
_MOST_REPEATS = 3
#: seconds of one sample, and samples per block below them
_SAMPLES_BELOW = ((1e-3, 6), (2e-3, 4), (10e-3, 2))
#: seconds of work that bring an idle GPU to its clock, once per process
_RAMP_SECONDS = 1.0
#: seconds of work right before the blocks: a GPU that was idle takes up to 0.8 % more, or less, than one that worked
_WARMING_SECONDS = 0.1
#: seconds for which a GPU whose power is capped is given time to have its clock back; one that is capped for good is timed so,
#: and not given time again
_RECOVERY_SECONDS = 0.5
#: seconds of light work meanwhile before NVML is asked again
_LIGHT_SECONDS = 2e-3


@dataclass(frozen=True)
class Latency:
    """How long one direction of a kernel takes.

    p50: seconds, the median of block medians. interval: in which the median of blocks lies with 95 % (its `confidence` says
    where there were too few). samples: seconds of one call, block by block. host: seconds of launching one call. mode, calls:
    how many calls shared a pair of events, and how (latency/timer.py); l2: "cold" or "warm". anchors: medians in seconds.
    memory: bytes that a call asks for at its peak. threads: of a CPU. disturbances: of blocks that stayed disturbed when
    repeated, a CPU's core that others shared, or a recorded graph that is lost; such a time is never held against a baseline.
    spent: seconds of wall time. cupti: the device's seconds by torch's profiler, where asked for.
    """

    workload: str
    subject: str
    direction: LatencyDirection
    p50: float
    interval: Interval
    samples: tuple[float, ...]
    blocks: int
    mode: Mode
    calls: int
    l2: str
    host: float
    anchors: Mapping[str, float]
    memory: int | None = None
    threads: int | None = None
    disturbances: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    spent: float = 0.0
    cupti: float | None = None
    decision: Decision | None = None

    @property
    def verdict(self) -> str:
        """Of the gate: "passed", "regressed", "inconclusive", "no baseline"; "measured" where none was asked."""
        return self.decision.verdict if self.decision else "measured"

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types."""
        return {**asdict(self), "interval": list(self.interval), "verdict": self.verdict}


class Stopwatch:
    """All that one device needs to time kernels, made once per process."""

    def __init__(self, device: torch.device, cold: bool = True, own: frozenset[int] = frozenset()) -> None:
        self.device, self.cold = device, cold and device.type == "cuda"
        core = Core() if device.type == "cpu" else None
        self.timer: Timer = CudaTimer(device, cold) if device.type == "cuda" else HostTimer(device, core)
        self.guard = HostGuard(core) if core else Guard.of(device, own)
        self.anchors: dict[str, Anchor] = make_anchors(device)
        self._rested = 0.0
        self._patience = _RECOVERY_SECONDS
        if device.type == "cuda":
            self._work(_RAMP_SECONDS)

    def measure(
        self,
        work: Work,
        workload: str,
        subject: str,
        mode: Mode | None = None,
        seconds: float | None = None,
    ) -> Latency:
        """Measure a work. mode: the baseline's, see `Timer.plan`. seconds: the cap of wall time for its blocks.

        Raises StaleError for a kernel whose results are not those of its data when it is called again.
        """
        begun = time.perf_counter()
        self.guard.begin_all(_SUBJECT)
        memory = self.timer.peak_memory(work)  # before graphs keep parts of what autograd would make anew
        compiled_at = time.perf_counter()
        plan = self.timer.plan(work, mode)
        timer = self._timer_of(plan)
        try:
            blocks, disturbances = self._blocks(plan, timer, work, seconds, compiled_at)
        except BacklogError:
            timer = HostTimer(self.device)
            plan = timer.plan(work)
            blocks, disturbances = self._blocks(plan, timer, work, seconds, time.perf_counter())
        disturbances += [lasting] if (lasting := self.guard.lasting_disturbance()) else []
        if mode in GRAPHS and plan.mode in ("batched", "events"):
            disturbances.append(_NO_GRAPH)
        if mode == "graph" and plan.mode == "replay":
            disturbances.append(_NOT_RESIDENT)
        medians = [median(block[_SUBJECT]) for block in blocks]
        return Latency(
            workload=workload,
            subject=subject,
            direction=work.direction,
            p50=median(medians),
            interval=median_interval(medians),
            samples=tuple(sample for block in blocks for sample in block[_SUBJECT]),
            blocks=len(blocks),
            mode=plan.mode,
            calls=plan.calls,
            l2="cold" if self.cold and plan.mode != "host" else "warm",
            host=plan.host,
            anchors={name: median(median(block[name]) for block in blocks) for name in self.anchors} | self.guard.anchors(),
            memory=memory,
            threads=_threads(self.device),
            disturbances=tuple(dict.fromkeys(disturbances)),
            notes=tuple(self.guard.notes),
            conditions=self.guard.conditions(),
            spent=time.perf_counter() - begun,
        )

    def _timer_of(self, plan: Plan) -> Timer:
        return self.timer if plan.mode != "host" or isinstance(self.timer, HostTimer) else HostTimer(self.device)

    def _blocks(
        self, plan: Plan, timer: Timer, work: Work, seconds: float | None, compiled_at: float
    ) -> tuple[list[dict[str, list[float]]], list[str]]:
        """Take blocks until a look is content or another one would take too long; the first one, which warms up, is dropped.

        But for a slow kernel on a GPU, whose calls while it was planned have done that.
        """
        items = self._items(plan)
        found: list[dict[str, list[float]]] = []
        disturbances: list[str] = []
        with work.context():
            if isinstance(timer, CudaTimer):
                compiled_at += self._warm()
            if not (isinstance(timer, CudaTimer) and plan.seconds > SLOW_SECONDS):
                self._block(timer, items, plan)
            self.guard.begin()
            cap = self._seconds_left(time.perf_counter() - compiled_at) if seconds is None else seconds
            begun, shortest = self._now(), math.inf
            while len(found) < LOOKS[-1]:
                started = self._now()
                block, disturbance = self._undisturbed(timer, items, plan)
                found.append(block)
                disturbances += [disturbance] if disturbance else []
                ended = self._now()
                shortest = min(shortest, ended - started)  # the others were repeated
                is_late = ended + shortest - begun > cap
                if (is_late and len(found) >= _FEWEST_BLOCKS) or (len(found) in LOOKS and self._is_narrow(found, plan)):
                    break
        return found, disturbances

    def _now(self) -> float:
        """Return the seconds of a clock that stands still while others have the core."""
        return time.perf_counter() - self.guard.lost()

    def _seconds_left(self, spent: float) -> float:
        """Return how long the blocks of a measurement may take that has taken so many seconds until now."""
        most = SECONDS.get(self.device.type, SECONDS["cpu"])
        return min(most, max(_FEWEST_SECONDS, _ALL_SECONDS - spent)) if self.device.type == "cuda" else most

    def _undisturbed(self, timer: Timer, items: list[Item], plan: Plan) -> tuple[dict[str, list[float]], str | None]:
        """Repeat a disturbed block, later and later; return the last one with what still disturbed it."""
        for attempt in range(_MOST_REPEATS + 1):
            block = self._block(timer, items, plan)
            disturbance = self.guard.disturbance()
            if disturbance is None:
                break
            if attempt < _MOST_REPEATS:
                time.sleep(0.05 * 2**attempt)
                self.guard.begin()
        return block, disturbance

    def _block(self, timer: Timer, items: list[Item], plan: Plan) -> dict[str, list[float]]:
        """Take one block on changed data, once the device has rested from the one before."""
        rest = self._rested - time.perf_counter()
        plan.renew()  # which is work, and no rest
        if rest > 0:
            time.sleep(rest)
        begun = time.perf_counter()
        times = timer.block(items)
        if isinstance(timer, CudaTimer):
            busy = sum(t * item.calls for t, item in zip(times, items, strict=True))
            ended = time.perf_counter()
            self._rested = ended + _REST * min(busy, ended - begun)
        block: dict[str, list[float]] = {}
        for item, seconds in zip(items, times, strict=True):
            block.setdefault(item.name, []).append(seconds)
        return block

    def _is_narrow(self, blocks: list[dict[str, list[float]]], plan: Plan) -> bool:
        medians = [median(block[_SUBJECT]) for block in blocks]
        wanted = WANTED_HALF_WIDTH.get(self.device.type, WANTED_HALF_WIDTH["cpu"])
        if self.device.type == "cuda" and plan.seconds < _SHORT_SECONDS:
            wanted = _WANTED_OF_SHORT
        return median_interval(medians).half_width <= wanted * median(medians)

    def _items(self, plan: Plan) -> list[Item]:
        """Put the anchors between the samples, first and last."""
        of_sample = plan.seconds * plan.calls
        samples = next((number for limit, number in _SAMPLES_BELOW if of_sample < limit), 1)
        op = Item(_SUBJECT, plan.stage, plan.calls)
        compute, memory = (_anchor_item(name, self.anchors[name]) for name in (COMPUTE, MEMORY))
        if samples >= 4:
            half = [op] * (samples // 2)
            return [compute, *half, memory, *half, compute, memory]
        return [compute, op, memory, op] if samples == 2 else [compute, op, memory]

    def _warm(self) -> float:
        """Work until the GPU runs as fast as it will: one that idled, or whose power was capped just now, is slower.

        Return the seconds that a capped one was waited for.
        """
        self._work(_WARMING_SECONDS)
        begun = time.perf_counter()
        late = begun + self._patience
        while (is_capped := self.guard.is_capped()) and time.perf_counter() < late:
            self._work(_LIGHT_SECONDS, MEMORY)  # which draws less power
        self._patience = 0.0 if is_capped else _RECOVERY_SECONDS
        return time.perf_counter() - begun

    def _work(self, seconds: float, *names: str) -> None:
        """Keep the device busy with the anchors of these names, or all."""
        items = [_anchor_item(name, self.anchors[name]) for name in names or self.anchors] * 4
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            with suppress(BacklogError):
                self.timer.block(items)


def protocol_of(kind: str) -> int:
    """Return the number of the protocol by which a kind of device is timed."""
    return PROTOCOLS.get(kind, 1)


def _anchor_item(name: str, anchor: Anchor) -> Item:
    def sample() -> None:
        for _ in range(anchor.calls):
            anchor.call()

    return Item(name, lambda: sample, anchor.calls)


def _threads(device: torch.device) -> int | None:
    import torch

    return torch.get_num_threads() if device.type == "cpu" else None


@functools.cache
def stopwatch_of(device: torch.device, cold: bool = True, own: frozenset[int] = frozenset()) -> Stopwatch:
    """Return the device's stopwatch, made when first asked for."""
    return Stopwatch(device, cold, own)


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Have torch use `number` threads on the CPU for a while; None leaves it as it is."""
    import torch

    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
