"""The gradient of one input alone is what it is with those of the others."""

import math

import pytest
import torch
from judging import asked, assert_few_calls

from pytest_attn import Workload
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.workloads.inputs import draw_inputs

CPU = torch.device("cpu")
W = Workload(40, 48, heads=2, head_dim=16, dtype="float32")
CLOSED = W.replace(sinks=True, bias="hqk")


def formula(q, k, v, sinks=None, bias=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


class Attention(torch.autograd.Function):
    """Attention whose backward pass can decide by which gradients are needed."""

    @staticmethod
    def forward(ctx, given, *tensors):
        ctx.given = given
        ctx.save_for_backward(*tensors)
        return formula(*tensors)

    @staticmethod
    def backward(ctx, dout):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            found = list(torch.autograd.grad(formula(*leaves), leaves, dout))
        return None, *ctx.given(found, ctx.needs_input_grad[1:])


def kernel_of(given, *closed):
    return lambda q, k, v: Attention.apply(given, q, k, v, *closed)


def without(name, unless, zero=torch.zeros_like):
    """Return the gradients with one lost, unless that of another is needed, too."""
    names = ("q", "k", "v", "sinks", "bias")

    def given(found, needed):
        at = names.index(name)
        if not needed[names.index(unless)]:
            found[at] = zero(found[at])
        return found

    return given


def ask(kernel, workload=W, parameters=None, **options):
    return asked(kernel, CheckSpec(workload, CPU, True, parameters=parameters or {}), **options)


def closed_over():
    inputs = draw_inputs(CLOSED, "structured", 0)
    return {"sinks": inputs.sinks.requires_grad_(), "bias": inputs.bias.requires_grad_()}


@pytest.mark.parametrize(("name", "unless"), [("q", "k"), ("k", "v"), ("v", "q"), ("k", "q")])
def test_a_gradient_that_is_lost_without_another(name, unless):
    faulty = kernel_of(without(name, unless))
    (finding,) = ask(faulty, only="alone").broken
    assert finding.evidence.startswith(f"where nothing but {name} needs a gradient: d{name}[0, 0, 0, 0] = 0, was ")
    assert ask(faulty, skip="alone").passed
    assert ask(kernel_of(lambda found, needed: found)).passed


@pytest.mark.parametrize(("name", "unless"), [("sinks", "q"), ("bias", "k"), ("q", "bias")])
def test_so_are_those_of_what_is_closed_over(name, unless):
    parameters = closed_over()
    closed = (parameters["sinks"], parameters["bias"])
    (finding,) = ask(kernel_of(without(name, unless), *closed), CLOSED, parameters, only="alone").broken
    assert f"where nothing but {name} needs a gradient: d{name}[" in finding.evidence
    report = ask(kernel_of(lambda found, needed: found, *closed), CLOSED, parameters)
    assert report.passed
    assert_few_calls(report)
    assert all(one.requires_grad for one in closed)


def test_a_kernel_that_goes_another_way_without_q():
    def forgets(q, k, v):
        with torch.set_grad_enabled(q.requires_grad):
            return formula(q, k, v)

    (finding,) = ask(forgets, only="alone").broken
    assert finding.evidence == "out carries no gradient where nothing but v needs one"


def test_what_a_kernel_raises_then_is_told_with_the_reason():
    def hooks(q, k, v):
        q.register_hook(lambda grad: grad)
        return formula(q, k, v)

    (finding,) = ask(hooks, only="alone").broken
    assert finding.evidence.startswith(
        "where nothing but v needs a gradient: the kernel raised RuntimeError: cannot register a"
    )


def test_the_thorough_set_asks_a_backend_for_all_three():
    assert ask("math", only="alone").calls == 2
    assert ask("math", only="alone", thorough=True).calls == 4
