"""What a time over ranks is, before anything is timed."""

from types import SimpleNamespace

import pytest
import torch

from pytest_attn import Workload
from pytest_attn.cases.measurement import TimedOnRanks
from pytest_attn.workloads.sharding import Sharding


@pytest.mark.parametrize(
    ("device", "there", "reason"), [("cuda", 1, "2 ranks share 1 GPU"), ("cuda", 2, None), ("cpu", 1, None)]
)
def test_ranks_that_share_a_gpu_are_not_timed(device, there, reason):
    machines = SimpleNamespace(machine=lambda name: SimpleNamespace(device_count=there))
    place = TimedOnRanks(None, Sharding(Workload(64, heads=2), "contiguous", 2))
    assert place.untimed_because(torch.device(device), SimpleNamespace(machines=machines)) == reason
