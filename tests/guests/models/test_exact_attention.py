import dataclasses

import pytest
import torch

from pytest_attn import Document, Workload
from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness.reference import compute_reference, heads_first
from pytest_attn.guests.models.exact_attention import Rounder, exact_attention, on_grid
from pytest_attn.workloads.inputs import draw_inputs

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
