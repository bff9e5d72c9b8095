"""What ranks compute while they are timed: a kernel that is right has a time, and one that only seems to compute has none."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from caches import PagedRing
from exchanges import Threads
from judging import attention, spec_of, with_gradients
from rings import Problem, Ring

from pytest_attn import Pages, Workload
from pytest_attn.guests.ranks.controller_timing import RankedStopwatch, RankedWork
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.guests.ranks.worker_timing import RankTiming
from pytest_attn.latency.disturbance import WaitingMonitor
from pytest_attn.latency.work import StaleError

CPU = torch.device("cpu")
FULL = Workload(48, heads=2, head_dim=32, dtype="float32")


class Counted:
    """The seconds in collectives, of which there are none here."""

    is_late, seconds = False, 0.0

    def watching(self, name, peer, plain):
        return plain


class Place:
    """A rank that is a thread."""

    device, group = CPU, None

    def __init__(self, rank, barrier):
        self.rank, self.barrier, self.collectives = rank, barrier, Counted()


class Starts:
    """Where ranks meet before a sample."""

    def __init__(self, ranks):
        self._barrier = threading.Barrier(ranks, timeout=60)

    def wait(self):
        self._barrier.wait()
        return 0.0


class Team:
    """Ranks that are threads, and make a step together."""

    kind = "cpu"

    def __init__(self, kernel_of, spec, sharding):
        self.ranks, starts, exchanges = sharding.ranks, Starts(sharding.ranks), Threads(sharding.ranks)
        self._timings = [
            RankTiming(kernel_of(exchanges.of(rank)), spec, sharding, Place(rank, starts)) for rank in range(self.ranks)
        ]
        self._threads = ThreadPoolExecutor(self.ranks)

    def step(self, what, **given):
        made = [self._threads.submit(one.step, what, given) for one in self._timings]
        for rank, one in enumerate(made):
            if isinstance(one.exception(), StaleError):
                raise StaleError(f"rank {rank}: {one.exception()}")
        return [one.result() for one in made]


@pytest.fixture
def measured(monkeypatch):
    """Time a kernel over ranks: `kernel_of` an exchange."""
    monkeypatch.setattr(WaitingMonitor, "disturbance", lambda self: None)

    def run(kernel_of, workload=FULL, direction="forward", shard="contiguous", ranks=2, **options):
        spec = spec_of(workload, backward=direction != "forward", **options)
        team = Team(kernel_of, spec, Sharding(workload, shard, ranks))
        team.step("begin", direction=direction, cold=False, threads=1, seed=1)
        stopwatch = RankedStopwatch(team, CPU, cold=False, threads=1, ramp=False)
        return stopwatch.measure(RankedWork(direction, team), workload.id, "kernel", seconds=0.05)

    return run


def gathered(exchange, *tensors):
    return [torch.cat(exchange.all_gather(tensor), 2) for tensor in tensors]


def simple(exchange):
    return lambda q, k, v: attention(q, *gathered(exchange, k, v))


def ring(workload, shard="contiguous"):
    return lambda exchange: Ring(exchange, Problem.of(Sharding(workload, shard, 2)))


# -- what computes -----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(12)
@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize(
    "workload",
    [
        Workload(33, heads=4, kv_heads=2, head_dim=32, mask="causal"),
        Workload(q_lens=(20, 9, 7), heads=4, kv_heads=1, head_dim=32, mask="causal"),
        Workload(24, 48, batch=2, heads=4, head_dim=32, mask="causal-bottom-right", kv_lens=(40, 48)),
        Workload(32, heads=2, head_dim=32, bias="hqk", softcap=20.0),
    ],
    ids=lambda workload: workload.id,
)
def test_a_ring_is_timed(measured, workload, direction):
    shard = "contiguous" if workload.kv_lens else "head-tail"
    assert measured(ring(workload, shard), workload, direction, shard).p50 > 0


def test_rows_without_keys_may_hold_anything(measured):
    workload = Workload(24, 12, heads=2, head_dim=32, mask="causal-bottom-right", dtype="float32")

    def kernel_of(exchange):
        kernel = ring(workload)(exchange)
        rows = kernel.problem.mask[0, 0, kernel.rows()].any(-1)
        return lambda q, k, v: kernel(q, k, v).masked_fill(~rows[:, None], 7.0)

    assert measured(kernel_of, workload, empty_rows="any").p50 > 0
    with pytest.raises(StaleError):
        measured(kernel_of, workload)


@pytest.mark.parametrize("shares_heads", [False, True])
def test_keys_may_lie_in_pages(measured, shares_heads):
    workload = Workload(1, 70, batch=3, heads=4, kv_heads=2, head_dim=32, kv_pages=Pages(8), kv_lens=(70, 33, 5))

    def kernel_of(exchange):
        return PagedRing(exchange, Problem(Sharding(workload, "striped", 2), None, None), shares_heads=shares_heads)

    assert measured(kernel_of, workload, shard="striped").p50 > 0


def test_each_rank_may_return_all_rows(measured):
    def kernel_of(exchange):
        return lambda q, k, v: attention(*gathered(exchange, q, k, v))

    assert measured(kernel_of).p50 > 0


def test_rows_may_come_before_heads(measured):
    def kernel_of(exchange):
        kernel = simple(exchange)
        return lambda q, k, v: kernel(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    assert measured(kernel_of, layout="bshd").p50 > 0


# -- what does not: ways to know the data that are the same without ranks are in tests/latency/test_cheats.py --------------


def refused(measured, kernel_of, direction="forward", words="", workload=FULL):
    with pytest.raises(StaleError, match=rf"rank 1: .*{words}.*not that of the data it was given"):
        measured(kernel_of, workload, direction)


def on_rank_1(cheat):
    """A kernel that takes part in each exchange; on rank 1 it returns what `cheat` does, which may compute."""

    def kernel_of(exchange):
        kernel = simple(exchange) if exchange.rank == 0 else None

        def cheating(q, k, v):
            k, v = gathered(exchange, k, v)
            return cheat(lambda: attention(q, k, v), q, k, v)

        return kernel or cheating

    return kernel_of


def test_wrong_whenever_it_is_timed(measured):
    refused(measured, on_rank_1(lambda compute, q, k, v: v[:, :, : q.shape[2]] * 0.5))


@pytest.mark.parametrize("key", [lambda q: q.data_ptr(), lambda q: q.shape], ids=["address", "shape"])
def test_kept_by_what_does_not_tell_data_apart(measured, key):
    kept = {}

    def cheat(compute, q, k, v):
        if key(q) not in kept:
            kept[key(q)] = compute()
        return kept[key(q)]

    refused(measured, on_rank_1(cheat))


def test_idle_after_seven_calls(measured):
    kept = []

    def cheat(compute, q, k, v):
        if len(kept) < 7:
            kept.append(compute())
        return kept[-1]

    refused(measured, on_rank_1(cheat), words="timed, without gradients")


def test_right_rows_of_another_rank(measured):
    def kernel_of(exchange):
        return lambda q, k, v: attention(exchange.shift(q), *gathered(exchange, k, v))

    with pytest.raises(StaleError, match="not that of the data it was given"):
        measured(kernel_of)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("at", range(3), ids=["dq", "dk", "dv"])
def test_gradients_of_another_call(measured, at):
    def kernel_of(exchange):
        kernel, kept = ring(FULL)(exchange), []

        def keeping(gradients, dout):
            found = list(gradients(dout))
            kept.extend([found[at]] if len(kept) < 7 else [])
            found[at] = kept[-1] if exchange.rank else found[at]
            return tuple(found)

        return with_gradients(keeping, kernel)

    refused(measured, kernel_of, "backward", words="timed")
