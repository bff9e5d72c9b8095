"""What a run with other roundings than its own does to values: another order of arithmetic, or none between operators."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_attn.guests.models.compiled import emulate_fusion, perturb_rounding

STEP = 2.0**-24  # between float16's numbers below its smallest normal one, 2^-14


@pytest.mark.parametrize("size", [0.7, 2.0**-15, 3 * STEP])
def test_results_move_by_one_step_of_their_dtype_and_as_often_at_any_size(size):
    x = torch.full((6000,), size, dtype=torch.float16)
    above = torch.nextafter(x[:1], torch.ones(1, dtype=torch.float16)) - x[:1]

    with perturb_rounding(0):
        moved = x + torch.zeros_like(x)

    steps = (moved - x).abs() / above
    assert set(steps.tolist()) == {0.0, 1.0}
    assert 0.1 < steps.mean().item() < 0.25


def test_what_is_zero_stays_zero_and_what_is_moved_only_stays_as_it_is():
    x = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float16)

    with perturb_rounding(0):
        assert (torch.zeros(1000, dtype=torch.float16) * 3 == 0).all()
        assert (x.repeat(300).clone() == x.repeat(300)).all()


# -- fused -------------------------------------------------------------------------------------------------------------------


def chain(x):
    return ((x * 3).sin() * 7).exp()


def test_operators_keep_what_rounding_would_lose():
    x = torch.linspace(0, 1, 1000).bfloat16()

    with emulate_fusion():
        found = chain(x)

    assert found.dtype == torch.float32
    torch.testing.assert_close(found, chain(x.float()))
    assert (chain(x).float() - found).norm() > 0.001 * found.norm()


def test_functions_that_refuse_mixed_dtypes_are_given_one():
    conv, x = nn.Conv1d(4, 4, 3, dtype=torch.float16), torch.randn(1, 4, 9, dtype=torch.float16)

    with emulate_fusion():
        found = conv(x * 3)

    torch.testing.assert_close(found, F.conv1d(x.float() * 3, conv.weight.float(), conv.bias.float()))


def test_parameters_get_gradients_of_their_own_dtype():
    linear, x = nn.Linear(8, 8, dtype=torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)

    with emulate_fusion():
        linear(x * 0.3).square().sum().backward()
    expected = torch.autograd.grad(
        F.linear(x.float() * 0.3, linear.weight.float(), linear.bias.float()).square().sum(), linear.weight
    )

    assert torch.equal(linear.weight.grad, expected[0])


def test_what_is_written_in_place_is_written():
    cache, x = torch.zeros(4, 8, dtype=torch.bfloat16), torch.randn(2, 8, dtype=torch.bfloat16)

    with emulate_fusion():
        cache[:, 2:][:2] = (x * 2)[:, 2:]
        cache.index_add_(0, torch.tensor([3]), (x * 2)[:1])

    assert torch.equal(cache[:2, 2:], (x * 2)[:, 2:])
    assert torch.equal(cache[3], x[0] * 2)
    assert cache.dtype == torch.bfloat16
