"""Timer of a block of calls on a GPU: CUDA events behind a backlog, so that the host is never waited for."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import torch

from pytest_attn.backends.contexts import no_collection
from pytest_attn.backends.streams import capturing, side_stream
from pytest_attn.latency.kernel_work import Call, CallResults, KernelWork
from pytest_attn.latency.timer import CHANCE, GRAPHS, KEPT, HostTimer, Item, Mode, Plan, Stage, Timer, repeated, several
from pytest_attn.latency.work import TimedCall, Work, WrongResultError, called, peak_of, verified

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: seconds of device time from which a call has a pair of events of its own; below, calls share what a pair adds (about 4 us)
OWN_EVENTS_SECONDS = 250e-6
#: seconds of a shared sample, and the most calls of one: the host launches batches anew while the device is kept waiting
_SAMPLE_SECONDS: dict[Mode, float] = {"graph": 0.8e-3, "replay": 0.8e-3, "batched": 0.2e-3}
_MOST_CALLS: dict[Mode, int] = {"graph": 40, "replay": 40, "batched": 20}
_FEWEST_CALLS = 4
#: seconds of a call in a graph from which its samples are several replays, and theirs: causal flash attention scatters by 4 %
#: from call to call, and the median of few long samples knows more of that than that of many short ones
_LONG_SECONDS, _LONG_SAMPLE_SECONDS = 100e-6, 2.4e-3
#: a host that needs longer than both to launch a call is what the user waits for, and is timed; below, the gate looks at it.
#: The ratio: to the device's time of the call
_HOST_BOUND_SECONDS, _HOST_BOUND_RATIO = 2e-3, 4.0


def choose_mode(recorded: Mode | None, launch: float, device: float | None) -> Mode:
    """Return the mode for a call that takes the host `launch` seconds to launch, and the device `device` seconds.

    recorded: the baseline's, which is kept unless the call is bound by the host. device: None if it cannot be kept waiting.
    """
    shift = {None: 1.0, "host": 0.5}.get(recorded, 2.0)  # so that a call near it keeps its mode
    if device is None or launch > shift * max(_HOST_BOUND_SECONDS, _HOST_BOUND_RATIO * device):
        return "host"
    if recorded in (None, "host"):
        return "graph" if device < OWN_EVENTS_SECONDS else "events"
    return recorded


def replays_per_sample(calls: int, seconds: float, sets: int) -> int:
    """Return how many replays of a graph share a sample, by the device's time of a call; as many as have their own sets."""
    return max(1, min(round(_LONG_SAMPLE_SECONDS / (calls * seconds)), sets // calls)) if seconds >= _LONG_SECONDS else 1


def calls_per_sample(seconds: float, mode: Mode) -> int:
    """Return how many calls share a sample of a mode, by the device's time of one."""
    if mode == "events":
        return 1
    return min(max(_FEWEST_CALLS, math.ceil(_SAMPLE_SECONDS[mode] / max(seconds, 1e-9))), _MOST_CALLS[mode])


#: CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
_DEVICE_LAUNCH = 4
#: CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED = 2


class DeviceGraphError(Exception):
    """The driver does not instantiate a graph so, torch does not keep one, or there is no driver."""


class DeviceGraph:
    """A captured graph, instantiated in the device's memory.

    graph: made with `keep_graph=True` (torch 2.8), whose tensors live as long as this. Raises DeviceGraphError for what only
    the host can launch: a graph with work of the host in it, say.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._executable = ctypes.c_void_p()
        self._graph, self._device, self._driver = graph, device, _driver()
        captured = ctypes.c_void_p(graph.raw_cuda_graph())
        self._ask("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), captured, ctypes.c_ulonglong(_DEVICE_LAUNCH))
        self._ask("cuGraphUpload", self._executable, self._stream())

    def replay(self) -> None:
        """Launch it on the stream that is then current. Unlike torch's, it draws no new random numbers."""
        self._ask("cuGraphLaunch", self._executable, self._stream())

    def __del__(self) -> None:
        if not self._executable or sys.is_finalizing():
            return
        mode = ctypes.c_int(_RELAXED)  # the collector may come by while something else is captured on this thread
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._driver.cuGraphExecDestroy(self._executable)
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _ask(self, name: str, *arguments: object) -> None:
        """Call a function of the driver. Raises DeviceGraphError where there is none, or its answer is not CUDA_SUCCESS."""
        function = getattr(self._driver, name, None)
        if function is None:
            raise DeviceGraphError(f"{name}: this driver has no such function")
        if answer := function(*arguments):
            raise DeviceGraphError(f"{name}: CUDA error {answer}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise DeviceGraphError(f"no driver: {error}") from error


#: bytes of padding that are kept alive after each captured call, so that the next call's workspace has another address (if it
#: has up to 1 MiB, from the allocator's small blocks): graphs of calls with one workspace differ by 1 %
_PADDING_BYTES = 512
#: seconds after which no more graphs are captured, if there are a few: a host that is slow to launch is slow to capture, too;
#: at one of these few, as chance has it, is looked before it is timed, at all of them after that
_SECONDS, _FEWEST = 0.12, 3


class Replay:
    """A graph that was captured, ready to be replayed on other data.

    outputs: what its calls return, each time in the same memory; of all but those at `whole` the first alone.
    """

    def __init__(
        self, executable: Any, work: KernelWork, calls: Sequence[Call], outputs: Sequence[list[torch.Tensor]], whole: list[int]
    ) -> None:
        self._executable, self._work, self._calls, self._outputs = executable, work, calls, outputs
        self._whole = whole

    def stage(self) -> Replay:
        """Put other data in place."""
        self._work.stage_again(self._calls)
        return self

    def __call__(self) -> None:
        """Replay it."""
        self._executable.replay()

    def seen(self, value: None) -> CallResults:
        """Return what one call has returned, which chance chooses, and where its data lie."""
        at = CHANCE.choice((CHANCE.choice(self._whole), CHANCE.randrange(len(self._calls))))
        return self._calls[at].seen(self._outputs[at])


def graphs_of(work: KernelWork, calls: int, number: int, on_device: bool) -> list[Stage]:
    """Capture up to `number` graphs of `calls` calls on different sets; none where one cannot be captured.

    What is returned stages the replay of a graph. on_device: in the device's memory; raises DeviceGraphError if the calls can
    be captured, but not so. Raises StaleError for a graph that computes something, but not attention on its data.
    """
    stream = torch.cuda.Stream(work.device)  # type: ignore[no-untyped-call]
    graphs: list[Stage] = []
    begun, looked_at = time.perf_counter(), CHANCE.randrange(_FEWEST)
    while len(graphs) < _FEWEST or (len(graphs) < number and time.perf_counter() - begun < _SECONDS):
        if (replay := _captured(work, calls, stream, on_device, len(graphs) == looked_at)) is None:
            return []
        graphs.append(replay)
    return graphs


def _captured(work: KernelWork, calls: int, stream: torch.cuda.Stream, on_device: bool, is_looked_at: bool) -> Stage | None:
    """Capture calls on the next sets in one CUDA graph; None where that cannot be done, or leaves something out.

    Its outputs are poisoned and its data changed before a replay. is_looked_at: whether what that returns must be attention.
    A backward pass runs on the stream of its forward pass, which therefore is the captured one.
    """
    torch.cuda.synchronize(work.device)
    try:
        graph = torch.cuda.CUDAGraph(**({"keep_graph": True} if on_device else {}))
    except TypeError as error:
        raise DeviceGraphError(f"torch {torch.__version__} keeps no graph that it captured; 2.8 does") from error
    outputs: list[list[torch.Tensor]] = []
    # to keep all that all calls return would change where they write it; a kernel that sees one kept may see another
    whole = [CHANCE.randrange(calls) for _ in range(CHANCE.randint(1, 2))]
    padding: list[torch.Tensor] = []  # until the capture is over
    try:
        with side_stream(work.device, stream):
            staged = [work.stage(replayed=True) for _ in range(calls)]
            staged[0]()
        with capturing(graph, stream):
            for at, call in enumerate(staged):
                outputs.append([*work.results(call()).values()][: None if at in whole else 1])
                padding.append(torch.empty(_PADDING_BYTES, dtype=torch.uint8, device=work.device))
        executable = DeviceGraph(graph, work.device) if on_device else graph
        replay = Replay(executable, work, staged, outputs, whole).stage()
        for output in itertools.chain(*outputs):
            output.fill_(math.nan)
        replay()
        torch.cuda.synchronize(work.device)
    except DeviceGraphError:
        raise
    except Exception:  # a library may raise anything in a capture; what it does outside of one was verified already
        torch.cuda.synchronize(work.device)
        return None
    if bool(torch.stack([output.isnan().all() for output in itertools.chain(*outputs)]).any()):
        return None
    if is_looked_at:
        work.verify_call("replayed in a graph", replay, None)
    return replay.stage


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
        self.device, self.cold = device, cold
        self.host_timer = HostTimer(device)
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
        self._flushed = torch.empty(2 * l2, dtype=torch.uint8, device=device) if cold else None
        self._cycles = self._cycles_per_second()
        self._backlogs: dict[tuple[str, ...], float] = {}  # which blocks of this work wanted the last time
        self._gaps = itertools.cycle(_GAPS)
        self._gap: torch.Tensor | None = None

    def plan(self, work: Work, mode: Mode | None = None) -> Plan:
        with work.context():
            self._backlogs.clear()
            work.rotate_over(1)
            looks = [verified(work), called(work)]  # whose results stay in memory until all is planned
            launch, device = self._launch_and_device_time(work, looks)
            wanted = choose_mode(mode, launch, device)
            if device is None or wanted == "host":
                return self.host_timer.plan(work)._replace(launch=launch)
            most = max(1, int(torch_free_memory(self.device) * _SHARE_OF_FREE_MEMORY // max(1, 2 * work.nbytes)))
            if wanted in GRAPHS and isinstance(work, KernelWork):
                if plan := _plan_in_graphs(work, wanted, launch, device, most):
                    return plan
                wanted = "batched"
            calls = _calls_on_own_sets(work, device, wanted, most)
            plan = Plan("batched" if calls > 1 else "events", calls, device, launch, several(work, calls))
            return plan._replace(renew=functools.partial(self.move, work, calls)) if most >= 2 * len(work.sets) else plan

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
        pairs = []
        with no_collection():
            self._sleep(backlog)
            begun = time.perf_counter()
            for item in items:
                call = item.stage()
                self._flush()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                value = call()
                end.record()
                item.keep(call, value)
                del value  # whose memory the next call is given, as that of others
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

    def move(self, work: Work, calls: int = 1) -> None:
        """Give the work, and what its kernel allocates, other memory."""
        self._gap = None
        work.move()
        torch.cuda.empty_cache()
        self._gap = torch.empty(next(self._gaps) << 20, dtype=torch.uint8, device=self.device)
        results = [work.stage()() for _ in range(min(calls, 2 * KEPT))]  # as many as a sample may keep
        del results
        torch.cuda.synchronize(self.device)

    def _flush(self) -> None:
        if self._flushed is not None:
            self._flushed.zero_()

    def _sleep(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles))  # type: ignore[no-untyped-call]

    def _cycles_per_second(self) -> float:
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
        """Put other data in place, call and look at the result, all while the device sleeps, over poisoned free memory.

        A kernel on another stream that does not wait reads the old data; if nobody waits for it, the poison stays.
        """
        if work.direction != "forward":
            return
        like = work.result(work.stage()())
        torch.cuda.synchronize(self.device)
        poison = [torch.full_like(like, math.nan) for _ in range(2)]
        del like
        torch.cuda.synchronize(self.device)
        del poison
        self._sleep(2e-3)
        call = work.stage()
        seen = work.result(call()).clone()
        torch.cuda.synchronize(self.device)
        try:
            work.verify_call("called behind other work of its stream", call, seen)
        except WrongResultError as error:
            raise WrongResultError(
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
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _plan_in_graphs(work: KernelWork, wanted: Mode, launch: float, device: float, most: int) -> Plan | None:
    """Return the plan of samples that replay graphs, None where no graph can be had."""
    calls = _calls_on_own_sets(work, device, wanted, most)
    mode, graphs = _graphs(work, calls, wanted)
    if not graphs:
        return None
    replays = replays_per_sample(calls, device, len(work.sets))
    graph = itertools.cycle(graphs)
    stage = repeated(lambda: next(graph)(), replays)
    return Plan(mode, calls * replays, device, launch, stage)


def _graphs(work: KernelWork, calls: int, wanted: Mode) -> tuple[Mode, list[Stage]]:
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
