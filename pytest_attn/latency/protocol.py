"""The protocol of a measurement: blocks of samples between anchors, each watched for disturbances, until there are enough."""

import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from typing import TypeAlias

import torch

from pytest_attn.latency.anchors import ATTENTION, COMPUTE, MEMORY, Anchor, anchor_item, attention_like, make_anchors
from pytest_attn.latency.cuda_timer import SLOW_SECONDS, BacklogError, CudaTimer
from pytest_attn.latency.disturbance import ContentionMonitor, CpuDisturbanceMonitor, DisturbanceMonitor
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import median_interval
from pytest_attn.latency.timer import GRAPHS, HostTimer, Item, Mode, Plan, Timer
from pytest_attn.latency.work import Work

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: seconds of work that bring an idle GPU to its clock, once per process
_RAMP_SECONDS = 1.0
#: seconds of it where another process worked until some two seconds ago
_WARM_RAMP_SECONDS = 0.3
#: seconds of work right before the blocks: a GPU that was idle takes up to 0.8 % more, or less, than one that worked
_WARMING_SECONDS = 0.1
#: seconds for which a GPU whose power is capped is given time to have its clock back; if it stays capped, it is timed so,
#: and not given time again
_RECOVERY_SECONDS = 0.5
#: seconds of light work meanwhile before NVML is asked again
_LIGHT_SECONDS = 2e-3


class Warmer:
    """Keeps a device busy with its anchors."""

    def __init__(self, timer: Timer, anchors: Mapping[str, Anchor], monitor: DisturbanceMonitor) -> None:
        self._timer, self._anchors, self._monitor = timer, anchors, monitor
        self._recovery_seconds = _RECOVERY_SECONDS

    def ramp_up(self, is_warm: bool = False) -> None:
        """Bring an idle device to its clock; is_warm: one that another process has just left."""
        self._work(_WARM_RAMP_SECONDS if is_warm else _RAMP_SECONDS)

    def warm_up(self) -> float:
        """Work right before the blocks, until the power is no longer capped; return the seconds of waiting for that."""
        self._work(_WARMING_SECONDS)
        begun = time.perf_counter()
        late = begun + self._recovery_seconds
        while (is_capped := self._monitor.is_capped()) and time.perf_counter() < late:
            self._work(_LIGHT_SECONDS, MEMORY)  # which draws less power
        self._recovery_seconds = 0.0 if is_capped else _RECOVERY_SECONDS
        return time.perf_counter() - begun

    def _work(self, seconds: float, *names: str) -> None:
        """Keep the device busy with the anchors of these names, or all."""
        items = [anchor_item(name, self._anchors[name]) for name in names or self._anchors] * 4
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            with suppress(BacklogError):
                self._timer.block(items)


#: numbers of blocks after which the interval is looked at; after the last one a measurement ends
LOOKS = (6, 10, 16, 24)
_FEWEST_BLOCKS = 3
#: half-width of the 95 % interval, as a share of the p50, at which a measurement ends, by kind of device
WANTED_HALF_WIDTH = {"cuda": 0.002, "cpu": 0.005}
#: the same for kernels below so many seconds on a GPU: where their tensors lie moves them as far, in all blocks alike, so that
#: more blocks would cost time and tell nothing
_SHORT_SECONDS, _WANTED_OF_SHORT = 100e-6, 0.004
#: seconds of wall time, by kind of device, within which the blocks end, as far as the shortest of them tells
SECONDS = {"cuda": 0.3, "cpu": 1.2}
#: seconds that a measurement on a GPU takes in all, but for compilers and waiting for the clock, and that its blocks may take
#: in any case
_ALL_SECONDS, _FEWEST_SECONDS = 0.45, 0.1


class Schedule:
    """Says before each block of a measurement whether to take it.

    clock: returns seconds. seconds: of that clock, within which the blocks end. half_width: which is narrow enough, of the
    interval of block medians, as a share of their median.
    """

    def __init__(self, clock: Callable[[], float], seconds: float, half_width: float) -> None:
        self._clock, self._seconds, self._half_width = clock, seconds, half_width
        self._begun, self._shortest = clock(), math.inf

    def wants_another(self, blocks: Sequence[Sequence[float]]) -> bool:
        """Return whether to take another block, which then begins. blocks: the kernel's samples in those that were taken."""
        if blocks and self._is_over(blocks):
            return False
        self._block_begun = self._clock()
        return True

    def _is_over(self, blocks: Sequence[Sequence[float]]) -> bool:
        ended = self._clock()
        self._shortest = min(self._shortest, ended - self._block_begun)  # the others were repeated
        is_late = ended + self._shortest - self._begun > self._seconds
        if len(blocks) >= LOOKS[-1] or (is_late and len(blocks) >= _FEWEST_BLOCKS):
            return True
        return len(blocks) in LOOKS and is_narrow(blocks, self._half_width)


def is_narrow(blocks: Sequence[Sequence[float]], half_width: float) -> bool:
    """Return whether the interval of the block medians has at most this half-width, as a share of their median."""
    medians = [median(block) for block in blocks]
    return median_interval(medians).half_width <= half_width * median(medians)


def wanted_half_width(kind: str, seconds: float) -> float:
    """Return the half-width at which a measurement on a kind of device ends, for a call of so many seconds."""
    if kind == "cuda" and seconds < _SHORT_SECONDS:
        return _WANTED_OF_SHORT
    return WANTED_HALF_WIDTH.get(kind, WANTED_HALF_WIDTH["cpu"])


def seconds_for_blocks(kind: str, spent: float) -> float:
    """Return how long the blocks of a measurement may take that has taken so many seconds until now."""
    most = SECONDS.get(kind, SECONDS["cpu"])
    return min(most, max(_FEWEST_SECONDS, _ALL_SECONDS - spent)) if kind == "cuda" else most


#: by kind of device, kept with every baseline; bump one when a change of how blocks are taken shifts times by more than the
#: gate can detect: times of another protocol cannot be compared. How long a measurement lasts only changes its scatter.
PROTOCOLS = {"cuda": 3, "cpu": 3}
#: what the samples of the kernel are called; the others are those of the anchors
SUBJECT = "op"
#: said of a kernel that was recorded in a graph: the gaps between its launches are part of its time now
_NO_GRAPH = "recorded in a CUDA graph, which cannot be captured now: timed call by call, which takes longer"
_NOT_ON_DEVICE = (
    "recorded in a CUDA graph in the device's memory, which torch or the driver cannot make: a replay takes another time"
)
#: how long the device rests after a block, as a multiple of the block's time: it draws less power on average
_REST = 1.0
_MOST_REPEATS = 3
#: seconds of one sample, and samples per block below them
_SAMPLES_BELOW = ((1e-3, 6), (2e-3, 4), (10e-3, 2))

#: the seconds of its samples, by their name
Block: TypeAlias = dict[str, list[float]]


class Stopwatch:
    """All that one device needs to time kernels, made once per process.

    own: pids of ours, besides this process's. is_warm: whether another process worked on the device until now.
    """

    def __init__(
        self, device: torch.device, cold: bool = True, own: frozenset[int] = frozenset(), is_warm: bool = False
    ) -> None:
        self.device, self.cold = device, cold and device.type == "cuda"
        contention = ContentionMonitor() if device.type == "cpu" else None
        self.timer: Timer = CudaTimer(device, cold) if device.type == "cuda" else HostTimer(device, contention)
        self.monitor = CpuDisturbanceMonitor(contention) if contention else DisturbanceMonitor.of(device, own)
        self.anchors: dict[str, Anchor] = make_anchors(device)
        self.warmer = Warmer(self.timer, self.anchors, self.monitor)
        self._rested, self._like = 0.0, dict[str, Anchor]()
        if device.type == "cuda":
            self.warmer.ramp_up(is_warm)

    def measure(
        self, work: Work, workload: str, subject: str, mode: Mode | None = None, seconds: float | None = None
    ) -> Latency:
        """Measure a work. mode: the baseline's, see `Timer.plan`. seconds: the cap of wall time for its blocks.

        Raises StaleError for a kernel whose results are not those of its data when it is called again.
        """
        begun = time.perf_counter()
        self.monitor.begin_all(SUBJECT)
        work.begin()
        memory = self.timer.peak_memory(work)  # before graphs keep parts of what autograd would make anew
        self._like = {ATTENTION: attention_like(work.workload)} if self.device.type == "cpu" and work.workload else {}
        plan, blocks, disturbances = self._plan_and_blocks(work, mode, seconds)
        disturbances += [lasting] if (lasting := self.monitor.lasting_disturbance()) else []
        disturbances += _no_graph_because(mode, plan.mode)
        medians = [median(block[SUBJECT]) for block in blocks]
        anchors = {name: median(median(block[name]) for block in blocks) for name in (*self.anchors, *self._like)}
        return Latency(
            workload=workload,
            subject=subject,
            direction=work.direction,
            p50=median(medians),
            interval=median_interval(medians),
            samples=tuple(sample for block in blocks for sample in block[SUBJECT]),
            blocks=len(blocks),
            mode=plan.mode,
            calls=plan.calls,
            l2="cold" if self.cold and plan.mode != "host" else "warm",
            launch=plan.launch,
            anchors=anchors | self.monitor.anchors(),
            memory=memory,
            threads=torch.get_num_threads() if self.device.type == "cpu" else None,
            disturbances=tuple({re.sub(r"\d+", "", words): words for words in disturbances}.values()),  # one of each kind
            notes=tuple(self.monitor.notes),
            conditions=self.monitor.conditions(),
            spent=time.perf_counter() - begun,
        )

    def _plan_and_blocks(self, work: Work, mode: Mode | None, seconds: float | None) -> tuple[Plan, list[Block], list[str]]:
        """Choose how to time a work, and take its blocks; by the host's clock if the device does not stay behind it."""
        compiled_at = time.perf_counter()
        plan = self.timer.plan(work, mode)
        try:
            return plan, *self._blocks(plan, self._timer_of(plan), work, seconds, compiled_at)
        except BacklogError:
            timer = self._host_timer()
            plan = timer.plan(work)
            return plan, *self._blocks(plan, timer, work, seconds, time.perf_counter())

    def _timer_of(self, plan: Plan) -> Timer:
        return self.timer if plan.mode != "host" or isinstance(self.timer, HostTimer) else self._host_timer()

    def _host_timer(self) -> Timer:
        """Return what times calls whose device does not stay behind its host."""
        return HostTimer(self.device)

    def _blocks(
        self, plan: Plan, timer: Timer, work: Work, seconds: float | None, compiled_at: float
    ) -> tuple[list[Block], list[str]]:
        """Take blocks as long as the schedule wants another; the first one, which warms up, is dropped.

        But for a slow kernel on a GPU, whose calls while it was planned have done that.
        """
        items = _items_of(plan, self.anchors | self._like, work)
        blocks: list[Block] = []
        disturbances: list[str] = []
        with work.context():
            if isinstance(timer, CudaTimer):
                compiled_at += self.warmer.warm_up()
            if not (isinstance(timer, CudaTimer) and plan.seconds > SLOW_SECONDS):
                self._block(timer, items, plan)
                work.verify_kept()
            self.monitor.begin()
            kind = self.device.type
            if seconds is None:
                seconds = seconds_for_blocks(kind, time.perf_counter() - compiled_at)
            schedule = Schedule(self._now, seconds, wanted_half_width(kind, plan.seconds))
            while schedule.wants_another([block[SUBJECT] for block in blocks]):
                block, disturbance = self._undisturbed(timer, items, plan)
                work.verify_kept()
                blocks.append(block)
                disturbances += [disturbance] if disturbance else []
            work.verify_kept(is_last=True)
        return blocks, disturbances

    def _now(self) -> float:
        """Return the seconds of a clock that stands still while others have the core."""
        return time.perf_counter() - self.monitor.lost()

    def _undisturbed(self, timer: Timer, items: list[Item], plan: Plan) -> tuple[Block, str | None]:
        """Repeat a disturbed block, later and later; return the last one with what still disturbed it."""
        for attempt in range(_MOST_REPEATS + 1):
            block = self._block(timer, items, plan)
            disturbance = self.monitor.disturbance()
            if disturbance is None:
                break
            if attempt < _MOST_REPEATS:
                time.sleep(0.05 * 2**attempt)
                self.monitor.begin()
        return block, disturbance

    def _block(self, timer: Timer, items: list[Item], plan: Plan) -> Block:
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
        block: Block = {}
        for item, seconds in zip(items, times, strict=True):
            block.setdefault(item.name, []).append(seconds)
        return block


def _no_graph_because(recorded: Mode | None, taken: Mode) -> list[str]:
    """Say why a time cannot be compared with one that was recorded in a graph; nothing where it can."""
    if recorded in GRAPHS and taken in ("batched", "events"):
        return [_NO_GRAPH]
    return [_NOT_ON_DEVICE] if (recorded, taken) == ("graph", "replay") else []


def protocol_of(kind: str) -> int:
    """Return the number of the protocol by which a kind of device is timed."""
    return PROTOCOLS.get(kind, 1)


def _items_of(plan: Plan, anchors: Mapping[str, Anchor], work: Work) -> list[Item]:
    """Put the anchors between the samples, first and last, and attention like the kernel before each sample."""
    of_sample = plan.seconds * plan.calls
    samples = next((number for limit, number in _SAMPLES_BELOW if of_sample < limit), 1)
    op = [Item(SUBJECT, plan.stage, plan.calls, work.keep, work.glance)]
    op = [anchor_item(ATTENTION, anchors[ATTENTION]), *op] if ATTENTION in anchors else op
    compute, memory = (anchor_item(name, anchors[name]) for name in (COMPUTE, MEMORY))
    if samples >= 4:
        half = op * (samples // 2)
        return [compute, *half, memory, *half, compute, memory]
    return [compute, *op, memory, *op] if samples == 2 else [compute, *op, memory]


@functools.cache
def stopwatch_of(
    device: torch.device, cold: bool = True, own: frozenset[int] = frozenset(), is_warm: bool = False
) -> Stopwatch:
    """Return the device's stopwatch, made when first asked for: also within inference mode for calls without."""
    with torch.inference_mode(False):
        return Stopwatch(device, cold, own, is_warm)


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Have torch use `number` threads on the CPU for a while; None leaves it as it is."""
    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
