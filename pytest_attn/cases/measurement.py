"""One `attn.measure`: what is timed and where, what the time is filed under, and taking it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import pytest
import torch

from pytest_attn.backends.machine import current
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.correctness.tripwire import require_clocks, switches_kept
from pytest_attn.guests.ranks.communication import figures_of, topology_of
from pytest_attn.guests.ranks.controller_timing import RankedStopwatch, RankedWork
from pytest_attn.guests.ranks.pool import Pool
from pytest_attn.guests.ranks.worker_timing import threads_of_rank
from pytest_attn.isolation.isolated_function import IsolatedFunction, Recorded
from pytest_attn.latency.baseline_file import Baseline, case_key, conditions_of, gpu_of
from pytest_attn.latency.gate import Policy, policy_for
from pytest_attn.latency.kernel_work import Call, KernelWork, work_of
from pytest_attn.latency.nvml import ClockError, locked_clocks
from pytest_attn.latency.protocol import Stopwatch, stopwatch_of, threads
from pytest_attn.latency.regression import Measured
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Interval
from pytest_attn.latency.timer import Mode
from pytest_attn.latency.work import LatencyDirection, StaleError
from pytest_attn.processes.worker import own_processes
from pytest_attn.reports.lines import count
from pytest_attn.session.kinds import id_from_root, name_for_processes
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.functions import function_label
from pytest_attn.workloads.sharding import Sharding

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: what a measurement may take between two calls: it waits for the core, has the device rest, and repeats what was disturbed
WAITING_SECONDS = 60.0
#: which results of a check say how accurate a direction is
_RESULTS_OF = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


class TimingPlace:
    """Where a subject is timed: in this process."""

    def label(self, key: bool = False, kind: str = "cpu") -> str:
        """Return what names of measurements say of it, or the keys of their baselines on a kind of device."""
        return ""

    def untimed_because(self, device: torch.device, session: AttentionSession) -> str | None:
        """Say why nothing can be timed there, None where it can."""
        return None

    def devices(self, device: torch.device) -> list[torch.device]:
        """Return what is timed on, and must be free meanwhile."""
        return [device]

    def threads(self) -> int:
        """Return how many threads of a CPU are used, where nobody says it."""
        return torch.get_num_threads()

    def contexts(self, measurement: Measurement) -> Iterator[AbstractContextManager[object]]:
        """Yield what a measurement is made within."""
        device = measurement.spec.device
        yield current(device)
        yield measurement.subject.calling()
        if device.type == "cpu":
            yield threads(measurement.session.settings.threads)
        yield switches_kept(device.type)

    def take(self, measurement: Measurement, mode: Mode | None) -> Latency:
        """Time a subject, once the device is as it is to be."""
        machine = measurement.session.machines.machine(str(measurement.spec.device))
        work = work_of(measurement.subject, measurement.spec, measurement.direction, machine)
        case, deadline = f"timing {measurement.name}, {measurement.item.nodeid}", measurement.session.deadline
        with deadline.around(case), work.context():
            work.stage()()
        stopwatch = measurement.stopwatch
        with deadline.around(case, beyond=WAITING_SECONDS) as work.on_call:
            return stopwatch.measure(work, measurement.spec.workload.id, measurement.subject.name, mode)


#: calls in a row, at least and at most, the seconds that they are to take, and the bytes of what they return
_FEWEST, _MOST, _SECONDS, _BYTES = 2, 512, 0.05, 1 << 30
#: forward passes of which a backward pass alone gets one: their graphs keep memory
_SETS = 32
#: at the results of how many of them is looked, which nobody knows before
_LOOKS = 8
#: by how much such calls may be slower than was claimed, in all and each; and how often that is tried
_SLACK_SECONDS, _SLACK_OF_CALL, _SLOWER, _TRIES = 2e-3, 4e-6, 1.5, 8
#: and by how much where nobody knows whether they waited for a core
_SLOWER_UNSEEN = 4.0


class TimedIsolated(TimingPlace):
    """The process of a function, which times itself; what it claims is compared with calls in a row by this one's clock."""

    def __init__(self, function: IsolatedFunction) -> None:
        self._function = function

    def take(self, measurement: Measurement, mode: Mode | None) -> Latency:
        """Time a subject. Raises StaleError where calls in a row are slower than was claimed, or wrong."""
        spec, direction = measurement.spec.for_subject(measurement.subject), measurement.direction
        machine = measurement.session.machines.machine(str(spec.device))
        work = work_of(measurement.subject, measurement.spec, direction, machine)
        work.rotate_over(0)
        recorded, _ = self._recorded(work, made=1)
        told = _told(spec)
        claimed = self._function.measured(
            spec=told,
            is_told=told.workload == spec.workload and not measurement.subject.is_approximate,
            direction=direction,
            mode=mode,
            cold=measurement.session.settings.l2 == "cold",
            threads=torch.get_num_threads(),
            own=sorted(own_processes()),
        )
        try:
            latency = latency_of(claimed, spec.workload.id, measurement.subject.name, direction, spec.device.type)
        except (KeyError, TypeError, ValueError, OverflowError):
            self._function.start().give_up("its process returned garbage in place of a time")
        return self._held_to(latency, work, recorded[0].given)

    def _recorded(self, work: KernelWork, made: int) -> tuple[list[Recorded], list[Call]]:
        """Return so many calls that were made, each on data of its own, after a look at the result of the last."""
        calls = []
        with self._function.recording() as recorded, work.context():
            for _ in range(made):
                calls.append(call := work.stage(replayed=True))
                value = call()
        work.verify_call("called on new data", call, value)
        return recorded, calls

    def _held_to(self, latency: Latency, work: KernelWork, given: Sequence[torch.Tensor]) -> Latency:
        """Raise StaleError where calls in a row take longer than was claimed; where that cannot be told, say why."""
        each = latency.p50 if latency.mode == "host" else latency.p50 + latency.launch
        fits = max(_FEWEST, _BYTES // max(1, sum(one.nbytes for one in given)))
        is_backward = work.direction == "backward"
        number = int(min(max(_FEWEST, _SECONDS / each), _SETS if is_backward else _MOST, fits))
        made = number if is_backward else _FEWEST
        system, found = random.SystemRandom(), list[float]()
        for _ in range(_TRIES):
            recorded, calls = self._recorded(work, made)
            chosen, row = list[tuple[Recorded, Call]](), list[tuple[int, ...]]()  # what is called, and how it is asked for
            for at in range(number):
                last = system.randrange(made)  # whose dout it is
                if is_backward:
                    chosen.append((recorded[last], work.with_qkv_at(calls[last], calls[at].given.qkv)))
                    row.append((at, 0, 0, 0, last))
                else:
                    call, further = work.moved(calls[last])
                    chosen.append((recorded[last], call))
                    row.append((last, *further, last))
            seconds, waited = self._function.in_a_row(recorded, work.direction, row)
            for one in system.sample(range(number), min(number, _LOOKS)):
                result, call = chosen[one]
                result.keep(result.call.fetched(one), work.direction)
                with self._function.replaying(result), work.context():
                    value = call()
                work.verify_call("called in a row", call, value)
            most = number * (each * (_SLOWER_UNSEEN if waited is None else _SLOWER) + _SLACK_OF_CALL) + _SLACK_SECONDS
            if seconds <= most:
                return latency
            found.append(seconds - (waited or 0.0))  # threads may wait for one another, too
        if min(found) <= most:
            unknown = "the time that its process claims could not be verified, because other processes used the cores"
            return replace(latency, disturbances=(*latency.disturbances, unknown))
        raise StaleError(
            f"its process says that a call takes {each * 1e6:.4g} us, but {number} calls in a row took at least"
            f" {min(found) / number * 1e6:.4g} us each, by the clock of the process that judges"
        )


def _told(spec: CheckSpec) -> CheckSpec:
    """Return what a process learns of a case: neither the draws of its run, nor functions that only the test can import."""
    w = spec.workload
    mask = None if w.mask is None or w.mask.function is not None else w.mask
    workload = w if mask is w.mask and w.score_mod is None else w.replace(mask=mask, score_mod=None)
    return replace(spec, workload=workload, seed=random.SystemRandom().getrandbits(31), parameters={})


def latency_of(claimed: dict[str, Any], workload: str, subject: str, direction: LatencyDirection, kind: str) -> Latency:
    """Return what another process claims to have measured on a kind of device.

    Raises KeyError, TypeError or ValueError for what cannot have been.
    """

    def number(value: Any) -> float:
        if type(value) not in (int, float) or not 0 <= value < 1e6:
            raise ValueError(f"no number of seconds: {value!r}")
        return float(value)

    def texts(values: Any) -> tuple[str, ...]:
        return tuple("".join(filter(str.isprintable, str(one)[:300])) for one in list(values)[:20])

    p50, low, high, confidence = map(number, (claimed["p50"], *claimed["interval"]))
    if not p50 or claimed["mode"] not in (get_args(Mode) if kind == "cuda" else ("host",)):
        raise ValueError("no time")
    memory, threads = claimed["memory"], claimed["threads"]
    return Latency(
        workload=workload,
        subject=subject,
        direction=direction,
        p50=p50,
        interval=Interval(low, high, confidence),
        samples=tuple(map(number, claimed["samples"][:100_000])),
        blocks=int(number(claimed["blocks"])),
        mode=claimed["mode"],
        calls=int(number(claimed["calls"])),
        l2="cold" if claimed["l2"] == "cold" else "warm",
        launch=number(claimed["launch"]),
        anchors={str(name)[:40]: number(value) for name, value in list(claimed["anchors"].items())[:20]},
        memory=None if memory is None else int(memory),
        threads=None if threads is None else int(threads),
        disturbances=texts(claimed["disturbances"]),
        notes=texts(claimed["notes"]),
        conditions={name: value for name, value in claimed["conditions"].items() if type(value) in (int, float, str)},
        spent=number(claimed["spent"]),
    )


@dataclass(frozen=True)
class Measurement:
    """What is timed, in which direction, and whose test it is.

    comparison: of the check before, None where a new process did not check. number: of the measurements of this name and
    direction in its test; nth: of all of them.
    """

    session: AttentionSession
    item: pytest.Item
    spec: CheckSpec
    subject: Subject
    direction: LatencyDirection
    comparison: Comparison | None
    number: int
    nth: int = 1
    place: TimingPlace = field(default_factory=TimingPlace)

    #: whether it is a kernel's, of which a profile has a time as well
    is_of_one_kernel = True

    # -- names ---------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What is timed, for messages."""
        return f"{self.subject.name} on {self.spec.workload.id}, {self.direction}{self.place.label()}"

    @property
    def key(self) -> str:
        """The key of its baseline: a backend is the same in every test, a callable belongs to its own."""
        name = self.subject.baseline_name(id_from_root(self.item))
        if not self.subject.is_backend and self.number > 1:
            name += f" #{self.number}"
        l2 = self.session.settings.l2 if self.spec.device.type == "cuda" else "warm"
        layout = self.spec.for_subject(self.subject).layout
        key = case_key(self.spec.workload.id, name, self.direction, l2, layout, self.threads)
        return f"{key}{self.place.label(key=True, kind=self.spec.device.type)}"

    @property
    def devices(self) -> list[torch.device]:
        """What is timed on, and must be free meanwhile."""
        return self.place.devices(self.spec.device)

    @property
    def threads(self) -> int | None:
        """How many threads of a CPU are used; None elsewhere."""
        if self.spec.device.type != "cpu":
            return None
        return self.session.settings.threads or self.place.threads()

    @property
    def kind(self) -> tuple[str, ...]:
        """What a test's measurements are numbered by."""
        return self.subject.baseline_name(""), self.direction

    @property
    def test_name(self) -> str:
        """What a command line of a new process calls its test."""
        return name_for_processes(self.item)

    @property
    def untimed_because(self) -> str | None:
        """Why it cannot be timed for a reason of its own, None where it can."""
        return self.place.untimed_because(self.spec.device, self.session)

    # -- how it is judged ----------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """What counts as slower: the device's policy, with --attn-max-slowdown."""
        policy = policy_for(self.spec.device.type)
        wanted = self.session.settings.max_slowdown
        return replace(policy, slowdown=wanted) if wanted else policy

    @property
    def cases(self) -> int:
        """How many cases this run decides over, at most; the n-th measurement of a test counts as n (n + 1) of them.

        The sum of 1 / (n (n + 1)) is 1: however often tests measure, the suite's rate of false alarms holds.
        """
        return max(1, self.session.collected.selected) * self.nth * (self.nth + 1)

    def measured(self, latency: Latency) -> Measured:
        """Return a time of it, with all that its baseline must agree with."""
        return Measured(
            latency=latency,
            key=self.key,
            shape=self.shape,
            version=self.subject.version(),
            check=f"{','.join(self.spec.inputs)} seed {self.spec.seed}",  # what the check depended on
            z=self._z(),
            conditions=conditions_of(self.spec.device, self.stopwatch.monitor.conditions()),
            gpu=gpu_of(self.spec.device),
            kind=self.spec.device.type,
            folder=self.session.baselines_folder,
        )

    def to_baseline(self, latency: Latency, reason: str, date: str) -> Baseline:
        """Return its baseline but for the runs, which new processes take."""
        measured, shared = self.measured(latency), ("shape", "version", "check", "z", "conditions", "gpu", "protocol")
        facts: dict[str, Any] = {name: getattr(measured, name) for name in shared}
        return Baseline(
            **facts,
            mode=latency.mode,
            p50=(),
            launch=(),
            anchors={},
            flops=self._work_of_passes("flops"),
            nbytes=self._work_of_passes("bytes"),
            date=date,
            reason=reason,
            memory=latency.memory,
        )

    @property
    def shape(self) -> str:
        """Which problem is timed, in full: another one under the same key is another case."""
        return self.spec.workload.shape_id

    def record_fields(self) -> dict[str, Any]:
        """Return further fields of its record."""
        return {}

    def _work_of_passes(self, what: Literal["flops", "bytes"]) -> int:
        parts: Any = ("forward", "backward") if self.direction == "forward+backward" else (self.direction,)
        return sum(getattr(self.spec.workload, what)(part) for part in parts)

    def _z(self) -> tuple[float, float, float] | None:
        """Return the largest residuals over an element, a row and a head of what this direction computes."""
        results = _RESULTS_OF.get(self.direction, ("out", "lse", "dq", "dk", "dv"))
        tensors = [t for t in self.comparison.tensors if t.name in results] if self.comparison else []
        if not tensors:
            return None
        return max(t.z_element for t in tensors), max(t.z_row for t in tensors), max(t.z_head for t in tensors)

    # -- the time ------------------------------------------------------------------------------------------------------

    def time(self, mode: Mode | None) -> Latency:
        """Time the subject. mode: what its baseline was recorded with, None for the best there is.

        Raises StaleError for a subject whose results are not those of its data, DeadlineError for one that takes too long,
        pytest.UsageError for clocks that cannot be locked, RuntimeError for one of Python's that has been replaced. Exceptions
        of the subject pass through.
        """
        require_clocks()
        with ExitStack() as stack:
            for context in self.place.contexts(self):
                stack.enter_context(context)
            self._lock_clocks(stack)
            return self._take(mode)

    def _take(self, mode: Mode | None) -> Latency:
        """Time what is measured, once the device is as it is to be."""
        return self.place.take(self, mode)

    def _lock_clocks(self, stack: ExitStack) -> None:
        """Hold the GPU's clock while it is timed, where that is asked for; refuse where there is no GPU at all."""
        wanted, devices = self.session.settings.lock_clocks, self.devices
        if wanted and (devices[0].type == "cuda" or not torch.cuda.is_available()):
            try:
                for device in devices:
                    stack.enter_context(locked_clocks(device, None if wanted == "max" else int(wanted)))
            except ClockError as error:
                raise pytest.UsageError(f"--attn-lock-clocks: {error}") from None

    @property
    def stopwatch(self) -> Stopwatch:
        """The run's, of the device."""
        is_cold, worker = self.session.settings.l2 == "cold", self.session.worker
        is_warm = worker is not None and worker.finds_device_warm
        return stopwatch_of(self.spec.device, is_cold, own_processes(), is_warm)


# -- on ranks ----------------------------------------------------------------------------------------------------------


class TimedOnRanks(TimingPlace):
    """The ranks of a pool, which time a callable together, each with its shards."""

    def __init__(self, pool: Pool, sharding: Sharding) -> None:
        self._pool, self._sharding, self._ranks = pool, sharding, sharding.ranks

    def label(self, key: bool = False, kind: str = "cpu") -> str:
        """Say how many; in a key also which shards and links: others are another case."""
        ranks = count(self._ranks, "rank")
        return f" | {ranks}, {self._shard}, {topology_of(kind, self._ranks)}" if key else f", on {ranks}"

    def untimed_because(self, device: torch.device, session: AttentionSession) -> str | None:
        """Say that ranks share a GPU, where they do: each waits for the kernels of the others."""
        there = session.machines.machine(str(device)).device_count
        is_shared = device.type == "cuda" and there < self._ranks
        return f"{self._ranks} ranks share {count(there, 'GPU')}" if is_shared else None

    def devices(self, device: torch.device) -> list[torch.device]:
        return [torch.device("cuda", number) for number in range(self._ranks)] if device.type == "cuda" else [device]

    def threads(self) -> int:
        return threads_of_rank()

    def contexts(self, measurement: Measurement) -> Iterator[AbstractContextManager[object]]:
        return iter(())

    def take(self, measurement: Measurement, mode: Mode | None) -> Latency:
        """Have all ranks make their tensors, and time them at once. Raises RanksLostError, too."""
        pool, device, direction = self._pool, measurement.spec.device, measurement.direction
        cold, threads = measurement.session.settings.l2 == "cold", measurement.threads
        seed = random.SystemRandom().getrandbits(64)
        pool.step("begin", direction=direction, cold=cold, threads=threads or 1, seed=seed)
        stopwatch = RankedStopwatch(pool, device, cold, threads or 1, ramp=not pool.is_warm)
        pool.is_warm = True
        latency = stopwatch.measure(RankedWork(direction, pool), measurement.spec.workload.id, measurement.subject.name, mode)
        profiled = pool.step("communication") if device.type == "cuda" else []
        return replace(latency, ranks=self._figures(stopwatch, profiled, device.type), threads=threads)

    def _figures(self, stopwatch: RankedStopwatch, profiled: Sequence[dict[str, float] | None], kind: str) -> dict[str, Any]:
        where = {"number": self._ranks, "shard": self._shard, "topology": topology_of(kind, self._ranks)}
        return {**where, **figures_of(stopwatch.shares(), profiled)}

    @property
    def _shard(self) -> str:
        shard = self._sharding.shard
        return shard if isinstance(shard, str) else function_label(shard)
