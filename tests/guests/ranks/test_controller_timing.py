"""A time over ranks is that of the slowest; all ranks make the same steps, whatever one of them has seen."""

import pytest

from pytest_attn.guests.ranks import communication, controller_timing
from pytest_attn.guests.ranks.communication import (
    RankTimes,
    SharedSample,
    describe_ranks,
    figures_of,
    seconds_of,
    slow_rank,
)
from pytest_attn.guests.ranks.controller_timing import RankedMonitor, RankedTimer, RankedWork
from pytest_attn.latency.cuda_timer import BacklogError
from pytest_attn.latency.timer import Item

FORWARD = RankedWork("forward", None)


class Steps:
    """Ranks whose answers are said. seconds: of each rank; not_held: how many attempts of a block are not."""

    def __init__(self, kind="cpu", seconds=(1e-4, 3e-4), not_held=0):
        self.kind, self.ranks, self.seconds, self.not_held = kind, len(seconds), seconds, not_held
        self.made = []

    def step(self, what, **given):
        self.made.append((what, given))
        if what == "block":
            held, self.not_held = self.not_held <= 0, self.not_held - 1
            samples = [[[one, one / 2, 1e-6]] * len(given["names"]) for one in self.seconds]
            return [{"samples": mine, "enqueued": 4e-3, "held": held or rank == 0} for rank, mine in enumerate(samples)]
        return [None] * self.ranks

    def named(self, what):
        return [given for name, given in self.made if name == what]


def test_a_sample_takes_as_long_as_its_slowest_rank():
    timer = RankedTimer(Steps(), device=False)
    assert timer.block([Item("compute", None), Item("op", None, 4), Item("op", None, 4)]) == [3e-4] * 3
    assert [one.ranks[0].seconds for one in timer.taken] == [1e-4, 1e-4]


def test_calls_of_a_sample_follow_the_slowest_rank_too():
    steps = Steps(seconds=(1e-4, 3e-4))
    plan = RankedTimer(steps, device=False).plan(FORWARD)
    assert (plan.mode, plan.calls, plan.seconds) == ("host", 4, 3e-4)
    assert not steps.named("behind")


@pytest.mark.parametrize(("seconds", "mode", "calls"), [(3e-4, "events", 1), (2e-5, "batched", 10)])
def test_a_gpu_is_timed_by_its_own_clock(seconds, mode, calls):
    steps = Steps("cuda", (seconds, seconds))
    plan = RankedTimer(steps, device=True).plan(FORWARD)
    assert (plan.mode, plan.calls) == (mode, calls)
    assert len(steps.named("behind")) == 1
    assert {given["clock"] for given in steps.named("block")} == {"device"}


def test_a_block_that_one_device_did_not_sleep_through_is_taken_again_by_all():
    steps = Steps("cuda", not_held=2)
    timer = RankedTimer(steps, device=True)
    timer.block([Item("op", None)])
    backlogs = [given["backlog"] for given in steps.named("block")]
    assert len(backlogs) == 3
    assert backlogs == sorted(backlogs)


def test_devices_that_cannot_be_kept_waiting_are_timed_by_their_hosts():
    steps = Steps("cuda", not_held=4)
    timer = RankedTimer(steps, device=True)
    assert timer.plan(FORWARD).mode == "host"
    assert steps.named("block")[-1]["clock"] == "host"
    with pytest.raises(BacklogError, match=r"launching 1 samples took 0\.004 s"):
        RankedTimer(Steps("cuda", not_held=9), device=True).block([Item("op", None)])


def test_a_disturbed_rank_is_named_unless_ranks_share_cores():
    class Disturbed(Steps):
        def step(self, what, **given):
            if what == "watch":
                return [{"power_w": 1}] * 2
            return [{"disturbance": None, "notes": []}, {"disturbance": "waited", "notes": ["capped"]}]

    monitor = RankedMonitor(Disturbed())
    assert monitor.disturbance() == "rank 1: waited"
    assert (monitor.notes, monitor.conditions()) == (["capped"], {"power_w": 1})
    assert RankedMonitor(Disturbed(), "2 ranks share a core").disturbance() is None


def test_sharing_of_cores_is_said(monkeypatch):
    monkeypatch.setattr(controller_timing, "usable_cores", lambda: 2)
    assert controller_timing._shared_cores(Steps(), 1) == ""
    assert controller_timing._shared_cores(Steps(seconds=(1,) * 4), 1) == "4 ranks of 1 thread share 2 cores"


# -- what ranks say ------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_each_rank():
    samples = [SharedSample(tuple(RankTimes(one, inside, late) for one, inside, late in times)) for times in [
        ((1.8e-3, 0.9e-3, 1e-6), (1.8e-3, 0.2e-3, 3e-6)),
        ((1.8e-3, 0.7e-3, 5e-6), (1.8e-3, 0.0, 1e-6)),
    ]]  # fmt: skip
    found = figures_of(samples, [])
    assert found["seconds"] == [1.8e-3, 1.8e-3]
    assert found["own"] == pytest.approx([1.0e-3, 1.7e-3])
    assert found["communication"] == pytest.approx([8 / 18, 1 / 18])
    assert found["apart"] == pytest.approx(4e-6)


def test_on_a_gpu_the_profiler_tells():
    samples = [SharedSample((RankTimes(2e-3), RankTimes(2e-3)))]
    profiled = [{"span": 2e-3, "inside": 1e-3, "own": 1.2e-3}, {"span": 2e-3, "inside": 0.5e-3, "own": 1.5e-3}]
    found = figures_of(samples, profiled)
    assert (found["own"], found["communication"], found["apart"]) == ([1.2e-3, 1.5e-3], [0.5, 0.25], None)
    assert figures_of(samples, [None, None])["communication"] == []


def test_kernels_that_overlap_count_once():
    spans = [
        (0, 10, "flash_fwd"),
        (5, 20, "ncclDevKernel_AllGather"),
        (18, 30, "ncclDevKernel_AllGather"),
        (0, 99, "aten::mm"),
    ]
    assert seconds_of(spans) == pytest.approx({"span": 30e-6, "inside": 25e-6, "own": 10e-6})
    assert seconds_of([]) is None


def test_the_slow_rank_is_named():
    facts = {"number": 3, "shard": "contiguous", "topology": "CPU", "own": [1.1e-3, 1.8e-3, 1.1e-3], "apart": 3e-6}
    text = describe_ranks({**facts, "communication": [0.4, 0.05, 0.38]})
    assert text == (
        "3 ranks (contiguous, CPU); outside collectives rank 1 took 1.8 ms, the others 1.1 ms;"
        " in collectives 5% to 40% of the time; begun within 3 us of one another"
    )
    assert slow_rank([1.1, 1.3, 1.2]) is None
    assert slow_rank([1.0]) is None


@pytest.mark.parametrize(
    ("links", "text"), [((True, True, True), "NVLink"), ((True, False, True), "PCIe"), ((None,) * 3, "links unknown")]
)
def test_nvlink_must_connect_every_two(monkeypatch, links, text):
    answers = iter(links)
    gpu = type("Gpu", (), {"__init__": lambda self, device: None, "has_nvlink_to": lambda self, other: next(answers)})
    monkeypatch.setattr(communication, "Gpu", gpu)
    assert communication.topology_of("cuda", 3) == text
    assert communication.topology_of("cpu", 2) == "CPU"
