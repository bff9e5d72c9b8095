"""Models in inference mode, exported, traced, and within transforms of torch.func: judged, or refused in words."""

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import TOKENS, Attention, Block, Model, case_of, causal, full, stack
from torch import nn
from torch.func import functional_call, grad, vmap

from pytest_attn import capture, check_model, check_module
from pytest_attn.guests.models.check_model import judge_model

X = torch.randn(2, TOKENS, 64, generator=torch.Generator().manual_seed(1))


def inside(check, model, step, *args, **options):
    return check(model, torch.inference_mode()(step), *args, **options)


def around(check, model, step, *args, **options):
    with torch.inference_mode():
        return check(model, step, *args, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", [inside, around])
@pytest.mark.parametrize("backend", [None, "math", lambda q, k, v, workload: causal(q, k, v)], ids=["own", "math", "function"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"])
def test_calls_in_inference_mode_are_judged_forward(mode, backend, dtype):
    model = stack(causal).to(dtype)
    x = X.to(dtype)

    found = mode(check_model, model, lambda: model(x), backend)

    assert [[tensor.name for tensor in call.comparison.tensors] for call in found.calls] == [["out"]] * 2
    assert (found.backward, "inference mode" in " ".join(found.notes)) == (False, True)
    assert not any("inference" in note for note in mode(check_model, model, lambda: model(x), backend, False).notes)


@pytest.mark.parametrize("mode", [inside, around])
def test_a_wrong_call_in_inference_mode_is_found(mode):
    model = stack(causal)

    found = mode(judge_model, model, lambda: model(X), lambda q, k, v, workload: full(q, k, v))

    assert "it equals attention without the mask" in found.message


def test_a_model_that_was_built_in_inference_mode_and_changes_its_buffers_stays_as_it_was():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention(causal)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return self.attn(x) * self.seen

    with torch.inference_mode():
        model = Counting()
        assert check_module(model, X).passed
    assert inside(check_model, model, lambda: model(X)).passed
    assert float(model.seen) == 0


def scaled_in_place(q, k, v):
    return F.scaled_dot_product_attention(q.mul_(0.25), k, v, scale=1.0)


def test_attention_that_changes_its_queries_in_place_may_do_so_in_inference_mode():
    model = stack(scaled_in_place)

    assert inside(check_model, model, lambda: model(X), functions=[scaled_in_place]).passed


def test_what_is_captured_in_inference_mode_is_free_of_it():
    model = stack(causal)
    calls = capture(torch.inference_mode()(lambda: model(X)), model)

    assert len(calls) == 2
    assert not any(t.is_inference() for call in calls for t in (call.q, call.k, call.v, call.out))


def test_a_part_in_inference_mode_beside_a_part_that_learns_leaves_the_gradients_of_the_latter():
    model = stack(causal)

    def step():
        with torch.inference_mode():
            start = model.blocks[0](X)
        return model.head(model.blocks[1](start.clone())).square().mean()

    assert [bool(call.comparison.tensors[1:]) for call in check_model(model, step).calls] == [False, True]


# -- torch.export, torch.fx, torch.jit -----------------------------------------------------------------------------------


class Fixed(nn.Module):
    """A layer that every tracer and compiler takes."""

    def __init__(self, scale=0.25):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.scale = nn.Linear(64, 192), nn.Linear(64, 64), scale

    def forward(self, x):
        qkv = self.qkv(x).view(2, 45, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], scale=self.scale).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("make", [lambda model: torch.export.export(model, (X,)).module(), torch.fx.symbolic_trace])
def test_calls_of_an_exported_and_of_a_traced_graph_are_judged(make):
    model = make(Fixed())

    assert [call.has_gradients for call in check_model(model, lambda: model(X)).calls] == [True]
    assert not judge_model(model, lambda: model(X), lambda q, k, v, workload: causal(q, k, v)).passed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [lambda model: torch.jit.trace(model, X), torch.jit.script])
def test_what_torch_jit_made_is_refused_in_words(make):
    made = make(Fixed())
    with pytest.raises(TypeError, match=r"the model was made by torch.jit \(Fixed\).*check the module that was"):
        check_model(made, lambda: made(X))
    with pytest.raises(TypeError, match=r"blocks.1.attn was made by torch.jit"):
        check_model(Model(Block(Attention(full)), Block(made)), lambda: pytest.fail("the step ran"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_part_that_torch_jit_made_may_stand_beside_attention():
    model = nn.Sequential(Attention(causal), torch.jit.trace(nn.Linear(64, 64), X))

    assert check_model(model, lambda: model(X)).passed


def loss(parameters, x, model):
    return functional_call(model, parameters, (x,)).float().square().mean()


def test_a_model_that_is_called_with_other_parameters_is_judged():
    model = stack(causal)
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    assert all(call.has_gradients for call in check_model(model, lambda: loss(others, X, model)).calls)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_calls_within_grad_are_judged_forward(dtype):
    model = stack(causal).to(dtype)
    step = lambda: grad(loss)(dict(model.named_parameters()), X.to(dtype), model)  # noqa: E731

    assert len(check_model(model, step, backward=False).calls) == 2
    wrong = judge_model(model, step, lambda q, k, v, workload: full(q, k, v), backward=False)
    assert not any(call.passed for call in wrong.calls)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("mask", [False, True])
def test_calls_within_vmap_are_refused_in_words(backward, mask):
    seen = torch.ones(TOKENS, TOKENS).tril().bool()
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen if mask else None)  # noqa: E731
    model = stack(attend)

    found = judge_model(
        model, lambda: vmap(grad(loss), (None, 0, None))(dict(model.named_parameters()), X[:, None], model), backward=backward
    )

    assert found.message.splitlines()[0] == (
        "blocks.0.attn: a call of F.scaled_dot_product_attention was not judged: q, k or v is batched by torch.func.vmap,"
        " which hides the batch; call the model without it"
    )


def test_a_step_that_needs_no_gradient_is_still_told_so():
    model, _ = case_of(stack(causal))
    with pytest.raises(ValueError, match="nothing that needs a gradient"), torch.no_grad():
        check_model(model, lambda: model(X))
