"""What a step may return, and who runs its backward pass."""

from types import SimpleNamespace

import pytest
import torch
from guests.models.zoo import case_of, causal, stack
from torch.utils.checkpoint import checkpoint

from pytest_attn import check_model
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
