"""What a model's functions meet while they are caught: torch's own modes, and no warning that is there only because of us."""

import warnings

import pytest
import torch
from guests.models.zoo import TOKENS, Attention, Of, case_of, full, stack
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from pytest_attn import ContractError, capture, check_model
from pytest_attn.guests.models import interception
from pytest_attn.guests.models.calls.torch_calls import SDPA

SEEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
compiled_flex = torch.compile(flex.flex_attention, backend="eager")


def looked_up(b, h, i, j):
    return SEEN[i, j]


def masked_flex(q, k, v, attend=lambda *args, **options: flex.flex_attention(*args, **options)):
    mask = flex.create_block_mask(looked_up, None, None, TOKENS, TOKENS, device="cpu")
    return attend(q, k, v, block_mask=mask)


def forward_case(attend, gradients=False):
    model = stack(attend).requires_grad_(gradients)
    x = torch.randn(2, TOKENS, 64, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(x)


def test_flex_attention_may_look_its_mask_up_in_a_tensor():
    found = check_model(*forward_case(masked_flex), backward=False)

    assert [call.function for call in found.calls] == ["flex_attention"] * 2


def test_a_compiled_function_that_takes_a_calls_place_may_look_its_mask_up_in_a_tensor():
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q, k, v, mask):
        return flex.flex_attention(q, k, v, block_mask=mask)

    def mine(q, k, v, workload):
        return masked_flex(q, k, v, lambda q, k, v, block_mask: compiled(q, k, v, block_mask))

    assert check_model(*forward_case(masked_flex), mine, backward=False).passed


def test_what_a_backend_compiles_keeps_the_functions_that_it_calls():
    """Or torch would compile their interception, which it refuses: flex could not be timed in a model."""
    caught = interception.Interceptor(handler=None, tracker=None).wrap(SDPA, torch.add)
    compiled = torch.compile(lambda x: caught(x, x), backend="eager", fullgraph=True)

    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]


def test_a_part_that_is_compiled_runs_eagerly_without_the_warning_that_it_should_be_compiled():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert check_model(*forward_case(lambda q, k, v: masked_flex(q, k, v, compiled_flex)), backward=False).passed


def compiled_attention(q, k, v):
    return _compiled(q, k, v)


@torch.compile(backend="eager")
def _compiled(q, k, v):
    return (q @ k.mT / 4).softmax(-1) @ v


def test_tensors_that_have_a_gradient_may_be_asked_for_it_while_their_call_is_caught():
    """What its function calls is compiled, and asks each tensor for its gradient meanwhile: of parameters of its own."""
    tokens = nn.Parameter(torch.randn(2, 4, TOKENS, 16))
    model = Of(lambda own: compiled_attention(tokens, tokens, tokens).square().mean(), tokens=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model().backward()  # by itself it warns of nothing

        assert check_model(model, model, functions=[compiled_attention], backward=True).passed


def test_what_a_backend_warns_of_in_its_backward_pass_fails_nothing():
    from pytest_attn.backends.backend import FunctionBackend

    def loud(q, k, v, workload):
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        out.register_hook(lambda _: warnings.warn("this release is old", DeprecationWarning, stacklevel=1))
        return out

    model, step = case_of(stack(lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert check_model(model, step, FunctionBackend("loud", loud)).passed


def test_what_the_model_warns_of_by_itself_is_its_own():
    class Loud(Attention):
        def forward(self, x):
            warnings.warn("this layer is old", DeprecationWarning, stacklevel=1)
            return super().forward(x)

    model = Loud(lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v))
    x = torch.randn(2, TOKENS, 64)
    with pytest.warns(DeprecationWarning, match="this layer is old"):
        check_model(model, lambda: model(x).square().mean())


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_a_mode_is_set_aside_wherever_it_stands_and_put_back(place):
    modes = [Mode() for _ in range(3)]
    chosen = Mode() if place is None else modes[place]
    with modes[0], modes[1], modes[2]:
        before = _get_current_function_mode_stack()
        with interception._set_aside(chosen):
            assert _get_current_function_mode_stack() == [mode for mode in before if mode is not chosen]
        assert _get_current_function_mode_stack() == before


def test_what_compiles_is_prepared_once_for_layers_that_ask_the_same():
    from pytest_attn.backends.backend import FunctionBackend

    class Counting(FunctionBackend):
        prepared = 0

        def prepare(self, inputs, backward=False):
            self.prepared += 1
            return super().prepare(inputs, backward)

    def attend(q, k, v):
        seen = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool)  # each layer makes its own, which is no known mask
        seen[1, :, 7:, 3:5] = False
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def mine(q, k, v, workload):
        mask = workload.mask.factory(2, 1, TOKENS, TOKENS, q.device)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    counting = Counting("counting", mine)
    assert check_model(*case_of(stack(attend, layers=3)), counting).passed
    assert counting.prepared == 1


class Stale(torch.Tensor):
    """A tensor of a model's own, which says something else than it holds."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.detach:
            return args[0].as_subclass(torch.Tensor).detach() + 1
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_that_a_model_uses_is_judged_by_what_it_holds():
    def attend(q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v).as_subclass(Stale)

    assert check_model(*case_of(stack(attend))).passed


def test_a_function_that_computes_calls_returns_plain_tensors():
    def mine(q, k, v, workload):
        return nn.functional.scaled_dot_product_attention(q, k, v).as_subclass(Stale)

    with pytest.raises(ContractError, match="out is of type Stale"):
        check_model(*case_of(stack(lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v))), mine)


def test_what_dynamo_learned_of_torch_while_a_stand_in_held_a_name_is_forgotten():
    rules = pytest.importorskip("torch._dynamo.trace_rules")
    case = case_of(stack(full))
    rules.get_torch_obj_rule_map.cache_clear()

    def step():
        rules.get_torch_obj_rule_map()
        return case.step()

    assert capture(step, case.model)
    assert torch.nn.functional.scaled_dot_product_attention in rules.get_torch_obj_rule_map()
