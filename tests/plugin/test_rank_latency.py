"""attn.measure over ranks in real processes over gloo: times are what a story says, all else happens.

Ranks load the story's conftest, too: each takes from TIMES how long its calls are, and how much of that is in collectives.
"""

import re

import pytest
import torch
from fakes.timed import CLOCK

from pytest_attn.guests.ranks import communication, ranked_executor, worker_timing
from pytest_attn.guests.ranks.pool import PoolRegistry
from pytest_attn.latency.disturbance import WaitingMonitor
from pytest_attn.reports.records import read_records

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")

KERNELS = """
import os
import pytest, torch
import torch.distributed as dist
import torch.nn.functional as F
from pytest_attn import Workload

W = Workload(32, heads=2, head_dim=32, name="tiny")

def gathered(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group)
    return torch.cat(parts, 2)

def attention(q, k, v, group):
    return F.scaled_dot_product_attention(q, gathered(k, group), gathered(v, group))
"""
MINE = """
@pytest.mark.attention(W, device="cpu", ranks=(2, 4))
def test_mine(attn):
    latency = attn.measure(lambda q, k, v: attention(q, k, v, attn.group), name="mine")
    assert latency.ranks is None or latency.ranks["number"] == attn.ranks
"""
#: the file "times": microseconds of a call, then for each rank how many of them it is outside collectives
RANK_CLOCK = """
import os, pathlib
from pytest_attn.latency.disturbance import WaitingMonitor
from pytest_attn.guests.ranks.worker_timing import HostClock
from pytest_attn.guests.ranks.communication import RankTimes

TIMES = pathlib.Path(__file__).parent / "times"

def make(self, device, starts, collectives):
    HostClock.made = (getattr(HostClock, "made", 0) + 1) % 7  # each measurement is a little off, as times are

def sample(self, item):
    call = item.stage()
    item.keep(call, call())
    if item.name != "op":
        return RankTimes(1e-3, 0.0, 0.0)
    whole, *own = map(float, TIMES.read_text().split())
    inside = whole - own[int(os.environ["RANK"])]
    return RankTimes(whole * 1e-6 * (1 + HostClock.made / 1e4), inside * 1e-6, 2e-6)

HostClock.__init__, HostClock.sample = make, sample
WaitingMonitor.disturbance = lambda self: None
"""


@pytest.fixture
def story(pytester, monkeypatch, clock_of_a_conftest):
    """Run a story of ranks, whose clock is that of its conftest; all its runs, and new processes, have the same pools."""
    for owner, name in (
        (worker_timing.HostClock, "__init__"),
        (worker_timing.HostClock, "sample"),
        (WaitingMonitor, "disturbance"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    pools = []

    def of(config):
        pools[:] = pools or [PoolRegistry(config)]
        return pools[0]

    monkeypatch.setattr(PoolRegistry, "of", of)
    pytester.makeconftest(CLOCK[: CLOCK.index("def measure")] + RANK_CLOCK)

    def run(*args, test=MINE, times="100 60 60"):
        (pytester.path / "times").write_text(times)
        pytester.makepyfile(test_ranks=KERNELS + test)
        return pytester.runpytest("-p", "no:cacheprovider", "--attn-rank-timeout=60", *args)

    yield run
    for one in pools:
        one.close()


def latencies(path):
    records = read_records(path)
    return [record["latency"] for record in records if record["question"] == "latency"]


@pytest.mark.slow("starts processes")
def test_slower_ranks_fail_and_baselines_are_of_so_many_ranks_and_their_links(story, pytester, monkeypatch):
    recorded = story("test_ranks.py::test_mine[tiny-ranks2]", "--attn-update-baselines=first recording")
    recorded.assert_outcomes(passed=1)
    recorded.stdout.fnmatch_lines(["baselines: 1 of 1 cases recorded in *"])
    (file,) = (pytester.path / "baselines").glob("*.json")
    assert "| 2 ranks, contiguous, CPU" in file.read_text()

    story("test_ranks.py::test_mine[tiny-ranks2]").stdout.fnmatch_lines(["latency: 1 as fast as recorded"])

    slower = story("test_ranks.py::test_mine[tiny-ranks2]", "--attn-output=run.jsonl", times="150 60 110")
    slower.assert_outcomes(failed=1)
    (latency,) = latencies(pytester.path / "run.jsonl")
    assert latency["ranks"]["communication_by"] == "wrapped functions of torch.distributed"
    assert re.fullmatch(r"tiny \| mine of .* \| forward \| warm \| 1 thread \| 2 ranks, contiguous, CPU", latency["key"])
    slower.stdout.re_match_lines(
        [
            r"E +AssertionError: regressed: mine on tiny, forward: p50 0\.15\d* ms, recorded 0\.1\d* ms \(\+\d\d.*",
            r"E +ranks +2 ranks \(contiguous, CPU\); outside collectives rank 1 took 0\.11\d* ms, rank 0 60\S* us; .*",
        ],
        consecutive=False,
    )

    others = story("test_ranks.py::test_mine[tiny-ranks4]", times="150 60 60 60 60")
    others.assert_outcomes(passed=1)
    others.stdout.fnmatch_lines(
        ["ranks * mine on tiny: 4 ranks (contiguous, CPU); outside collectives each took * in collectives *; begun within *"]
    )
    others.stdout.fnmatch_lines(["no baseline * none recorded in *"])

    monkeypatch.setattr(ranked_executor, "topology_of", lambda kind, ranks: communication.PCIE)
    linked = story("test_ranks.py::test_mine[tiny-ranks2]", times="150 60 110")
    linked.assert_outcomes(passed=1)
    linked.stdout.fnmatch_lines(["no baseline * recorded * 2 ranks, contiguous, CPU, this is * 2 ranks, contiguous, PCIe"])
