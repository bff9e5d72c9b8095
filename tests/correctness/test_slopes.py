"""The slope of each head over exact attention: a factor that the other levels do not see."""

import pytest
import torch
from honest.variants import VARIANTS, Honest
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.comparison import head_slopes
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.reference import Expected
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.kernel import Kernel
from pytest_attn.workloads.catalog import builtin_catalog


def judged(kernel, workload, *inputs, backward=False):
    """Judge without a diagnosis."""
    spec = CheckSpec(workload, torch.device("cpu"), backward, inputs)
    return judge(spec.subject(Registry(), kernel), spec, ReferenceCache())


class Times(torch.autograd.Function):
    """Multiply the gradient of one head."""

    @staticmethod
    def forward(ctx, x, factor, head):
        ctx.factor, ctx.head = factor, head
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[:, ctx.head] *= ctx.factor
        return gradient, None, None


def off_by(name, factor, head=3):
    """Return attention that rounds once, with one tensor off by a factor in one head."""

    def kernel(q, k, v):
        given = {one: t.float() for one, t in zip(("dq", "dk", "dv"), (q, k, v), strict=True)}
        if name != "out":
            given[name] = Times.apply(given[name], factor, head)
        out = sdpa(*given.values())
        return (out if name != "out" else torch.cat([out[:, :head], out[:, head:] * factor], 1)).to(q.dtype)

    return kernel


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("name", "factor"), [("out", 1.005), ("dq", 0.995), ("dk", 1.005), ("dv", 0.995)])
@pytest.mark.parametrize("tokens", [128, pytest.param(512, marks=pytest.mark.slow)])
def test_half_a_percent_in_one_head_is_found(name, factor, dtype, tokens):
    found = judged(off_by(name, factor), Workload(tokens, heads=4, dtype=dtype), "structured", backward=name != "out")

    row = found.reported
    assert (row.name, row.slope_head, row.passed) == (name, (0, 3), False)
    assert row.slope == pytest.approx(factor, abs=5e-4)
    assert row.z_slope > 1.1


@pytest.mark.parametrize(("dtype", "before"), [("bf16", ": "), ("fp32", "\n  factor     ")])
def test_a_factor_is_said(dtype, before):
    text = describe(judged(off_by("dk", 1.0098), Workload(131, heads=4, dtype=dtype), "structured", backward=True))
    assert f"{before}head 3 is 0.98 % too large: slope 1.0098 ± 0.000" in text
    assert "where      rows all 131; head 3 (of 4)" in text


class CutOff(Kernel):
    """P and dS are cut off to bfloat16, which makes them smaller by 0.28 % on average."""

    def rounded(self, tile, p):
        return (p.view(torch.int32) & ~0xFFFF).view(torch.float32)


def test_a_kernel_that_cuts_off_p_passes():
    found = judged(Honest("cut-off", CutOff).backend(), Workload(128, heads=2), "structured", "flat", backward=True)
    assert found.passed
    assert 0.5 < max(row.z_slope for row in found.tensors) < 0.8


def test_what_is_a_factor_by_declaration_is_not_asked():
    """Sinks of one value that are rounded move all rows of a head alike."""
    (workload,) = builtin_catalog().select("features-br-fewkeys-left-empty-bias-alibis-sinks-mod-vink")
    (rounded,) = (one for one in VARIANTS if one.name == "rounded-sinks")
    assert judged(rounded.backend(), workload, "flat").passed


def test_a_head_of_few_rows_is_not_asked():
    found = judged(off_by("out", 1.005), Workload(63, heads=4), "flat")
    assert {row.z_slope for row in found.tensors} == {0.0}


@pytest.mark.parametrize("size", [0.55, 0.7, 1.4, 3.2])
def test_what_lies_below_a_step_of_numbers_has_no_slope(size):
    draw = torch.Generator().manual_seed(0)
    exact = size * (1 + 0.05 * torch.rand(1, 1, 128, 64, generator=draw, dtype=torch.float64))
    expected = Expected(exact, torch.full_like(exact, 12**-0.5, dtype=torch.float32))

    slopes = head_slopes((exact.round() - exact) / expected.tau, expected)

    assert slopes.off.abs() > 0.05
    assert slopes.off.abs() <= slopes.allowed
