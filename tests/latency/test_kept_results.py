"""A kernel that keeps results of data that it knows is told from one that other work interrupts, by a clock of the tests."""

import pytest
import torch
from judging import SMALL, attention, timed

from pytest_attn import Workload
from pytest_attn.latency import work as timed_work
from pytest_attn.latency.protocol import stopwatch_of
from pytest_attn.latency.work import StaleError, called, look_for_kept_results

CPU = torch.device("cpu")
#: of a call that finds its result, and of one that must compute it
FOUND, COMPUTED = 1e-5, 1e-3
LATE = 3e-2


class Machine:
    """Calls take what `walls` says, on the same and on changed data in turn; `worked` and `waited` are what is counted."""

    def __init__(self, monkeypatch, walls, worked=None, waited=0.0):
        walls = list(walls)
        self.walls, self.worked = iter(walls), iter(walls if worked is None else worked)
        self.cpu = self.wait = 0.0
        self.calls, self.waits = 0, waited
        monkeypatch.setattr(timed_work, "called", self.called)
        monkeypatch.setattr(timed_work, "process_waited", lambda: self.wait)
        monkeypatch.setattr(timed_work.time, "process_time", lambda: self.cpu)

    def called(self, work):
        call = called(work)
        wall = next(self.walls)
        self.cpu += next(self.worked)
        self.wait += self.waits * wall
        self.calls += 1
        return call._replace(done=wall)


@pytest.fixture
def work():
    return timed(attention, SMALL, CPU)


def test_a_kernel_that_takes_as_long_on_changed_data_keeps_nothing(monkeypatch, work):
    machine = Machine(monkeypatch, [COMPUTED] * 2)
    assert look_for_kept_results(work) == ""
    assert machine.calls == 2


def test_one_pair_of_calls_that_is_alike_is_enough(monkeypatch, work):
    machine = Machine(monkeypatch, [FOUND, COMPUTED] * 4 + [COMPUTED, COMPUTED])
    assert look_for_kept_results(work) == ""
    assert machine.calls == 10


def test_a_kernel_that_takes_longer_whenever_its_data_changed_is_refused(monkeypatch, work):
    Machine(monkeypatch, [FOUND, COMPUTED] * 5)
    with pytest.raises(StaleError, match=r"^takes 10 us on the data of the call before, and 1e\+03 us on changed"):
        look_for_kept_results(work)


def test_calls_that_were_interrupted_but_worked_no_longer_keep_nothing(monkeypatch, work):
    """Other work had the cores: the clock on the wall went on, that of this process did not."""
    machine = Machine(monkeypatch, [COMPUTED, LATE] * 5, worked=[COMPUTED] * 10)
    assert look_for_kept_results(work) == ""
    assert machine.calls == 2


def test_while_threads_wait_for_cores_nothing_is_decided(monkeypatch, work):
    Machine(monkeypatch, [FOUND, COMPUTED] * 5, waited=0.2)
    assert look_for_kept_results(work) == (
        "whether its results are cached is unknown, because other processes compute: "
        "it takes 10 us on the data of the call before, and 1e+03 us on changed data"
    )


def test_what_is_not_known_is_a_disturbance_of_the_measurement(monkeypatch):
    monkeypatch.setattr("pytest_attn.latency.timer.look_for_kept_results", lambda work: "it may keep its results")
    latency = stopwatch_of(CPU).measure(timed(attention, SMALL, CPU), SMALL.id, "kernel", seconds=0.05)
    assert "it may keep its results" in latency.disturbances


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_timed_where_it_computes():
    device, workload, results = torch.device("cuda", 0), Workload(256, heads=8, head_dim=64, dtype="float32"), {}

    def keeping(q, k, v):
        key = tuple((t.data_ptr(), t._version) for t in (q, k, v))
        if key not in results:
            results[key] = attention(q, k, v)
        return results[key]

    stopwatch = stopwatch_of(device)
    plain, kept_p50 = (
        stopwatch.measure(timed(fn, workload, device), "w", "s", seconds=0.2).p50 for fn in (attention, keeping)
    )
    assert kept_p50 > 0.8 * plain


@pytest.mark.parametrize("is_changed_alone", [False, True], ids=["honest", "keeps"])
def test_a_kernel_that_really_keeps_the_results_of_data_that_it_knows_is_not_praised(is_changed_alone):
    """By the real clock, on a machine that may be busy: then it is asked until it is known."""
    workload, kept = Workload(256, heads=8, head_dim=64, dtype="float32"), {}

    def kernel(q, k, v):
        key = tuple((t.data_ptr(), t._version) for t in (q, k, v))
        if key not in kept or not is_changed_alone:
            kept[key] = attention(q, k, v)
        return kept[key]

    work = timed(kernel, workload, CPU)
    with work.context():
        work.stage()()
        for _ in range(100 if is_changed_alone else 5):
            try:
                found = look_for_kept_results(work)
            except StaleError as error:
                found = str(error)
            if found:
                break
    assert ("on the data of the call before" in found) == is_changed_alone
