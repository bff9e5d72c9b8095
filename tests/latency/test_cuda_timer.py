"""How a GPU's timer plans and takes its samples, on a GPU all of whose answers are made up."""

import functools
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from judging import SMALL, Clock, attention, timed

from pytest_attn.latency import cuda_timer
from pytest_attn.latency import work as timed_work
from pytest_attn.latency.cuda_timer import BacklogError, CudaTimer, DeviceGraphError, calls_per_sample, replays_per_sample
from pytest_attn.latency.timer import HostTimer, Item
from pytest_attn.latency.work import TimedCall


@pytest.mark.parametrize(
    ("microseconds", "mode", "calls"),
    [(3, "graph", 40), (33, "graph", 25), (260, "graph", 4), (3, "batched", 20), (33, "batched", 7), (33, "events", 1)],
)
def test_what_a_pair_of_events_adds_is_shared_by_the_calls_of_a_short_kernel(microseconds, mode, calls):
    assert calls_per_sample(microseconds * 1e-6, mode) == calls


@pytest.mark.parametrize(
    ("asked", "instantiated", "mode"), [(None, True, "graph"), (None, False, "replay"), ("replay", True, "replay")]
)
def test_a_graph_that_the_driver_does_not_instantiate_in_the_device_s_memory_is_replayed_by_torch(
    monkeypatch, asked, instantiated, mode
):
    def graphs_of(*_, on_device):
        if on_device and not instantiated:
            raise DeviceGraphError("CUDA error 801")
        return [print]

    monkeypatch.setattr(cuda_timer, "graphs_of", graphs_of)
    assert planned(monkeypatch, asked).mode == mode


@pytest.mark.parametrize(("seconds", "calls", "replays"), [(99e-6, 9, 1), (101e-6, 8, 3), (160e-6, 5, 3), (245e-6, 4, 2)])
def test_a_sample_of_long_calls_in_graphs_is_several_replays(monkeypatch, seconds, calls, replays):
    asked, replayed = [], []
    graphs = [lambda number=number: partial(replayed.append, number) for number in range(6)]
    monkeypatch.setattr(cuda_timer, "graphs_of", lambda work, calls, *_, on_device: asked.append(calls) or graphs)
    plan = planned(monkeypatch, "graph", seconds)
    for _ in range(6):
        plan.stage()()
    assert asked == [calls]
    assert plan.calls == calls * replays
    assert replayed == [*range(6)] * replays


@pytest.mark.parametrize(("sets", "replays"), [(30, 3), (14, 2), (5, 1), (2, 1)])
def test_each_call_of_a_sample_has_its_own_tensors_or_shares_them_with_none_of_another_replay(sets, replays):
    assert replays_per_sample(5, 160e-6, sets) == replays


def planned(monkeypatch, mode, seconds=1e-5):
    """Plan a kernel as on a GPU, all of whose answers are made up."""
    gpu = made_up(monkeypatch, seconds)
    return gpu.plan(timed(attention, SMALL, gpu.device, "forward"), mode)


def made_up(monkeypatch, seconds=1e-5):
    """Return a timer of a GPU that is not there."""
    gpu = object.__new__(CudaTimer)
    gpu.device, gpu._backlogs, gpu.looked_behind = torch.device("cpu"), {}, 0
    gpu.host_timer = HostTimer(gpu.device)
    monkeypatch.setattr(cuda_timer, "verified", lambda work: timed_work.verified(work)._replace(launched=1e-5, done=1e-4))
    monkeypatch.setattr(gpu, "_launching", lambda work: 1e-5)
    monkeypatch.setattr(gpu, "_estimate", lambda work, launch, samples: seconds)
    monkeypatch.setattr(gpu, "verify_behind_backlog", lambda work: setattr(gpu, "looked_behind", gpu.looked_behind + 1))
    monkeypatch.setattr(cuda_timer, "torch_free_memory", lambda device: 1 << 34)
    return gpu


@pytest.mark.parametrize(("first", "second", "is_slow"), [(4e-3, 3.2e-3, True), (4e-3, 2.8e-3, False), (2.8e-3, 1.0, False)])
def test_a_slow_kernel_is_called_less_often_before_it_is_timed(monkeypatch, first, second, is_slow):
    looks = [TimedCall(None, 3e-6, first), TimedCall(None, 2e-6, second)]
    asked = []
    gpu = made_up(monkeypatch, seconds=1e-3)
    monkeypatch.setattr(gpu, "_estimate", lambda work, launch, samples: asked.append((launch, samples)) or 1e-3)
    for call in ("verified", "called"):
        monkeypatch.setattr(cuda_timer, call, lambda work: looks.pop())
    gpu.plan(timed(attention, SMALL, gpu.device, "forward"))
    assert asked == [(2e-6, 1) if is_slow else (1e-5, 3)]
    assert looks == [], "its result is looked at twice"
    assert gpu.looked_behind == 1


@pytest.mark.parametrize("samples", [1, 3])
def test_an_estimate_is_the_median_of_its_samples(monkeypatch, samples):
    gpu = made_up(monkeypatch)
    monkeypatch.setattr(gpu, "block", lambda items: [9.0, 1.0, 2.0][: len(items)])
    work = timed(attention, SMALL, gpu.device, "forward")
    assert CudaTimer._estimate(gpu, work, 0.0, samples) == {1: 9.0, 3: 2.0}[samples]
    assert CudaTimer._estimate(gpu, work, 0.06, samples) is None, "no backlog holds for so long"
    monkeypatch.setattr(gpu, "block", raising(BacklogError("awake")))
    assert CudaTimer._estimate(gpu, work, 0.0, samples) is None


def raising(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize(
    ("recorded", "launch", "seconds", "mode"),
    [
        (None, 1.9e-3, 1e-5, "graph"),
        (None, 2.1e-3, 1e-5, "host"),
        (None, 3.9e-3, 1e-3, "events"),
        (None, 4.1e-3, 1e-3, "host"),
        ("graph", 3.9e-3, 1e-5, "graph"),
        ("graph", 4.1e-3, 1e-5, "host"),
        ("host", 0.9e-3, 1e-5, "graph"),
        ("host", 1.1e-3, 1e-5, "host"),
        (None, 1e-5, None, "host"),
        (None, 1e-5, 249e-6, "graph"),
        (None, 1e-5, 251e-6, "events"),
        ("batched", 1e-5, 1e-5, "batched"),
    ],
)
def test_the_mode_is_that_of_the_device_s_and_the_host_s_time(monkeypatch, recorded, launch, seconds, mode):
    monkeypatch.setattr(cuda_timer, "graphs_of", lambda *_, on_device: [print])
    gpu = made_up(monkeypatch, seconds)
    monkeypatch.setattr(gpu, "_launching", lambda work: launch)
    plan = gpu.plan(timed(attention, SMALL, gpu.device, "forward"), recorded)
    assert (plan.mode, plan.launch) == (mode, launch)


@pytest.mark.parametrize(("gigabytes", "sets", "moves"), [(16, 6, True), (0, 1, False)])
def test_where_memory_is_scarce_tensors_stay_where_they_are(monkeypatch, gigabytes, sets, moves):
    gpu = made_up(monkeypatch, seconds=1e-3)
    monkeypatch.setattr(cuda_timer, "torch_free_memory", lambda device: gigabytes << 30)
    work = timed(attention, SMALL, gpu.device, "forward")
    plan = gpu.plan(work)
    assert len(work.sets) == sets
    assert isinstance(plan.renew, functools.partial) is moves


class Event:
    """A stand-in for a CUDA event on a device that is asleep until `Event.awake`; a sample takes a millisecond."""

    clock = Clock()
    awake = 0.0
    log: list[str]

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.log.append("event")

    def query(self):
        self.log.append("look")
        return Event.clock.now > Event.awake

    def elapsed_time(self, end):
        return 1.0


@pytest.fixture
def asleep(monkeypatch):
    """A timer of such a device."""

    def sleep(seconds):
        Event.log, Event.awake = ["sleep"], Event.clock.now + seconds

    gpu = made_up(monkeypatch)
    monkeypatch.setattr(Event, "clock", Clock())
    monkeypatch.setattr(cuda_timer, "time", Event.clock)
    monkeypatch.setattr(gpu, "_sleep", sleep)
    monkeypatch.setattr(gpu, "_flush", lambda: Event.log.append("flush"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: Event.log.append("wait"))
    return gpu


def test_a_block_is_launched_while_the_device_sleeps_each_sample_between_two_events(asleep, monkeypatch):
    def stage():
        Event.log.append("stage")
        return lambda: Event.log.append("call")

    monkeypatch.setattr(cuda_timer, "SHORTEST_BACKLOG_SECONDS", 5.0)
    assert asleep.block([Item("op", stage, 4)] * 2) == [0.25e-3] * 2
    assert Event.log == ["sleep", *["stage", "flush", "event", "call", "event"] * 2, "look", "wait"]


def test_a_backlog_is_as_long_as_the_launches_of_the_block_before_took(asleep, monkeypatch):
    def stage():
        staged.append(1)
        Event.clock.sleep(next(pauses))
        return lambda: None

    pauses = itertools.chain([10e-3] * 4, itertools.repeat(10e-3, 4), itertools.repeat(0.0))
    taken = []
    for _ in range(5):
        staged = []
        asleep.block([Item("op", stage)] * 2)
        taken.append(len(staged))
    assert taken == [4, 2, 2, 2, 2]
    assert asleep._backlogs["op", "op"] == cuda_timer.SHORTEST_BACKLOG_SECONDS, "it is short again"
    assert asleep._backlogs.get(("another",)) is None
    asleep.plan(timed(attention, SMALL, asleep.device, "forward"), "batched")
    assert asleep._backlogs == {}


def test_a_device_that_cannot_be_kept_waiting_is_no_timer(asleep, monkeypatch):
    monkeypatch.setattr(cuda_timer, "_MOST_BACKLOG_SECONDS", 2e-3)
    with pytest.raises(BacklogError, match=r"launching 1 samples took 0\.005 s, longer than the device can be kept waiting"):
        asleep.block([Item("op", lambda: Event.clock.sleep(5e-3) or print)])
    assert asleep._backlogs["op",] == 2e-3


def test_launching_is_told_from_waiting(monkeypatch):
    log, clock = [], Clock()
    monkeypatch.setattr(timed_work, "time", clock)
    monkeypatch.setattr(timed_work, "wait", lambda device: log.append("wait") or clock.sleep(20e-3))
    work = SimpleNamespace(
        device=None, stage=lambda: log.append("stage") or (lambda: log.append("call") or clock.sleep(3e-3) or "out")
    )
    value, launched, done = timed_work.called(work)
    assert log == ["stage", "wait", "call", "wait"]
    assert value == "out"
    assert (launched, done) == pytest.approx((3e-3, 23e-3))
