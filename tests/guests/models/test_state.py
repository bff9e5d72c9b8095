import random

import pytest
import torch
from guests.models.zoo import case_of, causal, stack
from torch import nn

from pytest_attn import check_model
from pytest_attn.guests.models import step as steps


@pytest.fixture
def case():
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
def test_what_a_step_changes_of_a_model_is_put_back(case, change):
    model, step = case
    before = state_of(model)

    def step_that_changes():
        loss = step()
        change(model)
        return loss

    check_model(model, step_that_changes)

    assert state_of(model) == before


def test_a_model_is_left_as_it_was_where_its_step_raises(case):
    model, step = case
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
def test_buffers_of_any_kind_are_left_alone(case, buffer):
    model, step = case
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


def test_gradients_and_random_numbers_come_back_where_a_value_cannot(case, monkeypatch):
    model, step = case
    step().backward()
    before, numbers = model[1].head.weight.grad, torch.get_rng_state()

    def refuses(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(steps, "_put_back", refuses)
    with pytest.raises(RuntimeError, match="no"), steps.untouched(model):
        torch.rand(1)

    assert model[1].head.weight.grad is before
    assert torch.equal(torch.get_rng_state(), numbers)
