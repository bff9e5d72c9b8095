"""What a time over ranks is, before anything is timed."""

from types import SimpleNamespace

import pytest
import torch

from pytest_attn import Workload
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.ranks.ranked_executor import RankedMeasurement
from pytest_attn.guests.ranks.sharding import Sharding


@pytest.mark.parametrize(
    ("device", "there", "reason"), [("cuda", 1, "2 ranks share 1 GPU"), ("cuda", 2, None), ("cpu", 1, None)]
)
def test_ranks_that_share_a_gpu_are_not_timed(device, there, reason):
    machines = SimpleNamespace(machine=lambda name: SimpleNamespace(device_count=there))
    workload = Workload(64, heads=2)
    facts = dict.fromkeys(("item", "subject", "direction", "comparison", "pool"))
    measurement = RankedMeasurement(
        **facts,
        session=SimpleNamespace(machines=machines),
        spec=CheckSpec(workload, torch.device(device)),
        sharding=Sharding(workload, "contiguous", 2),
    )
    assert measurement.untimed_because == reason
