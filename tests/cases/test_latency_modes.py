"""What becomes of a time: compared, recorded or handed over; who holds the lock of the device meanwhile."""

import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_attn.cases import latency as modes
from pytest_attn.cases.latency import CompareToBaseline, RecordBaseline, ReportToParent
from pytest_attn.latency.gate import POLICIES, Decision
from pytest_attn.latency.regression import DeviceBaselines, DisturbedError, Measured
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import median_interval
from pytest_attn.processes.channel import Channel
from pytest_attn.processes.worker import Worker
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session import devices
from pytest_attn.session.devices import device_lock
from pytest_attn.session.session import SESSION, WorkerContext

CPU = torch.device("cpu")
LATENCY = Latency(
    *("tiny", "mine", "forward", 1e-4, median_interval([1e-4] * 6), (1e-4,) * 6, 6, "host", 1, "warm", 2e-5, {"pace": 1e-3})
)


class Measurement:
    """One of a kernel that takes 100 us, in whatever mode it is asked for; knows in which it was."""

    def __init__(self, latency=LATENCY, key="mine"):
        self.latency, self.key, self.modes = latency, key, []
        self.spec, self.item = SimpleNamespace(device=CPU), SimpleNamespace(nodeid=f"test_{key}.py::test_{key}")
        self.devices = [CPU]
        self.name, self.test_name = f"{key} on tiny, forward", self.item.nodeid
        self.policy, self.cases = replace(POLICIES["cpu"], runs=2), 1

    def time(self, mode):
        self.modes.append(mode)
        return replace(self.latency, mode=mode or self.latency.mode)

    def measured(self, latency):
        return Measured(latency, self.key, "h2-s32-d32", "", "", None, {}, "", "cpu", Path("baselines"))

    def to_baseline(self, latency, reason, date):
        return f"{latency.mode}: {reason}"


class Baselines:
    """Of a run: every case was recorded in this mode; in none where that is None."""

    def __init__(self, mode=None):
        self._mode = mode

    def of(self, measurement):
        return SimpleNamespace(mode=self._mode) if self._mode else None

    def on(self, device):
        return DeviceBaselines()


@pytest.fixture(autouse=True)
def no_patience(tmp_path, monkeypatch):
    """Wait for nobody, and let nobody wait for these tests."""
    monkeypatch.setattr(devices, "PATIENCE", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def child():
    """A new process; returns what it was told, and a function that reads what it returned."""

    def told(**modes):
        mine, theirs = Channel.pair()
        mine.send(modes=modes)
        worker = Worker(theirs)

        def returned():
            theirs.close()
            return list(iter(mine.recv, None))

        return WorkerContext(worker), returned

    return told


@contextmanager
def counting(what, number, more=0):
    yield lambda done: None


def session(**settings):
    progress = SimpleNamespace(counting=counting, during=lambda *what: nullcontext())
    return SimpleNamespace(settings=SimpleNamespace(**{"fresh": "started", **settings}), progress=progress)


# -- a new process -----------------------------------------------------------------------------------------------------


def test_a_fresh_process_times_while_the_one_that_waits_for_it_holds_the_device(child):
    told, handed_over = child()
    with device_lock(CPU):
        latency = ReportToParent(session(), Baselines(), told).measure(Measurement())
        with pytest.raises(pytest.fail.Exception, match="another process has been timing on cpu"):
            CompareToBaseline(session(), Baselines(), None).measure(Measurement())
    assert latency.verdict == Verdict.MEASURED
    assert [run["key"] for run in handed_over()] == ["mine"]


def test_a_process_that_waits_holds_the_device_for_the_fresh_ones_that_it_starts(monkeypatch):
    def from_fresh_processes(*_, **__):
        with pytest.raises(pytest.fail.Exception, match="another process"), device_lock(CPU):
            pass
        return [{"key": "mine", "process": n, "p50": 1e-4, "anchors": {}, "launch": 0.0, "disturbances": []} for n in (0, 1)]

    monkeypatch.setattr(modes, "fresh_runs", from_fresh_processes)
    assert len(CompareToBaseline(session(), Baselines(), None)._fresh_runs(Measurement())) == 2


def test_what_is_handed_over_is_all_that_a_decision_needs(child, monkeypatch):
    told, handed_over = child()
    monkeypatch.setattr(modes, "configurations", lambda: {"k": "warps: 4"})
    hot = Measurement(replace(LATENCY, mode="events", disturbances=("hot",)))
    ReportToParent(session(), Baselines(), told).measure(hot)
    told = {"launch": 2e-5, "anchors": {"pace": 1e-3}, "mode": "events", "disturbances": ["hot"], "tuned": {"k": "warps: 4"}}
    assert handed_over() == [{"key": "mine", "p50": 1e-4, **told}]


def test_a_fresh_process_neither_checks_nor_reports():
    assert not ReportToParent.checks_first
    assert not ReportToParent.reports
    assert CompareToBaseline.checks_first
    assert RecordBaseline.reports


# -- in which mode -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told_mode", "recorded", "mode"),
    [("events", "graph", "events"), (None, "graph", "graph"), (None, None, None), ("events", None, "events")],
)
def test_a_fresh_process_times_as_it_is_told_or_as_was_recorded(child, told_mode, recorded, mode):
    told, _ = child(**({"mine": told_mode} if told_mode else {}))
    measurement = Measurement()
    ReportToParent(session(), Baselines(recorded), told).measure(measurement)
    assert measurement.modes == [mode]


@pytest.mark.parametrize("mode", ["events", "batched", "graph", None])
def test_what_is_compared_is_timed_as_it_was_recorded(mode):
    measurement = Measurement()
    CompareToBaseline(session(), Baselines(mode), None).measure(measurement)
    assert measurement.modes == [mode]


@pytest.mark.parametrize(
    ("recorded", "mode"),
    [("events", "events"), ("host", "host"), ("graph", "graph"), ("batched", None), ("replay", None), (None, None)],
)
def test_recorded_anew_only_batches_and_replays_may_become_a_graph(recorded, mode):
    measurement, kept = Measurement(), []
    recorder = RecordBaseline(
        session(update_baselines="again"), Baselines(recorded), SimpleNamespace(add=lambda *one: kept.append(one))
    )
    assert recorder.measure(measurement).verdict == Verdict.RECORDED
    assert measurement.modes == [mode]
    assert kept == [(measurement, f"{mode or 'host'}: again")]


# -- what a decision is given --------------------------------------------------------------------------------------------


def test_a_run_remembers_from_one_time_to_the_next_that_its_machine_is_crowded(monkeypatch):
    given = []
    monkeypatch.setattr(modes, "device_lock", nullcontext)
    monkeypatch.setattr(modes, "judge_latency", lambda *all_of_it: given.append(all_of_it) or Decision(Verdict.PASSED))
    comparing, measurement = CompareToBaseline(session(), Baselines(), None), Measurement()
    assert [comparing.measure(measurement).verdict for _ in range(2)] == [Verdict.PASSED] * 2
    (*_, first), (measured, _, policy, cases, _, second) = given
    assert first is second
    assert (measured.key, policy, cases) == ("mine", measurement.policy, measurement.cases)


# -- what new processes found ------------------------------------------------------------------------------------------


def run(process, p50=1e-4, key="mine", hot=()):
    return {"key": key, "process": process, "p50": p50, "anchors": {"pace": 1e-3}, "launch": 1e-5, "disturbances": list(hot)}


def confirmed(monkeypatch, *runs):
    """Return the times that new processes confirm with, of two that are wanted."""
    monkeypatch.setattr(modes, "fresh_runs", lambda *_, **__: list(runs))
    return [one.p50 for one in CompareToBaseline(session(), Baselines(), None)._fresh_runs(Measurement())]


def test_too_few_undisturbed_processes_say_what_disturbed_the_others(monkeypatch):
    with pytest.raises(DisturbedError, match=r"^hot$"):
        confirmed(monkeypatch, run(0), run(1, hot=["hot", "shared"]), run(2, hot=["late"]))


def test_the_same_test_is_asked_for_while_some_of_its_processes_were_disturbed(monkeypatch):
    asked = {}

    def from_fresh_processes(config, names, processes, progress, lacking, is_forked):
        asked.update(config=config, names=names, processes=processes, is_forked=is_forked)
        asked["again"] = [lacking([run(0), run(1)]), lacking([run(0), run(1, hot=["hot"])]), lacking([run(0, hot=["hot"])])]
        return [run(0), run(1)]

    monkeypatch.setattr(modes, "fresh_runs", from_fresh_processes)
    CompareToBaseline(session(), Baselines(), "the config")._fresh_runs(Measurement())
    name = "test_mine.py::test_mine"
    assert asked == {"config": "the config", "names": [name], "processes": 2, "is_forked": False, "again": [[], [name], []]}


@pytest.mark.parametrize(
    ("fresh", "kind", "recorded", "starts"),
    [
        *[("forked", "cuda", True, True), ("forked", "cuda", False, False)],
        *[("forked", "cpu", True, False), ("started", "cuda", True, False)],
    ],
)
def test_the_server_of_fresh_processes_starts_before_what_may_be_a_suspect_is_checked(
    monkeypatch, fresh, kind, recorded, starts
):
    """Only a case with a baseline can be one."""
    started = []
    baselines = SimpleNamespace(on=lambda device: DeviceBaselines(fits={"mine": None} if recorded else {}))
    monkeypatch.setattr(modes, "prepare_fresh_runs", started.append)
    CompareToBaseline(session(fresh=fresh), baselines, "the config").prepare(torch.device(kind))
    assert started == (["the config"] if starts else [])


# -- which mode a run has ------------------------------------------------------------------------------------------------


class Halved(modes.LatencyMode):
    """A mode of its own: half the time, and no baseline."""

    @classmethod
    def of_run(cls, session, baselines, config):
        return cls(session, baselines) if session.settings.fresh == "halved" else None

    def prepare(self, device):
        pass

    def measure(self, measurement):
        latency = measurement.time(None)
        return replace(latency, p50=latency.p50 / 2, decision=Decision(Verdict.MEASURED))


@pytest.mark.parametrize(
    ("settings", "worker", "mode"),
    [
        ({"fresh": "halved"}, None, Halved),
        ({}, None, CompareToBaseline),
        ({}, "told", ReportToParent),
        ({"fresh": "halved"}, "told", Halved),
    ],
)
def test_a_mode_is_a_class_and_a_line_and_the_first_that_a_run_asks_for_is_its_mode(monkeypatch, settings, worker, mode):
    monkeypatch.setattr(modes, "each", lambda what: [Halved])
    run = session(update_baselines=None, **settings)
    run.worker = worker
    config = SimpleNamespace(stash=pytest.Stash())
    config.stash[SESSION] = run
    made = modes.latency_mode_of(config)
    assert type(made) is mode
    assert modes.latency_mode_of(config) is made
    if mode is Halved:
        assert made.measure(Measurement()).p50 == LATENCY.p50 / 2
