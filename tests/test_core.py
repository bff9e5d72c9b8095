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


def test_a_core_of_its_own_costs_no_time(machine):
    core = core_on(machine)
    begun = machine.now
    assert [core.undisturbed("op", machine.sample()) for _ in range(10)] == [1e-3] * 10
    assert machine.now - begun == pytest.approx(10 * (1e-3 + 2 * ALONE))
    assert core.disturbance() is None


def test_samples_wait_until_the_others_are_gone(machine):
    core = core_on(machine)
    machine.others = [(machine.now, machine.now + 0.5)]
    assert core.undisturbed("op", machine.sample()) == 1e-3
    assert core.lost == pytest.approx(0.5, abs=1e-3)
    assert core.disturbance() is None


def test_a_sample_beside_others_is_taken_again(machine):
    core = core_on(machine)
    machine.others = [(machine.now + 0.5e-3, machine.now + 2e-3)]
    taken = []
    sample = machine.sample()
    assert core.undisturbed("op", lambda: taken.append(sample()) or taken[-1]) == 1e-3
    assert len(taken) == 2
    assert core.disturbance() is None


def test_others_that_stay_are_named_and_nothing_is_lost(machine):
    core = core_on(machine)
    machine.others = [(machine.now, float("inf"))]
    begun = machine.now
    assert [core.undisturbed("op", machine.sample()) for _ in range(10)] == [1.6e-3] * 10
    assert 4.0 < machine.now - begun < 4.1
    assert core.disturbance() == (
        "other work shares the core: beside 100% of the samples a fixed loop took more than 1.25 times its time"
    )


def test_a_quarter_of_the_samples_may_be_shared(machine):
    core = core_on(machine)
    for _ in range(9):
        core.undisturbed("op", machine.sample())
    machine.others = [(machine.now, float("inf"))]
    for _ in range(3):
        core.undisturbed("op", machine.sample())
    assert core.disturbance() is None
    core.undisturbed("op", machine.sample())
    assert "beside 31% of the samples" in core.disturbance()


def test_what_others_did_to_an_anchor_is_no_disturbance_of_the_kernel(machine):
    core = core_on(machine)
    core.undisturbed("op", machine.sample())
    machine.others = [(machine.now, float("inf"))]
    for _ in range(5):
        core.undisturbed("compute", machine.sample())
    assert core.disturbance() is None


def test_where_waiting_was_in_vain_the_next_measurement_waits_half_as_long(machine):
    core = core_on(machine)
    machine.others = [(machine.now, float("inf"))]
    waited = []
    for _ in range(7):
        core.undisturbed("op", machine.sample())
        waited.append(core.lost)
        core.begin("op")
    assert waited == pytest.approx([4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.1], abs=0.01)
    machine.others = []
    core.undisturbed("op", machine.sample())
    core.begin("op")
    machine.others = [(machine.now, machine.now + 3.0)]
    assert core.undisturbed("op", machine.sample()) == 1e-3


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

    assert [core.undisturbed("op", spinning) for _ in range(30)] == [1e-3] * 30
    assert len(ended) < 30 + 40
    assert core.disturbance() is None


def test_short_moments_between_others_do_not_make_a_kernel_slow_by_itself(machine):
    core = core_on(machine)
    begun = machine.now
    machine.others = [(begun + 2e-3 * n + 0.5e-3, begun + 2e-3 * (n + 1)) for n in range(10_000) if n % 30]
    assert [core.undisturbed("op", machine.sample(0.4e-3)) for _ in range(6)] == [0.4e-3] * 6


def test_several_threads_are_not_judged(machine):
    core = core_on(machine)
    machine.others = [(machine.now, float("inf"))]
    with threads(2):
        core.begin("op")
    assert [core.undisturbed("op", machine.sample()) for _ in range(5)] == [1.6e-3] * 5
    assert core.disturbance() is None


def test_a_long_sample_is_not_judged_by_what_came_before_and_after(machine):
    core = core_on(machine)
    machine.others = [(machine.now + 0.01, float("inf"))]
    begun = machine.now
    for _ in range(5):
        core.undisturbed("op", machine.sample(0.1))
    assert machine.now - begun < 1.0
    assert core.disturbance() is None


def test_one_sample_that_was_held_up_does_not_make_the_others_long(machine):
    core = core_on(machine)
    core.undisturbed("op", machine.sample(0.1))
    core.undisturbed("op", machine.sample())
    machine.others = [(machine.now, machine.now + 0.5)]
    assert core.undisturbed("op", machine.sample()) == 1e-3


def test_a_measurement_beside_others_is_disturbed(monkeypatch):
    """By the real clock: the loop takes twice as long from some time on."""
    watch = Stopwatch(torch.device("cpu"))
    monkeypatch.setattr(watch.guard._core, "_pace", lambda: 2 * room.seconds_of_loop() + 1e-3)
    monkeypatch.setattr(room, "_PATIENCE", 0.05)
    work = work_of(Registry()["sdpa"], Workload(64, heads=2, head_dim=32), torch.device("cpu"), "forward")
    assert "other work shares the core" in watch.measure(work, "tiny", "sdpa").disturbances[-1]
