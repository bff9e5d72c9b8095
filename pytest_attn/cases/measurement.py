"""One `attn.measure`: what is timed, what the time is filed under, and taking it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch

from pytest_attn.backends.machine import current
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.replaced_functions import require_clocks
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.correctness.switches import KeptSwitches
from pytest_attn.latency.baseline_file import Baseline, case_key, conditions_of, gpu_of
from pytest_attn.latency.gate import Policy, policy_for
from pytest_attn.latency.kernel_work import KernelWork, work_of
from pytest_attn.latency.nvml import ClockError, locked_clocks
from pytest_attn.latency.protocol import Stopwatch, stopwatch_of, threads
from pytest_attn.latency.regression import Measured
from pytest_attn.latency.result import Latency
from pytest_attn.latency.timer import Mode
from pytest_attn.latency.work import LatencyDirection
from pytest_attn.processes.worker import own_processes
from pytest_attn.session.kinds import id_from_root, name_for_processes, without_repetition
from pytest_attn.session.session import AttentionSession

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: what a measurement may take between two calls: it waits for the core, has the device rest, and repeats what was disturbed
WAITING_SECONDS = 60.0
#: which results of a check say how accurate a direction is
_RESULTS_OF = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Measurement:
    """A subject that is timed, in which direction, and whose test it is.

    comparison: of the check before, None where a new process did not check. number: of the measurements of this name and
    direction in its test; nth: of all of them. Where a subject is timed elsewhere than in this process, a class of its own
    says how.
    """

    session: AttentionSession
    item: pytest.Item
    spec: CheckSpec
    subject: Subject
    direction: LatencyDirection
    comparison: Comparison | None
    number: int = 1
    nth: int = 1

    #: whether it is a kernel's, of which a profile has a time as well
    is_of_one_kernel = True

    # -- names ---------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the measurement, for messages."""
        return f"{self.subject.name} on {self.spec.workload.id}, {self.direction}"

    @property
    def test(self) -> str:
        """The id of its test, by which its baseline is found; repetitions share it."""
        return without_repetition(id_from_root(self.item), self.item)

    @property
    def key(self) -> str:
        """The key of its baseline: a backend is the same in every test, a callable belongs to its own."""
        name = self.subject.baseline_name(self.test)
        if not self.subject.is_backend and self.number > 1:
            name += f" #{self.number}"
        l2 = self.session.settings.l2 if self.spec.device.type == "cuda" else "warm"
        layout = self.spec.for_subject(self.subject).layout
        return case_key(self.spec.workload.id, name, self.direction, l2, layout, self.threads)

    @property
    def devices(self) -> list[torch.device]:
        """Devices that are timed on, and must be free meanwhile."""
        return [self.spec.device]

    @property
    def threads(self) -> int | None:
        """Number of threads of a CPU that are used; None elsewhere."""
        if self.spec.device.type != "cpu":
            return None
        return self.session.settings.threads or self._own_threads()

    @property
    def kind(self) -> tuple[str, ...]:
        """Kind of measurement, by which those of a test are numbered."""
        return self.subject.baseline_name(""), self.direction

    @property
    def test_name(self) -> str:
        """Name of its test on the command line of a new process."""
        return name_for_processes(self.item)

    @property
    def untimed_because(self) -> str | None:
        """Reason of its own for which it cannot be timed, None where it can."""
        return None

    # -- how it is judged ----------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The limit of what counts as slower: the device's policy, with --attn-max-slowdown."""
        policy = policy_for(self.spec.device.type)
        wanted = self.session.settings.max_slowdown
        return replace(policy, slowdown=wanted) if wanted else policy

    @property
    def cases(self) -> int:
        """Number of cases that this run decides over, at most; the n-th measurement of a test counts as n (n + 1) of them.

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
        """The problem that is timed, in full: another one under the same key is another case."""
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
            for context in self._contexts():
                stack.enter_context(context)
            self._lock_clocks(stack)
            return self._take(mode)

    def _own_threads(self) -> int:
        """Return how many threads of a CPU are used where nobody says it."""
        return torch.get_num_threads()

    def _contexts(self) -> Iterator[AbstractContextManager[object]]:
        """Yield what a measurement is made within."""
        device = self.spec.device
        yield current(device)
        yield self.subject.calling()
        if device.type == "cpu":
            yield threads(self.session.settings.threads)
        yield KeptSwitches(device.type)

    def _take(self, mode: Mode | None) -> Latency:
        """Time what is measured, once the device is as it is to be."""
        work = self._work()
        case, deadline = f"timing {self.name}, {self.item.nodeid}", self.session.deadline
        with deadline.around(case), work.context():
            work.stage()()
        stopwatch = self.stopwatch
        with deadline.around(case, beyond=WAITING_SECONDS) as work.on_call:
            return stopwatch.measure(work, self.spec.workload.id, self.subject.name, mode)

    def _work(self) -> KernelWork:
        machine = self.session.machines.machine(str(self.spec.device))
        return work_of(self.subject, self.spec, self.direction, machine)

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
