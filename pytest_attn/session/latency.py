"""`attn.measure`: time what was checked, hold it against the baseline, have fresh processes confirm what looks slower."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current
from pytest_attn.correctness.question import Question, in_layout, subject_name
from pytest_attn.latency.anchors import anchor_hashes
from pytest_attn.latency.baseline import Baseline, BaselineError, BaselineFile, case_key, find, recorded_otherwise
from pytest_attn.latency.fit import Fit, Run
from pytest_attn.latency.gate import Decision, Policy, Terms, decide, policy_for, screen, shared_prior
from pytest_attn.latency.guard import ClockError, locked_clocks
from pytest_attn.latency.identity import conditions_of, gpu_of, identify
from pytest_attn.latency.protocol import Latency, Stopwatch, protocol_of, stopwatch_of, threads
from pytest_attn.latency.statistics import Prior
from pytest_attn.latency.verdict import with_other_gates
from pytest_attn.latency.work import LatencyDirection, work_of
from pytest_attn.reports.latency import NONE_RECORDED
from pytest_attn.session.fresh import (
    RUNS_VARIABLE,
    DisturbedError,
    FreshError,
    Runs,
    StartError,
    fresh_runs,
    is_lacking,
    mode_to_record,
    own_processes,
    undisturbed,
)
from pytest_attn.session.parametrize import id_under
from pytest_attn.session.sharing import device_lock, untimed_because
from pytest_attn.workloads.masks import function_name

if TYPE_CHECKING:
    import torch

    from pytest_attn.correctness.compare import Comparison
    from pytest_attn.session.store import AttentionSession

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: which results of a check say how accurate a direction is
_RESULTS_OF = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


@dataclass
class Recorded:
    """The baselines of one device, read once per run. `problem`: why they cannot be used."""

    file: BaselineFile | None = None
    fits: dict[str, Fit] | None = None
    prior: Prior | None = None
    problem: str = ""


@dataclass(frozen=True)
class Pending:
    """A case that is right and was timed, to be recorded in fresh processes. `name`: what a command line calls its test."""

    key: str
    name: str
    nodeid: str
    baseline: Baseline
    device: torch.device


@dataclass(frozen=True)
class Measurement:
    """One `attn.measure`: what is timed, how, and whose test it is.

    number: of the measurements of this name and direction in its test; nth: of all of them.
    """

    session: AttentionSession
    item: pytest.Item
    question: Question
    subject: Callable[..., Any] | Backend
    direction: LatencyDirection
    comparison: Comparison | None
    number: int
    nth: int = 1

    def untimed_because(self) -> str:
        """Say why nothing is timed here; "" where it is."""
        if self.session.settings.mutants:
            return "--attn-mutants"
        if self.session.settings.latency == "off":
            return "--attn-latency=off"
        return untimed_because(self.session.settings.gpu_per_worker, self.question.device)

    def take(self) -> Latency:
        """Time the subject and decide. In a fresh process, hand the time to the process that waits for it.

        Raises StaleError for a subject whose results are not those of its data, DeadlineError for one that takes too long,
        pytest.UsageError for clocks that cannot be locked. Exceptions of the subject pass through.
        """
        latency = self._time(self._mode)
        if RUNS_VARIABLE in os.environ:
            _append_run(Path(os.environ[RUNS_VARIABLE]), self.key, latency)
            return replace(latency, decision=Decision("measured"))
        if self.session.settings.update_baselines is not None:
            name, device = command_name(self.item), self.question.device
            pending = Pending(self.key, name, self.item.nodeid, self._to_record(latency), device)
            self.session.pending.append(pending)
            return replace(latency, decision=Decision("recorded"))
        return replace(latency, decision=self._decide(latency))

    # -- against the baseline ------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The device's, with --attn-max-slowdown."""
        policy = policy_for(self.question.device.type)
        wanted = self.session.settings.max_slowdown
        return replace(policy, slowdown=wanted) if wanted else policy

    @property
    def name(self) -> str:
        """Say what is timed."""
        return f"{subject_name(self.subject)} on {self.question.workload.id}, {self.direction}"

    @property
    def cases(self) -> int:
        """How many cases this run decides over, at most; the n-th measurement of a test counts n (n + 1) fold.

        The reciprocals of n (n + 1) add up to 1: however often tests measure, the suite's rate of false alarms holds.
        """
        return max(1, self.session.selected) * self.nth * (self.nth + 1)

    @property
    def key(self) -> str:
        """Name the case: a backend is the same in every test, a callable belongs to its own."""
        import torch

        settings, on_cpu = self.session.settings, self.question.device.type == "cpu"
        if isinstance(self.subject, Backend):
            name, layout = self.subject.name, "bhsd"
        else:  # not by its label, which changes with the line that it stands on
            test = id_under(self.item.nodeid.partition("::")[0], self.item)
            nth = f" #{self.number}" if self.number > 1 else ""
            name, layout = f"{function_name(self.subject)} of {test}{nth}", self.question.layout
        l2 = settings.l2 if self.question.device.type == "cuda" else "warm"
        number = (settings.threads or torch.get_num_threads()) if on_cpu else None
        return case_key(self.question.workload.id, name, self.direction, l2, layout, number)

    @property
    def recorded(self) -> Baseline | None:
        """The case's baseline, of whatever protocol and shape."""
        file = recorded_on(self.session, self.question.device).file
        return file.cases.get(self.key) if file else None

    def _decide(self, latency: Latency) -> Decision:
        store, baseline = recorded_on(self.session, self.question.device), self.recorded
        missing = store.problem or self._unusable_because(baseline)
        if missing or baseline is None or store.fits is None or store.prior is None:
            return Decision("no baseline", missing)
        agreed, is_same = self._software_agrees(baseline), self._is_device_of(baseline)
        terms = Terms(store.fits[self.key], store.prior, self.policy, self.cases, agreed, is_same)
        if latency.disturbances:
            decision = Decision("inconclusive", "; ".join(latency.disturbances))
            needs_others = self.question.device.type == "cpu" and not self.session.is_crowded
        else:
            self.session.is_crowded &= self.question.device.type != "cpu"
            run = Run(latency.p50, latency.anchors, _launching(latency))
            decision, needs_others = screen(run, terms)
        if needs_others:
            try:
                decision = decide(self._fresh_runs(), terms)
            except FreshError as error:
                decision = self._unconfirmed(decision, error)
        return with_other_gates(decision, baseline, latency, self._z_against(baseline), self.policy)

    def _unconfirmed(self, first: Decision, error: FreshError) -> Decision:
        """Return what becomes of a first look that fresh processes could not confirm; a disturbed one stays what it is."""
        if isinstance(error, DisturbedError):
            self.session.is_crowded |= self.question.device.type == "cpu"
        if first.change is None:
            return first if isinstance(error, DisturbedError) else replace(first, reason=f"{first.reason}; {error}")
        if isinstance(error, StartError):
            verdict = "unconfirmed" if first.change >= self.policy.slowdown else "inconclusive"
            return replace(first, verdict=verdict, reason=str(error))
        return replace(first, verdict="inconclusive", reason=f"not confirmed: {error}")

    def _unusable_because(self, baseline: Baseline | None) -> str:
        if baseline is None:
            folder = self.session.baselines_folder
            is_file = folder.is_file()
            file = recorded_on(self.session, self.question.device).file
            if file and (otherwise := recorded_otherwise(self.key, file.cases)):
                return otherwise
            return f"{folder}: is a file; --attn-baselines must be a folder" if is_file else f"{NONE_RECORDED} in {folder}"
        protocol = protocol_of(self.question.device.type)
        if baseline.protocol != protocol:
            return f"recorded with protocol {baseline.protocol}, this is {protocol}"
        shape = self.question.workload.shape_id
        return f"recorded for {baseline.shape}, this is {shape}" if baseline.shape != shape else ""

    def _software_agrees(self, baseline: Baseline) -> bool:
        version = self.subject.version() if isinstance(self.subject, Backend) else ""
        return baseline.conditions == self._conditions() and baseline.version == version

    def _is_device_of(self, baseline: Baseline) -> bool:
        gpu = gpu_of(self.question.device)
        return self.question.device.type != "cuda" or gpu == baseline.gpu != ""

    def _fresh_runs(self) -> list[Run]:
        """Time the same test in fresh processes, in a few more where some were disturbed.

        Raises FreshError where too few timed it, or too few undisturbed.
        """
        name, key, wanted = command_name(self.item), self.key, self.policy.runs
        counting = self.session.progress.counting(f"timing {self.name} again, fresh process", wanted)

        def lacking(runs: Runs) -> list[str]:
            return [name] if is_lacking(runs, key, wanted) else []

        with device_lock(self.question.device), counting as progress:
            found = fresh_runs(self.item.config, [name], wanted, progress, lacking=lacking)
        timed = [run for run in found if run["key"] == key]
        processes, timing = (len({run["process"] for run in runs}) for runs in (found, timed))
        if timing < processes:
            raise FreshError(f"{timing} of {processes} fresh processes timed it")
        mine = undisturbed(timed, key, wanted)
        if len(mine) < wanted:
            raise DisturbedError(next(run["disturbances"][0] for run in timed if run["disturbances"]))
        return [Run(run["p50"], run["anchors"], run["host"]) for run in mine]

    @property
    def _mode(self) -> str | None:
        """What the baseline was recorded with; recorded anew, batches and replays may become a graph on the device."""
        if given := mode_to_record(self.key):
            return given
        mode = recorded.mode if (recorded := self.recorded) else None
        return None if mode in ("batched", "replay") and self.session.settings.update_baselines is not None else mode

    # -- the time ------------------------------------------------------------------------------------------------------

    def _time(self, mode: str | None) -> Latency:
        import torch

        settings, question = self.session.settings, self.question
        with ExitStack() as stack:
            stack.enter_context(current(question.device))
            stack.enter_context(device_lock(question.device))
            if isinstance(self.subject, Backend):
                stack.enter_context(quiet())
            if question.device.type == "cpu":
                stack.enter_context(threads(settings.threads))
            if settings.lock_clocks and (question.device.type == "cuda" or not torch.cuda.is_available()):
                wanted = None if settings.lock_clocks == "max" else int(settings.lock_clocks)
                try:
                    stack.enter_context(locked_clocks(question.device, wanted))
                except ClockError as error:
                    raise pytest.UsageError(f"--attn-lock-clocks: {error}") from None
            work = work_of(self.subject, question.workload, question.device, self.direction, question.seed, self._in_layout)
            name = subject_name(self.subject)
            with self.session.deadline.around(f"timing {self.name}, {self.item.nodeid}"), work.context():
                work.stage()()
            return self._stopwatch.measure(work, question.workload.id, name, mode)  # type: ignore[arg-type]

    def _in_layout(self, tensor: torch.Tensor, is_kv: bool = False) -> torch.Tensor:
        return in_layout(tensor, self.question, is_kv)

    @property
    def _stopwatch(self) -> Stopwatch:
        return stopwatch_of(self.question.device, self.session.settings.l2 == "cold", own_processes())

    # -- to record -----------------------------------------------------------------------------------------------------

    def _to_record(self, latency: Latency) -> Baseline:
        """Return the case's baseline but for its runs, which fresh processes take."""
        workload = self.question.workload
        parts: Any = ("forward", "backward") if latency.direction == "forward+backward" else (latency.direction,)
        return Baseline(
            shape=workload.shape_id,
            mode=latency.mode,
            p50=(),
            host=(),
            anchors={},
            flops=sum(workload.flops(part) for part in parts),
            nbytes=sum(workload.bytes(part) for part in parts),
            date=datetime.now(tz=timezone.utc).date().isoformat(),
            reason=self.session.settings.update_baselines or "",
            version=self.subject.version() if isinstance(self.subject, Backend) else "",
            memory=latency.memory,
            z=self._z(),
            check=self._check,
            conditions=self._conditions(),
            gpu=gpu_of(self.question.device),
            protocol=protocol_of(self.question.device.type),
        )

    def _conditions(self) -> dict[str, str]:
        return conditions_of(self.question.device, self._stopwatch.guard.conditions())

    def _z_against(self, baseline: Baseline) -> tuple[float, float, float] | None:
        """Return the residuals where they were recorded of the same check, None where there is nothing to compare."""
        return self._z() if baseline.check == self._check else None

    @property
    def _check(self) -> str:
        """Say what the check depended on."""
        question = self.question
        return f"{','.join(question.inputs)} seed {question.seed}"

    def _z(self) -> tuple[float, float, float] | None:
        """Return the largest residuals over an element, a row and a head of what this direction computes."""
        results = _RESULTS_OF.get(self.direction, ("out", "lse", "dq", "dk", "dv"))
        tensors = [t for t in self.comparison.tensors if t.name in results] if self.comparison else []
        if not tensors:
            return None
        return max(t.z_element for t in tensors), max(t.z_row for t in tensors), max(t.z_head for t in tensors)


def recorded_on(session: AttentionSession, device: torch.device) -> Recorded:
    """Return the baselines of a device, read when first asked for. A damaged file is a problem of every case."""
    stores: dict[str, Recorded] = session.latencies
    if str(device) not in stores:
        stores[str(device)] = _read(session, device)
    return stores[str(device)]


def _read(session: AttentionSession, device: torch.device) -> Recorded:
    try:
        identity = identify(device, session.machine(str(device)))
        file = find(session.baselines_folder, identity, anchor_hashes(device.type), protocol_of(device.type))
    except BaselineError as error:
        return Recorded(problem=str(error))
    try:
        protocol = protocol_of(device.type)
        fits = {key: case.fit() for key, case in file.cases.items() if case.protocol == protocol}
    except (ValueError, TypeError) as error:
        return Recorded(problem=f"{file.path}: is damaged ({error}); restore it from version control")
    return Recorded(file, fits, shared_prior(list(fits.values()), device.type))


def _append_run(path: Path, key: str, latency: Latency) -> None:
    """Hand a time to the process that waits for it: one line, written at once."""
    run = {"key": key, "p50": latency.p50, "host": _launching(latency), "anchors": dict(latency.anchors), "mode": latency.mode}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**run, "disturbances": list(latency.disturbances)}) + "\n")


def _launching(latency: Latency) -> float:
    """Return the seconds of launching a call, 0 where the host's clock is what was timed."""
    return 0.0 if latency.mode == "host" else latency.host


def command_name(item: pytest.Item) -> str:
    """Return what names a test on the command line of a fresh process, from whatever folder that runs in."""
    module = item.getparent(pytest.Module)
    is_elsewhere = item.config.invocation_params.dir not in item.path.parents
    is_installed = bool(item.config.getoption("pyargs")) and is_elsewhere and module is not None
    return id_under(module.obj.__name__ if is_installed and module else str(item.path), item)
