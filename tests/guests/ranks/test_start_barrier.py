"""Ranks begin together: none before the last one has come, however late that is, and start after start."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pytest_attn.guests.ranks import rank_server
from pytest_attn.guests.ranks.rank_server import StartBarrier


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_none_begins_before_the_last_has_come(tmp_path, ranks):
    def run(rank):
        own, seen = StartBarrier(tmp_path / "starts", rank, ranks), []
        for turn in range(20):
            if turn % ranks == rank:
                time.sleep(0.002)
            arrived = time.perf_counter()
            late = own.wait()
            seen.append((arrived, time.perf_counter(), late))
        return seen

    with ThreadPoolExecutor(ranks) as threads:
        turns = list(zip(*threads.map(run, range(ranks)), strict=True))
    for turn in turns:
        last = max(arrived for arrived, _, _ in turn)
        assert all(began >= last for _, began, _ in turn)
        assert all(late >= 0 for _, _, late in turn)


def test_the_last_of_the_moments_counts(tmp_path):
    own, other = (StartBarrier(tmp_path / "starts", rank, 2) for rank in range(2))
    moment = time.perf_counter_ns() + 5_000_000
    other._moments[2 + 1] = moment  # in the second bank, which the first start is in
    own.wait()
    assert time.perf_counter_ns() >= moment


def test_a_rank_that_begins_late_says_by_how_much(tmp_path, monkeypatch):
    class Clock:
        now = 0

        def perf_counter_ns(self):
            self.now += 50_000
            return self.now

    monkeypatch.setattr(rank_server, "time", Clock())
    assert StartBarrier(tmp_path / "starts", 0, 1).wait() == pytest.approx(30e-6)
