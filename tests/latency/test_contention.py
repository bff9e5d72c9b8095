"""Whether other work shares the core that is timed, on a core of the tests whose clock goes as told."""

import pytest
import torch
from judging import timed

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.latency import disturbance
from pytest_attn.latency.disturbance import ContentionMonitor
from pytest_attn.latency.protocol import Stopwatch, threads

ALONE, SHARED = 70e-6, 110e-6


class Machine:
    """A clock, and who else is on the core. others: from when to when, in seconds of the clock."""

    def __init__(self, others=()):
        self.now, self.others, self.is_slow = 0.0, others, lambda machine: False

    def perf_counter(self):
        return self.now

    def is_shared(self):
        return any(begin <= self.now < end for begin, end in self.others)

    def reference_loop(self):
        seconds = SHARED if self.is_shared() or self.is_slow(self) else ALONE
        self.now += seconds
        return seconds

    def sample(self, seconds=1e-3):
        """Return a sample that takes longer beside others."""

        def take():
            taken = seconds * (1.6 if self.is_shared() else 1.0)
            self.now += taken
            return taken

        return take


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(disturbance.time, "perf_counter", made.perf_counter)
    return made


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


@pytest.fixture
def monitor(machine):
    made = ContentionMonitor(machine.reference_loop)
    made.begin("op")
    return made


def taken(monitor, sample, name="op"):
    return monitor.undisturbed(name, lambda: sample, lambda staged: staged())


def test_a_core_of_its_own_costs_no_time(machine, monitor):
    begun = machine.now
    assert [taken(monitor, machine.sample()) for _ in range(10)] == [1e-3] * 10
    assert machine.now - begun == pytest.approx(10 * (1e-3 + 2 * ALONE))
    assert monitor.disturbance() is None


def test_samples_wait_until_the_others_are_gone(machine, monitor):
    machine.others = [(machine.now, machine.now + 0.5)]
    assert taken(monitor, machine.sample()) == 1e-3
    assert monitor.lost == pytest.approx(0.5, abs=1e-3)
    assert monitor.disturbance() is None


def test_a_sample_beside_others_is_taken_again(machine, monitor):
    machine.others = [(machine.now + 0.5e-3, machine.now + 2e-3)]
    tries = []
    sample = machine.sample()
    assert taken(monitor, lambda: tries.append(sample()) or tries[-1]) == 1e-3
    assert len(tries) == 2
    assert monitor.disturbance() is None


def test_others_that_stay_are_named_and_nothing_is_lost(machine, monitor):
    machine.others = [(machine.now, float("inf"))]
    begun = machine.now
    assert [taken(monitor, machine.sample()) for _ in range(10)] == [1.6e-3] * 10
    assert 4.0 < machine.now - begun < 4.1
    assert monitor.disturbance() == (
        "the core is shared, or slower than it was: beside 100% of the samples a fixed loop took more than 1.25 times its time"
    )


def test_a_quarter_of_the_samples_may_be_shared(machine, monitor):
    for _ in range(9):
        taken(monitor, machine.sample())
    machine.others = [(machine.now, float("inf"))]
    for _ in range(3):
        taken(monitor, machine.sample())
    assert monitor.disturbance() is None
    taken(monitor, machine.sample())
    assert "beside 31% of the samples" in monitor.disturbance()


def test_what_others_did_to_an_anchor_is_no_disturbance_of_the_kernel(machine, monitor):
    taken(monitor, machine.sample())
    machine.others = [(machine.now, float("inf"))]
    for _ in range(5):
        taken(monitor, machine.sample(), "compute")
    assert monitor.disturbance() is None


def test_where_waiting_was_in_vain_the_next_measurement_waits_half_as_long(machine, monitor):
    machine.others = [(machine.now, float("inf"))]
    waited = []
    for _ in range(7):
        taken(monitor, machine.sample())
        waited.append(monitor.lost)
        monitor.begin("op")
    assert waited == pytest.approx([4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.1], abs=0.01)
    machine.others = []
    taken(monitor, machine.sample())
    monitor.begin("op")
    machine.others = [(machine.now, machine.now + 3.0)]
    assert taken(monitor, machine.sample()) == 1e-3


def test_a_kernel_that_slows_the_core_itself_is_timed_all_the_same(machine, monitor):
    """Its threads spin for a millisecond after each call, say."""
    ended = []
    machine.is_slow = lambda machine: bool(ended) and machine.now - ended[-1] < 1e-3
    sample = machine.sample()

    def spinning():
        seconds = sample()
        ended.append(machine.now)
        return seconds

    assert [taken(monitor, spinning) for _ in range(30)] == [1e-3] * 30
    assert len(ended) < 30 + 40
    assert monitor.disturbance() is None


def test_a_core_that_turns_out_faster_later_was_shared_until_then(machine):
    machine.others = [(0.0, 0.5)]
    monitor = ContentionMonitor(machine.reference_loop)
    monitor.begin("op")
    while machine.now < 0.4:
        assert taken(monitor, machine.sample()) == 1.6e-3
    assert monitor.disturbance() is None
    machine.others = []
    taken(monitor, machine.sample())
    assert "the core is shared" in monitor.disturbance()


def test_a_clock_that_falls_for_good_is_no_disturbance_after_some_measurements(machine, monitor):
    machine.others = [(machine.now, float("inf"))]
    disturbed = []
    for _ in range(12):
        taken(monitor, machine.sample())
        disturbed.append(monitor.disturbance() is not None)
        monitor.begin("op")
    assert disturbed[0]
    assert not disturbed[-1]


def test_what_is_staged_does_not_count_and_comes_before_the_look(machine, monitor):
    order = []
    machine.is_slow = lambda machine: order.append("look") or False

    def stage():
        machine.now += 1.0
        order.append("stage")

    monitor.undisturbed("op", stage, lambda staged: order.append("sample") or 1e-3)
    assert order == ["stage", "look", "sample", "look"]
    assert monitor.lost < 1e-3


def test_several_threads_are_not_judged(machine, monitor):
    machine.others = [(machine.now, float("inf"))]
    with threads(2):
        monitor.begin("op")
    assert [taken(monitor, machine.sample()) for _ in range(5)] == [1.6e-3] * 5
    assert monitor.disturbance() is None


def test_a_long_sample_is_not_judged_by_what_came_before_and_after(machine, monitor):
    machine.others = [(machine.now + 0.01, float("inf"))]
    begun = machine.now
    for _ in range(5):
        taken(monitor, machine.sample(0.1))
    assert machine.now - begun < 1.0
    assert monitor.disturbance() is None


def test_a_measurement_beside_others_is_disturbed(monkeypatch):
    """By the real clock: the loop takes twice as long from some time on."""
    watch = Stopwatch(torch.device("cpu"))
    monkeypatch.setattr(watch.monitor._contention, "_reference_loop", lambda: 2 * disturbance.time_reference_loop() + 1e-3)
    monkeypatch.setattr(disturbance, "_MOST_LOST_SECONDS", 0.05)
    work = timed(Registry()["sdpa"], Workload(64, heads=2, head_dim=32), torch.device("cpu"), "forward")
    assert "the core is shared" in watch.measure(work, "tiny", "sdpa").disturbances[-1]
