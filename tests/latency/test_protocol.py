"""How blocks are taken: between which anchors, when the device rests and works, what becomes of a disturbed one."""

import json
import time
from dataclasses import replace

import pytest
import torch
from judging import SMALL, Clock, attention, timed

from pytest_attn import Workload
from pytest_attn.latency.anchors import Anchor, anchor_item, attention_like
from pytest_attn.latency.cuda_timer import CudaTimer
from pytest_attn.latency.gate import Decision
from pytest_attn.latency.protocol import Stopwatch, Warmer, _items_of, stopwatch_of
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Interval
from pytest_attn.latency.timer import HostTimer, Item, Plan
from pytest_attn.reports.verdict import Verdict

CPU = torch.device("cpu")


class Busy(CudaTimer):
    """A stand-in for a GPU: its blocks take 20 ms, of which 10 are the kernel's."""

    def __init__(self):
        self.blocks = []

    def block(self, items):
        begun = time.perf_counter()
        time.sleep(0.02)
        self.blocks.append(([item.name for item in items], begun, time.perf_counter()))
        return [0.01 / len(items)] * len(items)


@pytest.fixture
def busy(monkeypatch):
    stopwatch = Stopwatch(CPU)
    stopwatch.timer = Busy()
    stopwatch.monitor.disturbance = lambda: None  # whatever else this machine does
    stopwatch.warmer = Warmer(stopwatch.timer, stopwatch.anchors, stopwatch.monitor)
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.0)
    clock = Clock(step=1e-6)  # however busy this machine is
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return stopwatch


def plan_of(renew=lambda: None):
    return Plan("events", 1, 0.01, 0.0, lambda: lambda: None, renew)


def blocks_of(stopwatch, plan, **given):
    found, _ = stopwatch._blocks(plan, stopwatch.timer, timed(attention, SMALL, CPU, "forward"), **given)
    return found


def test_the_device_rests_between_blocks_from_its_work_and_not_during_its_renewal(busy):
    for _ in range(3):
        busy._block(busy.timer, [Item("op", None)], plan_of(lambda: time.sleep(0.005)))
    ends, begins = [end for _, _, end in busy.timer.blocks], [begun for _, begun, _ in busy.timer.blocks]
    assert all(begun - end >= 0.0145 for end, begun in zip(ends, begins[1:], strict=False))


def test_a_gpu_works_right_before_its_first_block(busy, monkeypatch):
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.05)
    blocks_of(busy, plan_of(), seconds=0.0, compiled_at=0.0)
    kinds = ["op" in names for names, _, _ in busy.timer.blocks]
    assert kinds[:4] == [False, False, False, True]
    assert all(kinds[3:])


@pytest.mark.parametrize(("seconds", "first"), [(2.9e-3, 1), (3.1e-3, 0)])
def test_a_slow_kernel_on_a_gpu_warmed_up_while_it_was_planned(busy, seconds, first):
    blocks = blocks_of(busy, plan_of()._replace(seconds=seconds), seconds=0.0, compiled_at=0.0)
    taken = sum("op" in names for names, _, _ in busy.timer.blocks)
    assert (len(blocks), taken) == (3, 3 + first)


def test_a_gpu_whose_power_is_capped_does_light_work_until_it_has_its_clock_back(busy, monkeypatch):
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.01)
    says = iter([True, True, False])
    monkeypatch.setattr(busy.monitor, "is_capped", lambda: next(says))
    busy.warmer.warm_up()
    assert [set(names) for names, _, _ in busy.timer.blocks] == [{"compute", "memory"}, {"memory"}, {"memory"}]


def test_a_gpu_whose_power_is_capped_for_good_is_timed_as_it_is(busy, monkeypatch):
    busy.warmer._recovery_seconds = 0.05
    monkeypatch.setattr(busy.monitor, "is_capped", lambda: True)
    busy.warmer.warm_up()
    waited = len(busy.timer.blocks)
    assert 1 <= waited <= 3
    busy.warmer.warm_up()
    assert len(busy.timer.blocks) == waited
    monkeypatch.setattr(busy.monitor, "is_capped", lambda: False)
    busy.warmer.warm_up()
    assert busy.warmer._recovery_seconds > 0


@pytest.mark.slow("times beside other work")
def test_a_block_is_repeated_while_it_is_disturbed_and_kept_in_the_end(monkeypatch):
    stopwatch = Stopwatch(CPU)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    said = iter(["hot", None, *(f"{n} % too hot" for n in range(1000))])
    monkeypatch.setattr(stopwatch.monitor, "disturbance", lambda: next(said))
    latency = stopwatch.measure(timed(attention, SMALL, CPU, "forward"), SMALL.id, "kernel", seconds=0.0)
    hot = [words for words in latency.disturbances if "hot" in words]  # beside what else this machine was disturbed by
    assert len(hot) == 1  # of two blocks, each with a number of its own
    assert hot[0].endswith("% too hot")
    assert latency.blocks == 3


def test_a_block_that_would_end_too_late_is_not_begun(busy, monkeypatch):
    monkeypatch.setattr(busy, "_now", lambda: 0.02 * sum("op" in names for names, _, _ in busy.timer.blocks))
    assert len(blocks_of(busy, plan_of(), seconds=0.11, compiled_at=0.0)) == 5


def test_the_clock_of_a_measurement_stands_still_while_others_have_the_core(busy, monkeypatch):
    monkeypatch.setattr(busy.monitor, "lost", lambda: 100.0)
    assert busy._now() == pytest.approx(time.perf_counter() - 100.0, abs=1.0)


def test_waiting_for_the_clock_takes_nothing_from_the_blocks(busy, monkeypatch):
    says = iter([True, True, True, False])  # each is followed by a block of 20 ms
    monkeypatch.setattr(busy.monitor, "is_capped", lambda: next(says))
    asked = []

    def seconds_for_blocks(kind, spent):
        asked.append((spent, time.perf_counter() - begun))
        return 0.0

    monkeypatch.setattr("pytest_attn.latency.protocol.seconds_for_blocks", seconds_for_blocks)
    begun = time.perf_counter()
    blocks_of(busy, plan_of()._replace(seconds=1e-3), seconds=None, compiled_at=begun)
    ((spent, passed),) = asked
    assert 0.019 < spent < passed - 0.059, "the one block that warms up counts, the three before it do not"


def test_an_anchor_s_sample_may_be_several_calls():
    calls = []
    item = anchor_item("compute", Anchor("", lambda: calls.append(0), 3))
    item.stage()()
    assert len(calls) == item.calls == 3


def test_records_have_the_names_that_they_always_had():
    latency = Latency("w", "s", "forward", 1e-3, Interval(0.9e-3, 1.1e-3, 0.97), (1e-3,) * 6, 6, "events", 1, "cold", 2e-5, {})
    decided = replace(latency, decision=Decision(Verdict.PASSED))
    assert [name for name in decided.to_dict() if name != "ranks"] == [  # which a guest adds
        *("workload", "subject", "direction", "p50", "interval", "samples", "blocks", "mode", "calls", "l2", "host"),
        *("anchors", "memory", "threads", "disturbances", "notes", "conditions", "spent", "cupti"),
        *("decision", "verdict"),
    ]
    assert decided.to_dict()["host"] == 2e-5
    assert (latency.to_dict()["verdict"], decided.to_dict()["verdict"]) == ("measured", "passed")
    assert json.loads(json.dumps(decided.to_dict()))["interval"] == [0.9e-3, 1.1e-3, 0.97]


def test_controls_made_in_inference_mode_serve_outside_of_it():
    with torch.inference_mode():
        stopwatch = stopwatch_of.__wrapped__(CPU)
    for anchor in stopwatch.anchors.values():
        anchor.call()


def test_attention_like_a_kernel_is_timed_before_each_of_its_samples():
    work = timed(attention, SMALL, CPU)
    anchors = {name: Anchor(name, lambda: None) for name in ("compute", "memory", "attention")}
    items = _items_of(HostTimer(CPU).plan(work)._replace(seconds=1.5e-3, calls=1), anchors, work)
    assert [item.name for item in items] == [
        *("compute", "attention", "op", "attention", "op"),
        *("memory", "attention", "op", "attention", "op", "compute", "memory"),
    ]


@pytest.mark.parametrize("workload", [Workload(1, 70_000, heads=2), Workload(3, heads=5, head_dim=8, dtype="float8_e4m3fn")])
def test_attention_of_any_shape_is_a_control(workload):
    anchor = attention_like(workload)
    anchor.call()
    assert anchor.calls >= 1
