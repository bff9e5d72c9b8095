"""Exact attention in a model, how far a whole model is from that, and runs with other roundings than its own."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import HONEST, case_of, causal, stack
from torch import nn

from pytest_attn import Document, Workload, check_model
from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness.reference import compute_reference, heads_first
from pytest_attn.guests.models.check_model import judge_model
from pytest_attn.guests.models.compiled import emulate_fusion, perturb_rounding
from pytest_attn.guests.models.exact_attention import Rounder, exact_attention, on_grid
from pytest_attn.workloads.inputs import draw_inputs

STEP = 2.0**-24  # between float16's numbers below its smallest normal one, 2^-14
WORKLOADS = [
    Workload(70, 90, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="float32", mask="causal-bottom-right", softcap=5.0),
    Workload(40, heads=4, kv_heads=2, head_dim=16, dtype="float32", mask=Document((10, 30)), bias="hqk", sinks=True),
    Workload(q_lens=(5, 40), heads=4, kv_heads=2, head_dim=16, dtype="float32", mask="causal"),
    Workload(30, batch=2, kv_lens=(30, 11), heads=2, head_dim=16, dtype="float32", alibi=True),
]


def leaves(inputs):
    names = [n for n in ("q", "k", "v", "bias", "sinks") if getattr(inputs, n) is not None]
    return dataclasses.replace(inputs, **{n: getattr(inputs, n).clone().requires_grad_() for n in names})


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.id)
def test_it_is_exact_forward_and_backward(workload):
    inputs = leaves(draw_inputs(workload))
    parameters = tuple(name for name in ("bias", "sinks") if getattr(inputs, name) is not None)
    expected = compute_reference(inputs, precision_named("flash"), backward=True, parameters=parameters).tensors

    out = exact_attention(inputs)
    out.backward(inputs.dout)

    for name in parameters:
        grad = getattr(inputs, name).grad.double()
        torch.testing.assert_close(grad, expected[f"d{name}"].value.view(grad.shape), rtol=1e-5, atol=1e-6)
    for name, tensor in (("out", out), ("dq", inputs.q.grad), ("dk", inputs.k.grad), ("dv", inputs.v.grad)):
        torch.testing.assert_close(heads_first(tensor.detach(), workload).double(), expected[name].value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_grid_is_that_of_the_dtype(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator, dtype=torch.float64) * torch.logspace(-9, 4, 1000, dtype=torch.float64)
    nearest = on_grid(x, dtype, 0.5)

    assert (nearest == x.to(getattr(torch, dtype)).double()).float().mean() > 0.99  # ties aside, and torch rounds twice
    torch.testing.assert_close(nearest, nearest.to(getattr(torch, dtype)).double(), rtol=0, atol=0)


def test_scatter_keeps_the_mean_and_dithering_rounds_equal_values_alike():
    x = torch.full((20_000,), 1.001, dtype=torch.float64)
    scattered = Rounder(precision_named("flash"), torch.Generator().manual_seed(0))(x, "bfloat16")

    assert set(scattered.tolist()) == {1.0, 1.0078125}
    assert abs(float(scattered.mean()) - 1.001) < 1e-4
    assert len(Rounder(precision_named("flash"), factor=1.3)(x, "bfloat16").unique()) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", [None, "math", "sdpa_flash"])
def test_an_honest_model_is_about_as_far_from_exact_as_honest_rounding(backend):
    model, step = HONEST["causal"](torch.bfloat16)

    ratios = check_model(model, step, backend).ratios

    weights = {name: ratio for name, ratio in ratios.items() if name.endswith(".weight")}
    assert len(weights) == len([name for name, _ in model.named_parameters() if name.endswith(".weight")])
    least = 0 if backend == "math" else 0.2  # math is bit-equal to exact attention here
    assert all(least <= ratio < 2 for ratio in weights.values())
    assert "loss" in ratios


def test_a_key_that_is_lost_shows_end_to_end():
    def loses(q, k, v, workload):
        seen = torch.ones(workload.q_len, workload.kv_len, dtype=torch.bool).tril()
        seen[:, 0] = torch.arange(workload.q_len) == 0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    model, step = case_of(stack(causal), torch.bfloat16)

    assert judge_model(model, step, loses).ratios["gradient of blocks.0.attn.k.weight"] > 5


def test_runs_are_the_same_each_time_and_none_are_made_where_none_are_wanted():
    model, step = HONEST["causal"](torch.bfloat16)
    steps = []

    def counted():
        steps.append(step)
        return step()

    first = check_model(model, counted, scatter=2).ratios
    assert len(steps) == 1 + 1 + 2
    assert check_model(model, counted, scatter=2).ratios == first
    steps.clear()
    assert not check_model(model, counted, scatter=0).ratios
    assert len(steps) == 1


def test_single_precision_has_no_ratios_as_its_sums_are_not_emulated():
    assert not check_model(*HONEST["causal"](torch.float32)).ratios


def test_rows_whose_mask_is_the_lowest_number_are_not_held_against_rows_of_nothing():
    """Eager code averages all values there, exact attention to what is visible gives 0."""
    lowest = torch.full((1, 1, 45, 45), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    mask = lowest.triu(1)
    mask[:, :, :5] = lowest[:, :, :5]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    found = judge_model(*case_of(stack(attend), torch.bfloat16), backward=False)

    assert found.passed
    assert not found.ratios
    assert any(note.startswith("rows that see no key are not 0 in some calls") for note in found.notes)


# -- the same step with other roundings --------------------------------------------------------------------------------


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
