"""`attn.measure`: time what was checked, and conclude what the time means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import pytest
import torch

from pytest_attn.backends.raised import EndsTestError, RemoteRaisedError, message_of
from pytest_attn.backends.subject import Subject
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.evaluator import Evaluator
from pytest_attn.cases.judgment import Judgment
from pytest_attn.cases.measurement import Measurement
from pytest_attn.cases.pytest_benchmark import record_samples
from pytest_attn.invariants.rerun import configurations
from pytest_attn.latency.baseline_file import Baseline, BaselineError, BaselineFile, identify, orphans
from pytest_attn.latency.gate import FEWEST_RUNS, Decision
from pytest_attn.latency.profiler import profile_subject
from pytest_attn.latency.regression import (
    ACCEPT,
    DeviceBaselines,
    DisturbedError,
    FreshError,
    SharedCpu,
    describe_change,
    describe_regression,
    describe_unconfirmed,
    describe_undecided,
    judge_latency,
)
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Run
from pytest_attn.latency.timer import Mode
from pytest_attn.latency.work import StaleError, WrongResultError
from pytest_attn.reports.files import uninterrupted
from pytest_attn.reports.lines import count, labeled, raised_words, some
from pytest_attn.reports.records import gathered, latency_of
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.seam import each
from pytest_attn.session.benchmark_traces import is_asked_for
from pytest_attn.session.deadline import DeadlineError
from pytest_attn.session.devices import PATIENCE, NoLockError, device_lock, lock_name, untimed_because
from pytest_attn.session.session import AttentionSession, WorkerContext, session_of
from pytest_attn.session.worker_pool import MORE_PROCESSES as MORE_FOR_ONE
from pytest_attn.session.worker_pool import Runs, are_forked, fresh_runs, is_lacking, prepare_fresh_runs, undisturbed

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


class RunBaselines:
    """Baselines of the devices of a run, in the folder of --attn-baselines."""

    def __init__(self, session: AttentionSession) -> None:
        self._session = session
        self._read: dict[str, DeviceBaselines] = {}

    def on(self, device: torch.device) -> DeviceBaselines:
        """Return the baselines of a device."""
        if str(device) not in self._read:
            identity = identify(device, self._session.machines.machine(str(device)))
            self._read[str(device)] = DeviceBaselines.read(self._session.baselines_folder, identity, device.type)
        return self._read[str(device)]

    def of(self, measurement: Measurement) -> Baseline | None:
        """Return a case's baseline, of whatever protocol and shape."""
        return self.on(measurement.spec.device).of(measurement.key)


# -- --attn-update-baselines: every case of the run in ten new processes, then all are written, or none ----------------


#: further processes for cases that were disturbed in some of the first: on a busy machine most are
MORE_PROCESSES = 20


@dataclass(frozen=True)
class TimedCase:
    """A case that is right and was timed. baseline: but for its runs."""

    measurement: Measurement
    baseline: Baseline

    @property
    def key(self) -> str:
        """The key of its baseline."""
        return self.measurement.key

    @property
    def item(self) -> pytest.Item:
        """Its test."""
        return self.measurement.item

    @property
    def device(self) -> torch.device:
        """Where it was timed."""
        return self.measurement.spec.device


#: why cases of a run are not timed at its end: what new processes did, another process that times for long, the user
UNTIMED = (EndsTestError, FreshError, NoLockError, pytest.fail.Exception, KeyboardInterrupt)


class TimedAtEnd(ABC):
    """A plugin of pytest that collects the cases of a run, and has new processes time them at its end."""

    def __init__(self, session: AttentionSession, config: pytest.Config) -> None:
        self._session, self._config = session, config
        self._cases: list[TimedCase] = []

    def add(self, measurement: Measurement, baseline: Baseline) -> None:
        """Keep a case that is to be timed."""
        self._cases.append(TimedCase(measurement, baseline))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Forget the cases of a test that fails in the end, whenever they were timed."""
        if report.failed:
            self._cases = [one for one in self._cases if one.item.nodeid != report.nodeid]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Time the cases of a run that nothing stopped; what fails there is a failure of the run."""
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not self.finish():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @abstractmethod
    def finish(self) -> bool:
        """Time the cases; return whether all went well."""

    def say(self, text: str, **markup: bool) -> None:
        """Write a line at once: a pipe would keep it for minutes."""
        if reporter := self._config.pluginmanager.get_plugin("terminalreporter"):
            reporter.write_line(text, **markup)
            reporter.flush()

    def fail(self, item: pytest.Item, text: str) -> None:
        """Report an error of a test, which itself has passed: in pytest's counts, its files and --lf."""
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "teardown")
        item.ihook.pytest_runtest_logreport(report=report)


class Recording(TimedAtEnd):
    """Records the cases of a run at its end."""

    def __init__(self, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> None:
        super().__init__(session, config)
        self._baselines = baselines

    def prepare(self, device: torch.device) -> None:
        """Have the server of new processes start, where it forks those of a case on this device."""
        if are_forked(self._session.settings.fresh, [device.type]):
            prepare_fresh_runs(self._config)

    def finish(self) -> bool:
        """Record the cases; return whether all were. Says what was written, or why nothing was.

        Cases that were not selected stay as they are.
        """
        if not self._cases:
            return True
        cases, runs, problem, say = once_each(self._cases), [], "", self.say
        recorded: set[str] = set()
        say("")
        try:
            files = {device: self._writable_file(device) for device in {one.device for one in cases}}
            runs = self._time(cases)
            for device, found in _by_device(cases, runs).items():
                with uninterrupted():  # what is written is said
                    files[device].write(found)
                    recorded |= found.keys()
                    say(f"baselines: {len(found)} of {len(cases)} cases recorded in {files[device].path}")
                if gone := orphans(files[device].cases, self._config.rootpath):
                    what = f"{count(len(gone), 'line')} of tests that are gone; delete or rename"
                    say(f"baselines: {files[device].path} has {what}: {some(gone, 3)}", yellow=True)
        except (BaselineError, *UNTIMED) as error:
            problem = str(error) or "interrupted"
            say(f"baselines: {'nothing more' if recorded else 'nothing'} recorded: {problem}", red=True)
        missed = {one.key: problem or _missing(one, runs) for one in cases if one.key not in recorded}
        self._name_the_missed(missed)
        if not problem:
            self._report_the_missed(missed)
        return not missed and not problem

    def _writable_file(self, device: torch.device) -> BaselineFile:
        """Return the file of a device, before anything is timed for it. Raises BaselineError where it cannot be written."""
        found = self._baselines.on(device)
        if found.problem or found.file is None:
            raise BaselineError(found.problem)
        found.file.require_writable()
        return found.file

    def _time(self, cases: Sequence[TimedCase]) -> Runs:
        """Time all cases in as many processes as a baseline needs, and those that were disturbed in a few more."""

        def lacking(runs: Runs) -> list[str]:
            found = [one.measurement.test_name for one in cases if is_lacking(runs, one.key, FEWEST_RUNS)]
            if found:
                self.say(f"baselines: {count(len(found), 'case')} disturbed, one more process")
            return found

        what = f"baselines: {count(len(cases), 'case')}, new process"
        modes = {one.key: one.baseline.mode for one in cases}
        with self._session.progress.counting(what, FEWEST_RUNS, MORE_PROCESSES) as count_done, ExitStack() as stack:

            def progress(done: int) -> None:
                count_done(done)
                if done < FEWEST_RUNS:
                    self.say(f"{what} {done + 1} of {FEWEST_RUNS}")

            devices = {one.device for one in cases}
            stack.enter_context(locked(self._session, devices))
            names = [one.measurement.test_name for one in cases]
            is_forked = are_forked(self._session.settings.fresh, {device.type for device in devices})
            return fresh_runs(self._config, names, FEWEST_RUNS, progress, modes, lacking, MORE_PROCESSES, is_forked)

    def _name_the_missed(self, reasons: Mapping[str, str]) -> None:
        """Change the verdict of cases that were to be recorded and were not, by their keys."""
        self._session.results.replace(
            lambda record: record["verdict"] == Verdict.RECORDED and latency_of(record).get("key") in reasons,
            lambda record: {"verdict": Verdict.UNRECORDED.value, "reason": reasons[latency_of(record)["key"]]},
        )

    def _report_the_missed(self, reasons: Mapping[str, str]) -> None:
        """Fail the test of each such case."""
        missed = (one for one in once_each(self._cases) if one.key in reasons)
        for item, keys in gathered((one.item, one.key) for one in missed).items():
            self.fail(item, "\n".join(f"not recorded: {key}: {reasons[key]}" for key in keys))


def once_each(cases: Sequence[TimedCase]) -> list[TimedCase]:
    """Return one of each case: a backend may be measured by several tests, whose largest residuals are kept."""
    found: dict[str, TimedCase] = {}
    for one in cases:
        first = found.setdefault(one.key, one)
        ours, theirs = first.baseline.z, one.baseline.z
        if ours and theirs and first.baseline.check == one.baseline.check:
            z = (max(ours[0], theirs[0]), max(ours[1], theirs[1]), max(ours[2], theirs[2]))
            found[one.key] = replace(first, baseline=replace(first.baseline, z=z))
    return list(found.values())


def _missing(one: TimedCase, runs: Runs) -> str:
    """Say what a recording lacks, and what disturbed most of its runs."""
    text = too_few(one, runs, FEWEST_RUNS)
    return f"{text}; record again when the machine does nothing else" if "mostly" in text else text


def too_few(one: TimedCase, runs: Runs, wanted: int) -> str:
    """Say how many processes timed a case, and what disturbed most of the others."""
    text = f"{len(undisturbed(runs, one.key, wanted))} new processes timed it undisturbed, {wanted} are needed"
    disturbances = Counter(words for run in runs if run["key"] == one.key for words in run["disturbances"])
    return f"{text}; mostly: {disturbances.most_common(1)[0][0]}" if disturbances else text


def _by_device(cases: Sequence[TimedCase], runs: Runs) -> dict[torch.device, dict[str, Baseline]]:
    """Put each case's runs into its baseline, where there are enough."""
    found: dict[torch.device, dict[str, Baseline]] = {}
    for one in cases:
        mine = undisturbed(runs, one.key, FEWEST_RUNS)
        if len(mine) >= FEWEST_RUNS:
            found.setdefault(one.device, {})[one.key] = with_runs(one.baseline, mine)
    return found


def with_runs(baseline: Baseline, runs: Runs) -> Baseline:
    """Return a baseline with its runs."""
    modes = [run["mode"] for run in runs]
    return replace(
        baseline,
        p50=tuple(run["p50"] for run in runs),
        launch=tuple(run["launch"] for run in runs),
        anchors={name: tuple(run["anchors"][name] for run in runs) for name in runs[0]["anchors"]},
        mode=max(set(modes), key=modes.count),
    )


# -- the modes ---------------------------------------------------------------------------------------------------------


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

    def untimed_because(self, device: torch.device) -> str | None:
        """Say why nothing is timed here; None where it is."""
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

    def recorded(self, measurement: Measurement) -> Baseline | None:
        """Return what a time is compared with, of whatever protocol and shape."""
        return self.baselines.of(measurement)

    def _recorded_mode(self, measurement: Measurement) -> Mode | None:
        baseline = self.recorded(measurement)
        return baseline.mode if baseline else None  # type: ignore[return-value]


class CompareToBaseline(LatencyMode):
    """Holds each time against its baseline; new processes confirm what looks slower."""

    def __init__(self, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> None:
        super().__init__(session, baselines)
        self._config, self._crowd = config, SharedCpu()

    @classmethod
    def of_run(cls, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> LatencyMode | None:
        return cls(session, baselines, config)

    def prepare(self, device: torch.device) -> None:
        """Have the server of new processes start where something is recorded: a suspect need not wait for it."""
        if self.baselines.on(device).fits and are_forked(self.session.settings.fresh, [device.type]):
            prepare_fresh_runs(self._config)

    def measure(self, measurement: Measurement) -> Latency:
        device = measurement.spec.device
        with locked(self.session, measurement.devices):
            latency = measurement.time(self._recorded_mode(measurement))
        decision = judge_latency(
            measurement.measured(latency),
            self.baselines.on(device),
            measurement.policy,
            measurement.cases,
            lambda: self._fresh_runs(measurement),
            self._crowd,
        )
        is_unverified = latency.decision is not None and decision.verdict == Verdict.NO_BASELINE
        return latency if is_unverified else replace(latency, decision=decision)

    def _fresh_runs(self, measurement: Measurement) -> Sequence[Run]:
        """Time the same test in new processes, in a few more where some were disturbed.

        Raises FreshError where too few timed it, or too few undisturbed.
        """
        name, key, wanted = measurement.test_name, measurement.key, measurement.policy.runs
        counting = self.session.progress.counting(f"timing {measurement.name} again, new process", wanted, MORE_FOR_ONE)

        def lacking(runs: Runs) -> list[str]:
            return [name] if is_lacking(runs, key, wanted) else []

        device = measurement.spec.device
        with locked(self.session, measurement.devices), counting as progress:
            is_forked = are_forked(self.session.settings.fresh, [device.type])
            found = fresh_runs(self._config, [name], wanted, progress, lacking=lacking, is_forked=is_forked)
        timed = [run for run in found if run["key"] == key]
        processes, timing = (len({run["process"] for run in runs}) for runs in (found, timed))
        if timing < processes:
            raise FreshError(f"{timing} of {processes} new processes timed it")
        mine = undisturbed(timed, key, wanted)
        if len(mine) < wanted:
            seen = (run["disturbances"][0] for run in timed if run["disturbances"])
            raise DisturbedError(next(seen, "the attention control took other times in some new processes"))
        return [Run(run["p50"], run["anchors"], run["launch"]) for run in mine]


class RecordBaseline(LatencyMode):
    """--attn-update-baselines: each case is timed once here, and at the end of the run in ten new processes."""

    def __init__(self, session: AttentionSession, baselines: RunBaselines, recording: Recording) -> None:
        super().__init__(session, baselines)
        self._recording = recording

    @classmethod
    def of_run(cls, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> LatencyMode | None:
        if session.settings.update_baselines is None:
            return None
        recording = Recording(session, baselines, config)
        config.pluginmanager.register(recording, "attn-recording")
        return cls(session, baselines, recording)

    def prepare(self, device: torch.device) -> None:
        self._recording.prepare(device)

    def measure(self, measurement: Measurement) -> Latency:
        with locked(self.session, measurement.devices):
            latency = measurement.time(self._mode(measurement))
        today = datetime.now(tz=timezone.utc).date().isoformat()
        baseline = measurement.to_baseline(latency, self.session.settings.update_baselines or "", today)
        self._recording.add(measurement, baseline)
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
        return None if session.worker is None else cls(session, baselines, session.worker)

    def prepare(self, device: torch.device) -> None:
        """Do nothing: it is fresh itself."""

    def measure(self, measurement: Measurement) -> Latency:
        latency = measurement.time(self._worker.mode_of(measurement.key) or self._recorded_mode(measurement))  # type: ignore[arg-type]
        launch = measurement.measured(latency).launch
        run = {"key": measurement.key, "p50": latency.p50, "launch": launch, "anchors": dict(latency.anchors)}
        run |= {"mode": latency.mode, "disturbances": list(latency.disturbances), "tuned": configurations()}
        self._worker.return_result(run)
        return replace(latency, decision=Decision(Verdict.MEASURED))


@contextmanager
def locked(session: AttentionSession, devices: Iterable[torch.device]) -> Iterator[None]:
    """Let no other process time on these devices, which are waited for in one order by all."""
    with ExitStack() as stack:
        for device in sorted(devices, key=lock_name):
            with session.progress.during("waiting until another process has timed", str(device), PATIENCE, True):
                stack.enter_context(device_lock(device))
        yield


#: the first that a run asks for is its mode, after those of guests
LATENCY_MODES: list[type[LatencyMode]] = [ReportToParent, RecordBaseline, CompareToBaseline]
_MODE = pytest.StashKey[LatencyMode]()


def latency_mode_of(config: pytest.Config) -> LatencyMode:
    """Return the mode of a run, made when it first times anything."""
    if _MODE not in config.stash:
        session = session_of(config)
        baselines = RunBaselines(session)
        made = (mode.of_run(session, baselines, config) for mode in (*each("mode"), *LATENCY_MODES))
        config.stash[_MODE] = next(mode for mode in made if mode is not None)
    return config.stash[_MODE]


#: what fails under --attn-latency=require, as nothing can be said
_UNDECIDED = (Verdict.NO_BASELINE, Verdict.INCONCLUSIVE)


class Measuring:
    """The measurements of one test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._taken: Counter[tuple[str, ...]] = Counter()
        if session_of(config).settings.serial_flags:
            latency_mode_of(config)  # may have to judge tests that time nothing

    @property
    def mode(self) -> LatencyMode:
        """The run's."""
        return latency_mode_of(self._config)

    def prepare(self, device: torch.device) -> None:
        """Get ready for a time that is taken on a device, after a check."""
        if not self.mode.untimed_because(device):
            self.mode.prepare(device)

    def evaluator(self, measurement: Measurement) -> LatencyEvaluator:
        """Return what takes the time of a test's next measurement."""
        kind = measurement.kind
        self._taken[kind] += 1
        return LatencyEvaluator(replace(measurement, number=self._taken[kind], nth=sum(self._taken.values())), self.mode)


class LatencyEvaluator(Evaluator[Latency]):
    """Times a subject, and compares the time with its baseline, or does with it what the mode of the run is."""

    question = "latency"

    def __init__(self, measurement: Measurement, mode: LatencyMode) -> None:
        self.subject: Subject = measurement.subject
        self.workload = measurement.spec.workload
        self._measurement, self._mode, self._settings = measurement, mode, measurement.session.settings
        self.doing, self.on = f"timing {measurement.subject.name}", self.workload.id

    def judge(self, context: CaseContext) -> Judgment[Latency]:
        __tracebackhide__ = True
        mode = self._mode
        if reason := mode.untimed_because(self._measurement.spec.device) or self._measurement.untimed_because:
            return self._untimed(reason)
        self.subject = context.executor.of(self.subject).place(self.subject, context.session.progress)
        measurement = self._measurement = replace(self._measurement, subject=self.subject)
        try:
            latency = mode.measure(measurement)
        except (Exception, DeadlineError) as error:
            return self._stopped_by(error)
        decision = latency.decision
        if not mode.reports or decision is None:
            return Judgment(Verdict.MEASURED, latency, is_recorded=False)
        if self._settings.cupti and context.session.worker is None:
            latency = replace(latency, cupti=self._cupti())
        if is_asked_for(context.item.config):  # pytest-benchmark is there, enabled, and wanted
            facts = {key: value for key, value in latency.to_dict().items() if key != "samples"}
            record_samples(context.request, latency.samples, facts)
        return self._decided(latency, decision, context.command())

    def _stopped_by(self, error: BaseException) -> Judgment[Latency]:
        """Return what an error says of the subject that ended its timing."""
        if isinstance(error, NoLockError):
            return self._untimed(str(error))
        if isinstance(error, (StaleError, DeadlineError, EndsTestError)):
            verdict = Verdict.NO_RESULT if isinstance(error, DeadlineError) else Verdict.RAISED
            verdict = Verdict.MISMATCH if isinstance(error, WrongResultError) else verdict
            text = f"cannot be timed: {self._measurement.name}: {error}"
            return self._found(verdict, str(error).splitlines()[0].rstrip(":"), text=text)
        if isinstance(error, Exception) and (refusal := self._measurement.subject.refusal_in(error)):
            if self._requires_decision:
                return self._untimed(f"it passed its check, and declined to be timed: {refusal}")
            reason = f"right, but not timed: {refusal}"
            return Judgment.refused(self.subject, reason, Cause.DECLINED, fields={"question": "check"})
        raised: Any = {"text": str(error)} if isinstance(error, RemoteRaisedError) else {"error": error}
        return self._found(Verdict.RAISED, raised_words(type(error).__name__, message_of(error)), **raised)

    def _untimed(self, reason: str) -> Judgment[Latency]:
        if self._requires_decision:
            text = f"not timed, which --attn-latency=require asks for: {self._measurement.name}: {reason}"
            return self._found(Verdict.UNTIMED, reason, text=text)
        return self._found(Verdict.UNTIMED, reason, skip=f"not timed: {reason}; the check of {self.subject.name} passed")

    def _decided(self, latency: Latency, decision: Decision, command: str) -> Judgment[Latency]:
        """Return what a decision means for the test: what accepts a regression, and what helps where nothing can be said.

        command: repeats the case.
        """
        facts: Any = {"result": latency, "latency": latency}
        name, reason = self._measurement.name, decision.reason
        if decision.verdict == Verdict.REGRESSED:
            baseline = self._mode.recorded(self._measurement)
            assert baseline is not None
            facts["text"] = describe_regression(decision, baseline, latency)
            facts["remedies"] = [labeled("accept", f"{command} {ACCEPT}")]
            reason = "; ".join(filter(None, (describe_change(decision), reason)))
        elif decision.verdict == Verdict.UNCONFIRMED:
            facts["text"] = describe_unconfirmed(name, decision)
        elif decision.cause == Cause.UNUSABLE_FILE or (self._requires_decision and decision.verdict in _UNDECIDED):
            facts["text"] = describe_undecided(name, decision, latency, command)
            facts["says_command"] = False  # the text does
        return self._found(decision.verdict, reason, **facts)

    def _found(self, verdict: Verdict, reason: str, *, latency: Latency | None = None, **more: Any) -> Judgment[Latency]:
        """Return a judgment with the fields that records of times have."""
        measurement, decision = self._measurement, latency.decision if latency else None
        recorded = self._mode.recorded(measurement)
        direction, baseline = measurement.direction, {"baseline": recorded.to_report()} if recorded else {}
        taken = latency.to_dict() if latency else {}
        fields = {
            "cause": decision.cause if decision else "",
            "remedy": decision.remedy if decision else "",
            "direction": direction,
            "backward": direction != "forward",
            "latency": {**taken, **baseline, "direction": direction, "key": measurement.key},
            **measurement.record_fields(),
        }
        return Judgment(verdict, reason=reason, fields=fields, **more)

    @property
    def _requires_decision(self) -> bool:
        return self._settings.latency == "require"

    def _cupti(self) -> float | None:
        """Return the device seconds of one call by torch's profiler, None where it has no such direction or device."""
        measurement = self._measurement
        is_one_kernel = measurement.is_of_one_kernel and measurement.direction != "forward+backward"
        if not is_one_kernel or measurement.spec.device.type != "cuda":
            return None
        spec = replace(measurement.spec, backward=measurement.direction == "backward", inputs=("randn",))
        return profile_subject(measurement.subject, spec, with_ceilings=False)[-1].seconds
