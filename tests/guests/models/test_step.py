"""What a step may return, who runs its backward pass, and a model that is left as it was."""

import random
from types import SimpleNamespace

import pytest
import torch
from guests.models.zoo import case_of, causal, stack
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_attn import check_model
from pytest_attn.guests.models import step as steps
from pytest_attn.guests.models.step import run_step


@pytest.fixture
def case():
    return case_of(stack(causal), torch.bfloat16)


def by_grad(model, step):
    loss = step()
    torch.autograd.grad(loss, list(model.parameters()))
    return loss


def and_drops_them(model, step):
    loss = step()
    loss.backward()
    model.zero_grad()
    return loss


def returning_nothing(model, step):
    step().backward()


def returning_a_number(model, step):
    loss = step()
    loss.backward()
    return loss.item()


def returning_gradients(model, step):
    return torch.autograd.grad(step(), list(model.parameters()))


@pytest.mark.parametrize("own", [by_grad, and_drops_them, returning_nothing, returning_a_number, returning_gradients])
def test_a_step_runs_its_backward_pass_in_any_way(case, own):
    found = check_model(case.model, lambda: own(*case), scatter=0)

    assert all(call.has_gradients for call in found.calls)


def test_another_graph_s_backward_pass_is_not_the_step_s(case):
    """As of an inner loop, or of a gradient that becomes part of the loss."""

    def step():
        x = torch.ones(3, requires_grad=True)
        x.square().sum().backward()
        (of_x,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return case.step() + of_x.detach().sum()

    assert all(call.has_gradients for call in check_model(case.model, step, scatter=0).calls)


def test_an_auxiliary_loss_of_its_own_graph_is_not_the_step_s_backward_pass(case):
    other, x = torch.nn.Linear(64, 64), torch.randn(2, 64, requires_grad=True)

    def step():
        clean = other(x).square().sum()
        torch.autograd.grad(clean, x)
        return {"loss": case.step(), "clean": clean}

    assert all(call.has_gradients for call in check_model(case.model, step, scatter=0).calls)


def test_what_a_user_saves_for_the_backward_pass_is_taken_once(case):
    def step():
        kept = {}

        def pack(tensor):
            kept[len(kept)] = tensor
            return len(kept) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: kept.pop(number).clone()):
            return case.step()

    check_model(case.model, step, scatter=0)


def test_a_step_that_ends_in_a_checkpoint_makes_its_calls_once(case):
    """To look at what the graph has saved would compute the checkpoint again."""
    x = torch.randn(2, 45, 64, dtype=torch.bfloat16)

    def step():
        return checkpoint(case.model.blocks[0], x, use_reentrant=False).sum()

    assert len(check_model(case.model, step, scatter=0).calls) == 1


def test_an_error_of_the_backward_pass_is_shown(case):
    def raises(gradient):
        raise RuntimeError("no kernel image")

    def step():
        loss = case.step()
        loss.register_hook(raises)
        return loss

    with pytest.raises(RuntimeError, match="no kernel image"):
        check_model(case.model, step)


def test_a_frozen_model_whose_input_gets_a_gradient(case):
    model = case.model.requires_grad_(False)
    x = torch.randn(2, 45, 64, dtype=torch.bfloat16, requires_grad=True)

    def own():
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    assert check_model(model, own, scatter=0).calls[0].has_gradients
    assert check_model(model, lambda: own().item(), scatter=0).calls[0].has_gradients


@pytest.mark.one_in(2)
@pytest.mark.parametrize("returned", [None, 3, [], "tokens"])
def test_without_a_backward_pass_a_step_may_return_anything(case, returned):
    def step():
        case.step()
        return returned

    assert len(check_model(case.model, step, backward=False).calls) == 2


def test_tokens_have_no_gradient_and_the_error_says_what_does(case):
    with pytest.raises(
        TypeError, match=r"the step returned Tensor of torch.int64; expected a tensor of floating-point numbers"
    ):
        check_model(case.model, lambda: case.step().argmax(-1))


def test_fields_of_a_namespace_are_outputs():
    assert run_step(lambda: SimpleNamespace(a=torch.ones(3)), torch.nn.Module(), backward=False).outputs.keys() == {"a"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda model, step: (step, model), "model is of type function; .*; model and step are swapped"),
        (lambda model, step: (model, step()), "step is of type Tensor; expected a function without arguments"),
    ],
)
def test_arguments_that_are_none_are_refused(case, arguments, words):
    with pytest.raises(TypeError, match=words):
        check_model(*arguments(*case))


@pytest.mark.parametrize("name", ["aux_loss", "router_z_loss"])
def test_a_loss_of_routers_alone_is_not_the_loss_of_a_step_that_returns_more(name):
    model, _ = case_of(stack(causal))
    x = torch.randn(2, 45, 64)

    def step():
        hidden = model.blocks[0](x)
        return {"logits": model.head(model.blocks[1](hidden)), name: hidden.square().mean()}

    result = run_step(step, model, backward=True)

    assert set(result.outputs) == {"logits", name}
    assert "head.weight" in result.gradients
    assert [call.has_gradients for call in check_model(model, step).calls] == [True, True]


@pytest.fixture
def with_gradients():
    """A model with buffers, and gradients of before; and its step."""
    model, step = case_of(nn.Sequential(nn.BatchNorm1d(45), stack(causal)))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    return model, step


def state_of(model):
    return {
        "parameters": [(id(p), p.tolist(), p.requires_grad) for p in model.parameters()],
        "gradients": [(id(p.grad), p.grad.tolist()) for p in model.parameters()],
        "buffers": [(name, id(b), b.tolist()) for name, b in model.named_buffers()],
        "training": [module.training for module in model.modules()],
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "hooks": [len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()],
    }


CHANGES = {
    "parameters": lambda model: model[1].head.bias.data.add_(1),
    "the mode": lambda model: model.eval(),
    "a new buffer": lambda model: model.register_buffer("cache", torch.ones(1)),
    "another parameter": lambda model: setattr(model[1].head, "bias", nn.Parameter(torch.ones(7))),
    "frozen layers": lambda model: model[1].blocks[0].requires_grad_(False),
    "numbers drawn": lambda model: (torch.rand(1), random.random()),
    "dropped gradients": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_step_changes_of_a_model_is_put_back(with_gradients, change):
    model, step = with_gradients
    before = state_of(model)

    def step_that_changes():
        loss = step()
        change(model)
        return loss

    check_model(model, step_that_changes)

    assert state_of(model) == before


def test_a_model_is_left_as_it_was_where_its_step_raises(with_gradients):
    model, step = with_gradients
    before = state_of(model)

    def raises():
        step().backward()
        CHANGES["parameters"](model)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        check_model(model, raises)
    assert state_of(model) == before


@pytest.mark.parametrize(
    "buffer",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.full((1,), float("nan")).expand(3),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["sparse", "meta", "expanded-nan", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_buffers_of_any_kind_are_left_alone(with_gradients, buffer):
    model, step = with_gradients
    model.register_buffer("extra", buffer())
    held = model.extra
    before = {name: p.grad.clone() for name, p in model.named_parameters()}

    check_model(model, step)

    assert model.extra is held
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())


def test_a_model_that_is_not_initialized_is_refused():
    model = torch.nn.LazyLinear(3)

    with pytest.raises(ValueError, match="the model's weight is not initialized yet; run the model once before it is checked"):
        check_model(model, lambda: model(torch.ones(2)))


def test_gradients_and_random_numbers_come_back_where_a_value_cannot(with_gradients, monkeypatch):
    model, step = with_gradients
    step().backward()
    before, numbers = model[1].head.weight.grad, torch.get_rng_state()

    def refuses(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(steps, "_put_back", refuses)
    with pytest.raises(RuntimeError, match="no"), steps.untouched(model):
        torch.rand(1)

    assert model[1].head.weight.grad is before
    assert torch.equal(torch.get_rng_state(), numbers)
