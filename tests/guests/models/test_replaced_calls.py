"""What stands in for a model's attention has the contract of every kernel: all gradients, inputs as they were, one call."""

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import case_of, causal, full, stack
from torch.utils.checkpoint import checkpoint

from pytest_attn.guests.models.check_model import judge_model

HALF = torch.bfloat16
SDPA = F.scaled_dot_product_attention


def judged(backend, model=None, **options):
    return judge_model(*case_of(stack(causal) if model is None else model, HALF), backend, scatter=0, **options)


class Function(torch.autograd.Function):
    """Attention whose backward pass computes the forward pass again."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return SDPA(q, k, v, is_causal=True)

    @staticmethod
    def backward(ctx, dout):
        with torch.enable_grad():
            qkv = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        return torch.autograd.grad(out, qkv, dout)


class WithoutDk(Function):
    @staticmethod
    def backward(ctx, dout):
        dq, _, dv = Function.backward(ctx, dout)
        return dq, None, dv


def detached(q, k, v, workload):
    return SDPA(q, k.detach(), v, is_causal=True)


def mine(q, k, v, workload):
    return SDPA(q, k, v, is_causal=True)


def none_for_dk(q, k, v, workload):
    return WithoutDk.apply(q, k, v)


@pytest.mark.parametrize("kernel", [detached, none_for_dk])
def test_a_gradient_that_never_arrives_is_missing_while_others_do(kernel):
    found = judged(kernel)

    assert not found.passed
    assert {call.fault for call in found.calls} == {"dk is missing: out does not depend on k, as autograd sees it"}


def test_gradients_that_miss_in_every_second_call_only_are_missing():
    calls = []

    def kernel(q, k, v, workload):
        calls.append(1)
        out = SDPA(q, k, v, is_causal=True)
        return out if len(calls) % 2 else out.detach()

    found = judged(kernel)
    assert [bool(call.fault) for call in found.calls] == [False, True]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_that_miss_within_a_checkpoint_are_missing(use_reentrant):
    model = stack(causal)
    x = torch.randn(2, 45, 64, dtype=HALF, requires_grad=True)
    calls = []

    def kernel(q, k, v, workload):
        calls.append(workload)
        out = SDPA(q, k, v, is_causal=True)
        return out.detach() if workload.heads == 2 else out

    model.blocks[1].attn.heads = 2
    model.blocks[1].attn.kv_heads = 2
    model = model.to(HALF)

    def step():
        h = x
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=use_reentrant)
        return h.float().square().mean()

    assert "dq is missing" in judge_model(model, step, kernel, scatter=0).message


def test_a_model_that_detaches_keys_itself_is_right():
    assert judged(None, stack(lambda q, k, v: SDPA(q, k.detach(), v, is_causal=True))).passed


def test_gradients_that_the_step_does_not_ask_for_are_not_missing():
    model, step = case_of(stack(causal), HALF)

    def of_queries():
        loss = step()
        torch.autograd.grad(loss, [model.blocks[0].attn.q.weight])
        return loss

    assert judge_model(model, of_queries, mine, scatter=0).passed


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_inputs_that_are_changed_in_place_are_seen(name):
    def kernel(q, k, v, workload):
        out = SDPA(q.clone(), k.clone(), v.clone(), is_causal=True)
        {"q": q, "k": k, "v": v}[name].data.mul_(2)
        return out

    assert f"the callable changed its input {name} in place" in judged(kernel).message


def again(q, k, v, workload):
    return Function.apply(q, k, v)


def checkpointed(q, k, v, workload, use_reentrant=True):
    return checkpoint(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), q, k, v, use_reentrant=use_reentrant)


def checkpointed_anew(q, k, v, workload):
    return checkpointed(q, k, v, workload, use_reentrant=False)


@pytest.mark.parametrize("kernel", [again, checkpointed, checkpointed_anew])
def test_a_backward_pass_that_computes_the_forward_pass_again_is_its_own_affair(kernel):
    found = judged(kernel)

    assert found.passed, found.message
    assert len(found.calls) == 2


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "saved"])
@pytest.mark.parametrize("backend", [None, "math", mine, again], ids=["own", "math", "function", "recomputing"])
def test_a_model_may_compute_the_core_of_its_attention_again(backend, use_reentrant):
    """The second time no module runs around it: what stands in for it computes that call, too."""

    def attend(q, k, v):
        return checkpoint(
            lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), q, k, v, use_reentrant=use_reentrant
        )

    found = judged(backend, stack(attend))
    assert found.passed, found.message
    assert sum(call.has_gradients for call in found.calls) >= 2
    assert all(call.is_replaced for call in found.calls) == (backend is not None)


def test_a_models_own_attention_may_do_so_as_well_and_is_judged_where_it_does():
    found = judged(None, stack(lambda q, k, v: Function.apply(q, k, v)))

    assert found.passed, found.message
    assert [call.module for call in found.calls if call.has_gradients] == ["", ""]


def test_attention_whose_output_is_changed_in_place_is_judged_as_it_was():
    """The ratios are computed, too: exact attention, in its place, lets the model do so."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return full(q, k, v).mul_(0.5)

    assert judge_model(*case_of(stack(attend), HALF), scatter=1).passed
