"""How the figures of a mismatch are written: digits as far as they are read, powers of ten beyond."""

import math

import pytest
import torch
from judging import FULL, failure
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_attn import Workload
from pytest_attn.backends.precision import PRECISIONS
from pytest_attn.correctness.judge import compare_all
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.reports.lines import figure
from pytest_attn.workloads.inputs import draw_inputs


@pytest.mark.parametrize(
    ("value", "plain", "text"),
    [
        (1.0, ".4f", "1.0000"),
        (-0.5, ".4f", "-0.5000"),
        (999_999.0, ",.0f", "999,999"),
        (18342678526838309768343378928336896.0, ".4f", "1.8e34"),
        (-3.14e30, ",.0f", "-3.1e30"),
        (2e-7, ".3g", "2e-07"),
        (math.inf, ".2f", "infinite"),
    ],
)
def test_a_figure_is_short(value, plain, text):
    assert figure(value, plain) == text


def test_a_result_far_off_is_described_in_powers():
    text = failure(lambda q, k, v: sdpa(q, k, v) * torch.tensor(1e34, dtype=q.dtype), FULL)
    slope = text.split("slope ")[1].split()[0]
    assert slope.endswith(("e34", "e33"))
    assert max(map(len, text.replace(",", "").split())) < 60


class Reading(TorchDispatchMode):
    """Counts how often a number is read back from its device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["out", "lse", "dq"])
def test_the_figures_of_a_tensor_are_read_back_at_once(name):
    """On a GPU that others use, too, each reading waits for its turn."""
    workload = Workload(30, heads=2, head_dim=16)
    reference = compute_reference(draw_inputs(workload, "structured", 0, torch.device("cpu")), PRECISIONS["flash"], True)
    value = reference.tensors[name].value.clone()
    value[0, 1, 7] += 0.5
    with Reading() as reading:
        (row,) = compare_all("structured", {name: value}, reference, workload, limits_named("default"))
    assert reading.count == 0
    assert row.worst[:3] == (0, 1, 7)
    assert row.found - row.exact == pytest.approx(0.5)
    assert row.absmax == pytest.approx(0.5)
    assert row.wrong_positions == 0
    value[0, 0, 3] = math.nan
    (row,) = compare_all("structured", {name: value}, reference, workload, limits_named("default"))
    assert not row.passed
    assert row.wrong_positions == value[0, 0, 3].numel()
    if name != "lse":
        assert row.worst[:3] == (0, 0, 3)


def test_gradients_are_right_where_a_dout_with_nan_leaves_no_number():
    """As of a model whose loss overflows behind this layer."""
    workload, limits = Workload(30, heads=2, head_dim=16), limits_named("default")
    inputs = draw_inputs(workload)
    inputs.dout[0, 0, 3] = math.nan
    reference = compute_reference(inputs, PRECISIONS["flash"], True)
    found = {name: reference.tensors[name].value.bfloat16() for name in ("dq", "dk", "dv")}
    assert all(row.passed for row in compare_all("", found, reference, workload, limits))
    numbers = {name: value.nan_to_num(0) for name, value in found.items()}
    assert not any(row.passed for row in compare_all("", numbers, reference, workload, limits))
