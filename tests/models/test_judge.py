import pytest
import torch
from models.zoo import HONEST, uniform_case

from pytest_attn import capture
from pytest_attn.models import judge
from pytest_attn.models.judge import judge_call


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


def test_with_them_they_pass_and_a_wrong_gradient_does_not(calls):
    assert all(judge_call(call).passed for call in calls)
    for call in calls:
        call.gradients["dv"] *= 1.1
    assert not any(judge_call(call).passed for call in calls)
