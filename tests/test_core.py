"""Whether other work shares the core that is timed, on a core of the tests whose clock goes as told."""

import pytest
import torch

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.latency import core as room
from pytest_attn.latency.core import Core
from pytest_attn.latency.protocol import Stopwatch, threads
from pytest_attn.latency.work import work_of

ALONE, SHARED = 70e-6, 110e-6


class Machine:
    """A clock, and who else is on the core. others: from when to when, in seconds of the clock."""

    def __init__(self, others=()):
        self.now, self.others, self.is_slow = 0.0, others, lambda machine: False

    def perf_counter(self):
        return self.now

    def is_shared(self):
        return any(begin <= self.now < end for begin, end in self.others)

    def pace(self):
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
    monkeypatch.setattr(room.time, "perf_counter", made.perf_counter)
    return made


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


def core_on(machine):
    core = Core(machine.pace)
    core.begin("op")
    return core


def taken(core, sample, name="op"):
    return core.undisturbed(name, lambda: sample, lambda staged: staged())


def test_a_core_of_its_own_costs_no_time(machine):
    core = core_on(machine)
    begun = machine.now
    assert [taken(core, machine.sample()) for _ in range(10)] == [1e-3] * 10
    assert machine.now - begun == pytest.approx(10 * (1e-3 + 2 * ALONE))
    assert core.disturbance() is None


def test_samples_wait_until_the_others_are_gone(machine):
    core = core_on(machine)
    machine.others = [(machine.now, machine.now + 0.5)]
    assert taken(core, machine.sample()) == 1e-3
    assert core.lost == pytest.approx(0.5, abs=1e-3)
    assert core.disturbance() is None


def test_a_sample_beside_others_is_taken_again(machine):
    core = core_on(machine)
    machine.others = [(machine.now + 0.5e-3, machine.now + 2e-3)]
    tries = []
    sample = machine.sample()
    assert taken(core, lambda: tries.append(sample()) or tries[-1]) == 1e-3
    assert len(tries) == 2
    assert core.disturbance() is None


def test_others_that_stay_are_named_and_nothing_is_lost(machine):
    core = core_on(machine)
    machine.others = [(machine.now, float("inf"))]
    begun = machine.now
    assert [taken(core, machine.sample()) for _ in range(10)] == [1.6e-3] * 10
    assert 4.0 < machine.now - begun < 4.1
    assert core.disturbance() == (
        "the core is shared, or slower than it was: beside 100% of the samples a fixed loop took more than 1.25 times its time"
    )


def test_a_quarter_of_the_samples_may_be_shared(machine):
    core = core_on(machine)
    for _ in range(9):
        taken(core, machine.sample())
    machine.others = [(machine.now, float("inf"))]
    for _ in range(3):
        taken(core, machine.sample())
    assert core.disturbance() is None
    taken(core, machine.sample())
    assert "beside 31% of the samples" in core.disturbance()


def test_what_others_did_to_an_anchor_is_no_disturbance_of_the_kernel(machine):
    core = core_on(machine)
    taken(core, machine.sample())
    machine.others = [(machine.now, float("inf"))]
    for _ in range(5):
        taken(core, machine.sample(), "compute")
    assert core.disturbance() is None


def test_where_waiting_was_in_vain_the_next_measurement_waits_half_as_long(machine):
    core = core_on(machine)
    machine.others = [(machine.now, float("inf"))]
    waited = []
    for _ in range(7):
        taken(core, machine.sample())
        waited.append(core.lost)
        core.begin("op")
    assert waited == pytest.approx([4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.1], abs=0.01)
    machine.others = []
    taken(core, machine.sample())
    core.begin("op")
    machine.others = [(machine.now, machine.now + 3.0)]
    assert taken(core, machine.sample()) == 1e-3


def test_a_kernel_that_slows_the_core_itself_is_timed_all_the_same(machine):
    """Its threads spin for a millisecond after each call, say."""
    core = core_on(machine)
    ended = []
    machine.is_slow = lambda machine: bool(ended) and machine.now - ended[-1] < 1e-3
    sample = machine.sample()

    def spinning():
        seconds = sample()
        ended.append(machine.now)
        return seconds

    assert [taken(core, spinning) for _ in range(30)] == [1e-3] * 30
    assert len(ended) < 30 + 40
    assert core.disturbance() is None


def test_short_moments_between_others_do_not_make_a_kernel_slow_by_itself(machine):
    """Each sample begins in one of them; only every thirtieth is long enough for it to end there."""
    core = core_on(machine)
    begun = machine.now
    machine.others = [(begun + 2e-3 * n + 0.5e-3, begun + 2e-3 * (n + 1)) for n in range(10_000) if n % 30]
    starts = []
    sample = machine.sample(0.45e-3)
    for _ in range(20):
        taken(core, lambda: starts.append(machine.now) or sample())
        assert round((starts[-1] - begun) // 2e-3) % 30 == 0
    assert len(starts) > 60
    assert core.disturbance() is None


def test_a_core_that_turns_out_faster_later_was_shared_until_then(machine):
    machine.others = [(0.0, 0.5)]
    core = core_on(machine)
    while machine.now < 0.4:
        assert taken(core, machine.sample()) == 1.6e-3
    assert core.disturbance() is None
    machine.others = []
    taken(core, machine.sample())
    assert "the core is shared" in core.disturbance()


def test_a_clock_that_falls_for_good_is_the_pace_after_some_measurements(machine):
    core = core_on(machine)
    machine.others = [(machine.now, float("inf"))]
    disturbed = []
    for _ in range(12):
        taken(core, machine.sample())
        disturbed.append(core.disturbance() is not None)
        core.begin("op")
    assert disturbed[0]
    assert not disturbed[-1]


def test_what_is_staged_does_not_count_and_comes_before_the_look(machine):
    core = core_on(machine)
    order = []
    machine.is_slow = lambda machine: order.append("look") or False

    def stage():
        machine.now += 1.0
        order.append("stage")

    core.undisturbed("op", stage, lambda staged: order.append("sample") or 1e-3)
    assert order == ["stage", "look", "sample", "look"]
    assert core.lost < 1e-3


def test_several_threads_are_not_judged(machine):
    core = core_on(machine)
    machine.others = [(machine.now, float("inf"))]
    with threads(2):
        core.begin("op")
    assert [taken(core, machine.sample()) for _ in range(5)] == [1.6e-3] * 5
    assert core.disturbance() is None


def test_a_long_sample_is_not_judged_by_what_came_before_and_after(machine):
    core = core_on(machine)
    machine.others = [(machine.now + 0.01, float("inf"))]
    begun = machine.now
    for _ in range(5):
        taken(core, machine.sample(0.1))
    assert machine.now - begun < 1.0
    assert core.disturbance() is None


def test_a_sample_is_not_long_for_having_been_shared(machine):
    core = core_on(machine)
    machine.others = [(machine.now, float("inf"))]
    for _ in range(5):
        assert taken(core, machine.sample(15e-3)) == 24e-3
    assert "the core is shared" in core.disturbance()


def test_one_sample_that_was_held_up_does_not_make_the_others_long(machine):
    core = core_on(machine)
    taken(core, machine.sample(0.1))
    taken(core, machine.sample())
    machine.others = [(machine.now, machine.now + 0.5)]
    assert taken(core, machine.sample()) == 1e-3


def test_a_measurement_beside_others_is_disturbed(monkeypatch):
    """By the real clock: the loop takes twice as long from some time on."""
    watch = Stopwatch(torch.device("cpu"))
    monkeypatch.setattr(watch.guard._core, "_pace", lambda: 2 * room.seconds_of_loop() + 1e-3)
    monkeypatch.setattr(room, "_PATIENCE", 0.05)
    work = work_of(Registry()["sdpa"], Workload(64, heads=2, head_dim=32), torch.device("cpu"), "forward")
    assert "the core is shared" in watch.measure(work, "tiny", "sdpa").disturbances[-1]


def test_the_pace_of_one_thread_is_an_anchor():
    work = work_of(Registry()["sdpa"], Workload(64, heads=2, head_dim=32), torch.device("cpu"), "forward")
    watch = Stopwatch(torch.device("cpu"))
    assert 0 < watch.measure(work, "tiny", "sdpa").anchors["pace"] < 1e-2
    with threads(2):
        assert "pace" not in watch.measure(work, "tiny", "sdpa").anchors
