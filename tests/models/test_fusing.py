"""A step with no rounding to half precision between its operators."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_attn.models.fusing import fused


def chain(x):
    return ((x * 3).sin() * 7).exp()


def test_operators_keep_what_rounding_would_lose():
    x = torch.linspace(0, 1, 1000).bfloat16()

    with fused():
        found = chain(x)

    assert found.dtype == torch.float32
    torch.testing.assert_close(found, chain(x.float()))
    assert (chain(x).float() - found).norm() > 0.001 * found.norm()


def test_functions_that_refuse_mixed_dtypes_are_given_one():
    conv, x = nn.Conv1d(4, 4, 3, dtype=torch.float16), torch.randn(1, 4, 9, dtype=torch.float16)

    with fused():
        found = conv(x * 3)

    torch.testing.assert_close(found, F.conv1d(x.float() * 3, conv.weight.float(), conv.bias.float()))


def test_parameters_get_gradients_of_their_own_dtype():
    linear, x = nn.Linear(8, 8, dtype=torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)

    with fused():
        linear(x * 0.3).square().sum().backward()
    expected = torch.autograd.grad(
        F.linear(x.float() * 0.3, linear.weight.float(), linear.bias.float()).square().sum(), linear.weight
    )

    assert torch.equal(linear.weight.grad, expected[0])


def test_what_is_written_in_place_is_written():
    cache, x = torch.zeros(4, 8, dtype=torch.bfloat16), torch.randn(2, 8, dtype=torch.bfloat16)

    with fused():
        cache[:, 2:][:2] = (x * 2)[:, 2:]
        cache.index_add_(0, torch.tensor([3]), (x * 2)[:1])

    assert torch.equal(cache[:2, 2:], (x * 2)[:, 2:])
    assert torch.equal(cache[3], x[0] * 2)
    assert cache.dtype == torch.bfloat16
