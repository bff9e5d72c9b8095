"""A function in a process of its own, as a case runs it there and times it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch

from pytest_attn.backends.named import NamedFunction
from pytest_attn.backends.subject import Subject
from pytest_attn.cases.executor import Executor
from pytest_attn.cases.measurement import Measurement
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.isolation.isolated_function import SECONDS, IsolatedFunction, Recorded
from pytest_attn.guests.isolation.timed_row import RowData, digest, seconds_beside
from pytest_attn.latency.gate import Decision
from pytest_attn.latency.kernel_work import Call, KernelWork
from pytest_attn.latency.profiler import Profile
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Interval
from pytest_attn.latency.timer import CHANCE, GRAPHS, Mode
from pytest_attn.latency.work import LatencyDirection, StaleError, WrongResultError
from pytest_attn.processes.fork_server import Command
from pytest_attn.processes.fork_server import modules_ahead as all_modules_ahead
from pytest_attn.processes.launcher import Launcher
from pytest_attn.processes.worker import own_processes
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.progress import Progress
from pytest_attn.session.worker_pool import worker_environment

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


class InOwnProcess(Executor):
    """Runs a function in its own process, from where its case says."""

    is_expendable = True  # a process that is lost is replaced
    has_deadline = True

    def __init__(self, function: IsolatedFunction, executor: Executor) -> None:
        super().__init__(executor.workload)
        self._function, self._executor = function, executor
        self.elsewhere = executor.elsewhere

    def place(self, subject: Subject, progress: Progress) -> Subject:
        """Return the subject, whose module has been imported in its process. Raises as `IsolatedFunction.start`."""
        with progress.during(f"importing {subject.name} in its process", self.workload.id):
            self._function.start()
        return self._executor.place(subject, progress)

    def leave(self, result: object) -> None:
        self._executor.leave(result)

    def profiles(self, subject: Subject, spec: CheckSpec, with_ceilings: bool) -> list[Profile]:
        raise ValueError("launches are seen in this process only; leave out --attn-isolated, or attn.assert_launched")

    def measurement(self, **facts: Any) -> Measurement:
        return IsolatedMeasurement(**facts, function=self._function)


# -- its time --------------------------------------------------------------------------------------------------------------

#: calls in a row, at least and at most, the seconds that they are to take, and the bytes of what they return
_FEWEST, _MOST, _SECONDS, _BYTES = 2, 512, 0.05, 1 << 30
#: forward passes of which a backward pass alone gets one: their graphs keep memory
_SETS = 32
#: at the results of how many of them is looked, which nobody knows before
_LOOKS = 16
#: by how much such calls may be slower than was claimed, in all and each; and how often that is tried
_SLACK_SECONDS, _SLACK_OF_CALL, _SLOWER, _TRIES = 2e-3, 4e-6, 1.5, 8
#: by how much other work may slow a call that does not wait for it; and how many times as long as it takes a call may have
#: waited for a core where nobody knows whether it did
_REFUSED, _SLOWER_UNSEEN = 3.0, 3.0


@dataclass(frozen=True, kw_only=True)
class IsolatedMeasurement(Measurement):
    """A function that times itself in its process; what it claims is compared with calls in a row by this one's clock."""

    function: IsolatedFunction

    def _take(self, mode: Mode | None) -> Latency:
        is_cold = self.session.settings.l2 == "cold"
        return time_isolated(self.function, self.subject, self.spec, self._work(), mode, is_cold)


def time_isolated(
    function: IsolatedFunction, subject: Subject, spec: CheckSpec, work: KernelWork, mode: Mode | None, is_cold: bool
) -> Latency:
    """Time a function in its process. Raises StaleError where calls in a row are slower than was claimed, or wrong.

    subject, spec: the function as it is judged. work: of it. mode: as of `Stopwatch.measure`.
    """
    spec, direction = spec.for_subject(subject), work.direction
    work.rotate_over(0)
    with function.recording() as recorded, work.context():
        call = work.stage(replayed=True)
        value = call()
    work.verify_call("called on new data", call, value)
    told = _told(spec)
    claimed = function.measured(
        spec=told,
        is_told=told.workload == spec.workload and not subject.is_approximate,
        direction=direction,
        mode=mode,
        cold=is_cold,
        threads=torch.get_num_threads(),
        own=sorted(own_processes()),
    )
    try:
        latency = latency_of(claimed, spec.workload.id, subject.name, direction, spec.device.type)
    except (KeyError, TypeError, ValueError, OverflowError):
        function.start().give_up("its process returned garbage in place of a time")
    return _held_to(latency, _Row(function, work, call, recorded[0], latency.mode in GRAPHS))


def _held_to(latency: Latency, row: _Row) -> Latency:
    """Raise StaleError where calls in a row take longer than was claimed; where that cannot be told, say so."""
    each = latency.p50
    fits = max(_FEWEST, _BYTES // max(1, sum(one.nbytes for one in row.recorded.given)))
    number = int(min(max(_FEWEST, _SECONDS / each), _SETS if row.direction == "backward" else _MOST, fits))
    most = number * (each * _SLOWER + _SLACK_OF_CALL) + _SLACK_SECONDS
    launched = each if latency.mode == "host" else each + latency.launch  # which may be work, or none
    least_refused = number * (launched * _REFUSED + _SLACK_OF_CALL) + _SLACK_SECONDS
    rows = []
    for _ in range(_TRIES):
        rows.append(row.time(number))
        if rows[-1].seconds <= most:
            return latency
    beside = row.seconds_beside(number)
    seconds, unwaited = (min(found) - beside for found in zip(*rows, strict=True))
    if seconds <= most:
        return latency
    claim = f"its process says that a call takes {each * 1e6:.4g} us"
    if unwaited > least_refused:
        least = f"{number} calls in a row took at least {unwaited / number * 1e6:.4g} us each"
        raise StaleError(f"{claim}, but {least}, by the clock of the process that judges")
    in_a_row = f"{number} calls in a row took {seconds / number * 1e6:.4g} us each, by the clock of the process that judges"
    doubt = f"{claim}, which could not be verified: {in_a_row}"
    decision = Decision(Verdict.INCONCLUSIVE, doubt)
    return replace(latency, disturbances=(*latency.disturbances, doubt), decision=decision)


class _RowTime(NamedTuple):
    """Seconds of calls in a row, and what is left of them without those for which their thread had waited for a core."""

    seconds: float
    unwaited: float


class _Row:
    """Calls in a row of an isolated function. call: one that was made, and was recorded. is_replayed: from a graph."""

    def __init__(
        self, function: IsolatedFunction, work: KernelWork, call: Call, recorded: Recorded, is_replayed: bool
    ) -> None:
        self.recorded, self.direction, self._is_replayed = recorded, work.direction, is_replayed
        self._function, self._work, self._call = function, work, call
        self._results: list[torch.Tensor] = []

    def time(self, calls: int) -> _RowTime:
        """Have so many calls made. Raises WrongResultError.

        The time ends when digests of all results are here: then none is still to be computed, nor becomes another one later.
        """
        recorded, seed = self.recorded, CHANCE.getrandbits(63)
        try:
            seconds, waited, found = self._function.in_a_row(recorded, self.direction, calls, seed, self._is_replayed)
        except ContractError as error:
            raise WrongResultError(f"called in a row: {error}") from None
        digests = found.view(calls, -1) if len(found) % calls == 0 else found.new_empty(calls, 0)
        data = RowData(recorded.given, recorded.douts, self.direction, seed)
        for number in CHANCE.sample(range(calls), min(calls, _LOOKS)):
            fetched, self._results = recorded.call.fetched(number)
            if not torch.equal(digest(self._results).cpu(), digests[number]):
                raise WrongResultError("called in a row: a result has changed since the calls have ended")
            recorded.keep(fetched, self.direction)
            with self._function.replaying(recorded), self._work.context():
                value = self._call()
            given, douts = data.after(digests[number - 1].to(self._work.device) if number else None)
            dout = next((one for one in douts if one is not None), self._work.dout)
            self._work.verify_on("called in a row", given, dout, value)
        return _RowTime(seconds, seconds / _SLOWER_UNSEEN if waited is None else seconds - waited)

    def seconds_beside(self, calls: int) -> float:
        """Return the seconds that are not those of the calls, once the process has ended, which could make them more."""
        self._function.close()
        of_row = self.recorded.given, self.recorded.douts, self.direction, self._results, calls
        return seconds_beside(*of_row, is_replayed=self._is_replayed)


def _told(spec: CheckSpec) -> CheckSpec:
    """Return what a process learns of a case: neither the draws of its run, nor functions that only the test can import."""
    w = spec.workload
    mask = None if w.mask is None or w.mask.function is not None else w.mask
    workload = w if mask is w.mask and w.score_mod is None else w.replace(mask=mask, score_mod=None)
    return replace(spec, workload=workload, seed=CHANCE.getrandbits(31), parameters={})


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
    numbers: dict[str, Any] = {name: int(number(claimed[name])) for name in ("blocks", "calls")}
    numbers |= {name: number(claimed[name]) for name in ("launch", "spent")}
    numbers |= {name: None if claimed[name] is None else int(claimed[name]) for name in ("memory", "threads")}
    return Latency(
        workload=workload,
        subject=subject,
        direction=direction,
        p50=p50,
        interval=Interval(low, high, confidence),
        samples=tuple(map(number, claimed["samples"][:100_000])),
        mode=claimed["mode"],
        l2="cold" if claimed["l2"] == "cold" else "warm",
        anchors={str(name)[:40]: number(value) for name, value in list(claimed["anchors"].items())[:20]},
        disturbances=texts(claimed["disturbances"]),
        notes=texts(claimed["notes"]),
        conditions={name: value for name, value in claimed["conditions"].items() if type(value) in (int, float, str)},
        **numbers,
    )


# -- those of a run ------------------------------------------------------------------------------------------------------


def isolate(config: pytest.Config, timeout: float) -> Callable[[str], NamedFunction]:
    """Return what makes functions by their names whose processes end with the run. timeout: of a call, 0 for the usual one."""
    launcher = Launcher(modules_ahead, keeps_server=True)
    config.add_cleanup(launcher.close)

    def named(name: str) -> NamedFunction:
        made = IsolatedFunction(name, timeout or SECONDS, launcher, InOwnProcess)
        config.add_cleanup(made.close)
        return made

    return named


@cache
def launcher_of_process() -> Launcher:
    """Return what starts the processes of functions where there is no run; its server begins at once."""
    made = Launcher(modules_ahead, keeps_server=True)
    atexit.register(made.close)
    made.start_ahead(Command([], worker_environment(), Path.cwd(), Path(os.devnull), {}))
    return made


os.register_at_fork(after_in_child=launcher_of_process.cache_clear)  # the server answers one process


def modules_ahead() -> list[str]:
    """Return what a server imports ahead: what each process needs, and neither pytest nor anything of the tests."""
    return [
        *(one for one in all_modules_ahead() if one.startswith(("torch", "triton"))),
        "pytest_attn.guests.isolation.call_server",
    ]
