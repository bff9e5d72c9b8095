"""What becomes of a time, chosen once per run: it is compared, or recorded, or reported to the process that waits for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pytest

from pytest_attn.latency.gate import Decision
from pytest_attn.latency.judge import Crowd, DisturbedError, FreshError, judge_latency
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Run
from pytest_attn.session.devices import device_lock, lock_name, untimed_because
from pytest_attn.session.session import AttentionSession, session_of
from pytest_attn.session.worker_context import WorkerContext
from pytest_attn.session.worker_pool import Runs, are_forked, fresh_runs, is_lacking, prepare_fresh_runs, undisturbed
from pytest_attn.timing.baselines import RunBaselines
from pytest_attn.timing.measurement import Measurement
from pytest_attn.timing.recording import Recording
from pytest_attn.verdict import Verdict

if TYPE_CHECKING:
    import torch

    from pytest_attn.latency.timer import Mode

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


class LatencyMode(ABC):
    """Takes the times of a run. A mode is a class of these and a line of `LATENCY_MODES`."""

    #: whether a kernel is checked before it is timed
    checks_first = True
    #: whether times are shown and recorded here; a new process only hands them over
    reports = True

    def __init__(self, session: AttentionSession, baselines: RunBaselines) -> None:
        self.session, self.baselines = session, baselines

    @classmethod
    @abstractmethod
    def of_run(cls, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> LatencyMode | None:
        """Return the mode of a run; None where that is another one."""

    def untimed_because(self, device: torch.device) -> str:
        """Say why nothing is timed here; "" where it is."""
        if reason := self.session.kernels.untimed_because:
            return reason
        if self.session.settings.latency == "off":
            return "--attn-latency=off"
        return untimed_because(self.session.settings.gpu_per_worker, device)

    @abstractmethod
    def prepare(self, device: torch.device) -> None:
        """Get ready for a time on a device that is taken soon."""

    @abstractmethod
    def measure(self, measurement: Measurement) -> Latency:
        """Time a measurement and decide what it means. Raises as `Measurement.time` does."""

    def _recorded_mode(self, measurement: Measurement) -> Mode | None:
        baseline = self.baselines.of(measurement)
        return baseline.mode if baseline else None  # type: ignore[return-value]


class CompareToBaseline(LatencyMode):
    """Holds each time against its baseline; new processes confirm what looks slower."""

    def __init__(self, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> None:
        super().__init__(session, baselines)
        self._config, self._crowd = config, Crowd()

    @classmethod
    def of_run(cls, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> LatencyMode | None:
        """Where no other mode is asked for."""
        return cls(session, baselines, config)

    def prepare(self, device: torch.device) -> None:
        """Have the server of new processes start where something is recorded: a suspect need not wait for it."""
        if self.baselines.on(device).fits and are_forked(self.session.settings.fresh, [device.type]):
            prepare_fresh_runs(self._config)

    def measure(self, measurement: Measurement) -> Latency:
        """Time and compare."""
        device = measurement.spec.device
        with _locked(measurement):
            latency = measurement.time(self._recorded_mode(measurement))
        decision = judge_latency(
            measurement.measured(latency),
            self.baselines.on(device),
            measurement.policy,
            measurement.cases,
            lambda: self._fresh_runs(measurement),
            self._crowd,
        )
        return replace(latency, decision=decision)

    def _fresh_runs(self, measurement: Measurement) -> Sequence[Run]:
        """Time the same test in new processes, in a few more where some were disturbed.

        Raises FreshError where too few timed it, or too few undisturbed.
        """
        name, key, wanted = measurement.test_name, measurement.key, measurement.policy.runs
        counting = self.session.progress.counting(f"timing {measurement.name} again, new process", wanted)

        def lacking(runs: Runs) -> list[str]:
            return [name] if is_lacking(runs, key, wanted) else []

        device = measurement.spec.device
        with _locked(measurement), counting as progress:
            is_forked = are_forked(self.session.settings.fresh, [device.type])
            found = fresh_runs(self._config, [name], wanted, progress, lacking=lacking, is_forked=is_forked)
        timed = [run for run in found if run["key"] == key]
        processes, timing = (len({run["process"] for run in runs}) for runs in (found, timed))
        if timing < processes:
            raise FreshError(f"{timing} of {processes} new processes timed it")
        mine = undisturbed(timed, key, wanted)
        if len(mine) < wanted:
            raise DisturbedError(next(run["disturbances"][0] for run in timed if run["disturbances"]))
        return [Run(run["p50"], run["anchors"], run["launch"]) for run in mine]


class RecordBaseline(LatencyMode):
    """--attn-update-baselines: each case is timed once here, and at the end of the run in ten new processes."""

    def __init__(self, session: AttentionSession, baselines: RunBaselines, recording: Recording) -> None:
        super().__init__(session, baselines)
        self._recording = recording

    @classmethod
    def of_run(cls, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> LatencyMode | None:
        """Where baselines are to be recorded."""
        if session.settings.update_baselines is None:
            return None
        recording = Recording(session, baselines, config)
        config.pluginmanager.register(recording, "attn-recording")
        return cls(session, baselines, recording)

    def prepare(self, device: torch.device) -> None:
        """Have the server of new processes start."""
        self._recording.prepare(device)

    def measure(self, measurement: Measurement) -> Latency:
        """Time, and keep what is to be recorded."""
        with _locked(measurement):
            latency = measurement.time(self._mode(measurement))
        today = datetime.now(tz=timezone.utc).date().isoformat()
        baseline = measurement.to_baseline(latency, self.session.settings.update_baselines or "", today)
        self._recording.add(measurement.key, measurement.test_name, measurement.item, baseline, measurement.spec.device)
        return replace(latency, decision=Decision(Verdict.RECORDED))

    def _mode(self, measurement: Measurement) -> Mode | None:
        """Return the mode of the last recording, but that batches and replays may become a graph on the device."""
        mode = self._recorded_mode(measurement)
        return None if mode in ("batched", "replay") else mode


class ReportToParent(LatencyMode):
    """A new process: it only times what the process that waits for it has checked, and holds the lock of the device for."""

    checks_first = False
    reports = False

    def __init__(self, session: AttentionSession, baselines: RunBaselines, worker: WorkerContext) -> None:
        super().__init__(session, baselines)
        self._worker = worker

    @classmethod
    def of_run(cls, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> LatencyMode | None:
        """In a process that another one waits for."""
        return None if session.worker is None else cls(session, baselines, session.worker)

    def prepare(self, device: torch.device) -> None:
        """Do nothing: it is fresh itself."""

    def measure(self, measurement: Measurement) -> Latency:
        """Time, and hand over."""
        latency = measurement.time(self._worker.mode_of(measurement.key) or self._recorded_mode(measurement))  # type: ignore[arg-type]
        launch = measurement.measured(latency).launch
        run = {"key": measurement.key, "p50": latency.p50, "launch": launch, "anchors": dict(latency.anchors)}
        self._worker.return_result({**run, "mode": latency.mode, "disturbances": list(latency.disturbances)})
        return replace(latency, decision=Decision(Verdict.MEASURED))


@contextmanager
def _locked(measurement: Measurement) -> Iterator[None]:
    """Let no other process time on what a measurement needs; devices in one order for all."""
    with ExitStack() as stack:
        for device in sorted(measurement.devices, key=lock_name):
            stack.enter_context(device_lock(device))
        yield


#: the first that a run asks for is its mode
LATENCY_MODES: list[type[LatencyMode]] = [ReportToParent, RecordBaseline, CompareToBaseline]
_MODE = pytest.StashKey[LatencyMode]()


def latency_mode_of(config: pytest.Config) -> LatencyMode:
    """Return the mode of a run, made when it first times anything."""
    if _MODE not in config.stash:
        session = session_of(config)
        baselines = RunBaselines(session)
        made = (mode.of_run(session, baselines, config) for mode in LATENCY_MODES)
        config.stash[_MODE] = next(mode for mode in made if mode is not None)
    return config.stash[_MODE]
