"""What honest arithmetic of another order does to a value, emulated."""

import pytest
import torch

from pytest_attn.models.moving import moving

STEP = 2.0**-24  # between float16's numbers below its smallest normal one, 2^-14


@pytest.mark.parametrize("size", [0.7, 2.0**-15, 3 * STEP])
def test_results_move_by_one_step_of_their_dtype_and_as_often_at_any_size(size):
    x = torch.full((6000,), size, dtype=torch.float16)
    above = torch.nextafter(x[:1], torch.ones(1, dtype=torch.float16)) - x[:1]

    with moving(0):
        moved = x + torch.zeros_like(x)

    steps = (moved - x).abs() / above
    assert set(steps.tolist()) == {0.0, 1.0}
    assert 0.1 < steps.mean().item() < 0.25


def test_what_is_zero_stays_zero_and_what_is_moved_only_stays_as_it_is():
    x = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float16)

    with moving(0):
        assert (torch.zeros(1000, dtype=torch.float16) * 3 == 0).all()
        assert (x.repeat(300).clone() == x.repeat(300)).all()
