import subprocess
import sys

import pytest
import torch

from pytest_attn import Pages, Window, Workload, draw_inputs
from pytest_attn.backends.precision import PRECISIONS
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.workloads.distributions import DISTRIBUTIONS, distribution_names

WORKLOAD = Workload(64, heads=2, batch=2)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_draw_is_the_same(distribution):
    first, second = (draw_inputs(WORKLOAD, distribution) for _ in range(2))
    for name in ("q", "k", "v", "dout"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert not torch.equal(first.q, draw_inputs(WORKLOAD, distribution, seed=1).q)


@pytest.mark.slow("starts processes")
def test_another_process_draws_the_same_values():
    code = (
        "from pytest_attn import Workload, draw_inputs;"
        "print(draw_inputs(Workload(64, heads=2, batch=2), 'structured').q.double().sum().item().hex())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == draw_inputs(WORKLOAD, "structured").q.double().sum().item().hex()


def test_the_generator_gives_these_values():
    """Frozen: inputs that change would silently change what every baseline and every report was about."""
    q = draw_inputs(Workload(4, head_dim=8, dtype="fp32"), "randn").q
    assert [round(x, 5) for x in q[0, 0, 0].tolist()] == FROZEN


def test_normal_values_are_normal_and_streams_are_independent():
    inputs = draw_inputs(Workload(4096, heads=4, dtype="fp32"), "randn")
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.dout):
        assert abs(float(tensor.mean())) < 0.005
        assert abs(float(tensor.std()) - 1) < 0.005
        assert abs(float(tensor.pow(4).mean()) - 3) < 0.05
    assert abs(float((inputs.q * inputs.k).mean())) < 0.005


def test_dtypes_round_the_same_values():
    full, half = (draw_inputs(Workload(64, dtype=dtype), "randn").q for dtype in ("fp32", "fp16"))
    assert torch.equal(full.half(), half)


def test_structured_inputs_make_every_edge_of_a_window_matter():
    """A window that is off by one key changes rows by far more than rounding."""
    workload = Workload(256, heads=2, mask=Window(31, 0))
    inputs = draw_inputs(workload, "structured")
    right = compute_reference(inputs, PRECISIONS["flash"]).tensors["out"]
    for mask in (Window(32, 0), Window(30, 0), Window(31, 1), Window(31, None)):
        wrong = compute_reference(inputs, PRECISIONS["flash"], workload=workload.replace(mask=mask)).tensors["out"]
        assert float(((wrong.value - right.value) / right.tau).abs().max()) > 100


def test_outliers_push_lse_beyond_what_float32_exponentials_hold():
    lse = compute_reference(draw_inputs(WORKLOAD, "outlier"), PRECISIONS["flash"]).tensors["lse"].value
    assert float(lse.min()) < -88
    assert float(lse.max()) > 88


def test_one_hot_values_read_out_the_probabilities():
    inputs = draw_inputs(Workload(64, heads=2), "onehot")
    assert torch.equal(inputs.v[0, 0], torch.eye(64, dtype=torch.bfloat16))


def test_pages_are_permuted_and_read_back():
    paged = draw_inputs(Workload(1, 40, batch=2, kv_heads=1, kv_pages=Pages(16)), "randn")
    dense = draw_inputs(Workload(1, 40, batch=2), "randn")
    assert paged.k.shape == (6, 16, 1, 64)
    assert sorted(paged.page_table.flatten().tolist()) == list(range(6))
    assert paged.page_table.flatten().tolist() != list(range(6))
    assert paged.gathered()[0].shape == dense.k.shape


def test_packed_sequences_lie_end_to_end():
    inputs = draw_inputs(Workload(q_lens=(3, 0, 5), kv_lens=(4, 2, 5), heads=2, kv_heads=1), "structured")
    assert inputs.q.shape == (8, 2, 64)
    assert inputs.k.shape == (11, 1, 64)
    assert inputs.cu_seqlens.tolist() == [0, 3, 3, 8]
    assert inputs.cu_seqlens_kv.tolist() == [0, 4, 6, 11]


def test_slopes_of_alibi_halve_from_head_to_head():
    assert draw_inputs(Workload(8, heads=8, alibi=True)).alibi_slopes.tolist() == [2.0**-n for n in range(1, 9)]


def test_an_unknown_distribution_is_refused():
    with pytest.raises(ValueError, match="unknown input distribution 'rand'; known: structured, flat, randn"):
        distribution_names("rand")


FROZEN = [-0.73062, 0.66853, 1.04982, -0.81244, 0.28126, -0.05655, -2.39542, -2.8446]
