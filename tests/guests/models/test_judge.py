import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from guests.models.zoo import DIM, HONEST, stack, uniform_case
from left_out import IS_ALL
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pytest_attn import capture
from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness import reference as reference_module
from pytest_attn.correctness.judge import compare_all
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.correctness.spec import ReferenceCache
from pytest_attn.guests.models import call_judge as judge
from pytest_attn.guests.models.call_judge import judge_call
from pytest_attn.guests.models.exact_attention import Passes, Rounder


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def calls(request):
    """Calls of a model whose attention is almost uniform."""
    model, step = uniform_case(request.param)
    return capture(lambda: step().backward(), model)


def test_limits_that_honest_kernels_keep_are_those_of_every_check(calls):
    model, step = HONEST["causal"](torch.bfloat16)
    rows = [row for call in capture(lambda: step().backward(), model) for row in judge_call(call).tensors]

    assert {row.limits.head for row in rows} == {1.5}


@pytest.mark.parametrize("calls", [torch.bfloat16], ids=["bf16"], indirect=True)
def test_without_emulated_kernels_rows_that_are_rounded_alike_would_fail(calls, monkeypatch):
    monkeypatch.setattr(judge, "with_empirical_limits", lambda rows, *_: rows)

    assert not all(judge_call(call).passed for call in calls)


@pytest.mark.one_in(2)
def test_with_them_they_pass_and_a_wrong_gradient_does_not(calls):
    assert all(judge_call(call).passed for call in calls)
    for call in calls:
        call.gradients["dv"] *= 1.1
    assert not any(judge_call(call).passed for call in calls)


def test_rows_of_a_long_call_that_are_always_looked_at_are_not_enough(calls, monkeypatch):
    monkeypatch.setattr(reference_module, "_FULL_ELEMENTS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(reference_module, "_SAMPLED_ROWS", 4)
    call = calls[0]
    w = call.workload
    assert judge_call(call).passed
    others = set(range(w.q_len)) - reference_module.always_sampled(w, w.heads, w.q_len)
    for tensor in (call.out, call.gradients["dq"]):
        right = tensor.detach().clone()
        tensor.data[:, :, sorted(others)] += 1
        assert not judge_call(call).passed
        tensor.data.copy_(right)


def kernels(call, number):
    """Yield results of fault-free kernels on the tensors of a call, each with another grid of roundings."""
    inputs, generator = call.complete_inputs(), random.Random(0)
    inputs = replace(inputs, **{name: getattr(inputs, name).double() for name in ("q", "k", "v", "dout")})  # rounded once only
    for _ in range(number):
        passes = Passes(inputs, Rounder(precision_named(call.precision), factor=2 ** generator.random()))
        out = passes.forward()
        yield {"out": out, **dict(zip(("dq", "dk", "dv"), passes.backward(out, inputs.dout), strict=False))}


def test_among_many_honest_kernels_whose_rows_share_their_errors_none_is_called_wrong():
    model, step = uniform_case(torch.bfloat16, seed=1)
    call = capture(lambda: step().backward(), model)[1]
    inputs, beyond = call.complete_inputs(), 0
    reference = compute_reference(inputs, precision_named(call.precision), backward=True)
    number = 60 if IS_ALL else 30
    for tensors in kernels(call, number):
        rows = tuple(compare_all("", tensors, reference, call.workload, limits_named("default")))
        beyond += not all(row.passed for row in rows)
        judged = judge.with_empirical_limits(rows, tensors, reference, inputs)
        assert all(row.passed for row in judged), judged
    assert beyond > number / 2


def compared(call):
    """Judge without a diagnosis."""
    return judge.ModelCall(call).compared(ReferenceCache(), nullcontext)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_half_a_percent_in_one_head_of_a_call_is_found(dtype):
    """Of 131 tokens, in gradients that the budget of bfloat16 gives twice as much."""
    model = stack(sdpa, layers=1).to(dtype)
    x = torch.randn(1, 131, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    (call,) = capture(lambda: model(x).square().sum().backward(), model)
    assert compared(call).passed
    for name, factor in (("out", 1.005), ("dq", 0.995), ("dk", 1.005), ("dv", 0.995)):
        tensor = call.out if name == "out" else call.gradients[name]
        right = tensor.detach().clone()
        tensor.data[:, 3] *= factor
        row = compared(call).reported
        assert (row.name, row.slope_head, row.passed) == (name, (0, 3), False)
        assert row.slope == pytest.approx(factor, abs=1e-3)
        tensor.data.copy_(right)
