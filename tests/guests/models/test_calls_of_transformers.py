"""Calls of models that fetch their attention from the interface of transformers: how they are made, and what comes back."""

import functools

import pytest
import torch
from guests.models.llama_like import Llama, modeling, tokens  # noqa: F401 - a fixture
from guests.models.zoo import Attention, causal, stack
from torch import nn

from pytest_attn import check_model
from pytest_attn.guests.models.calls.transformers_calls import _mask
from pytest_attn.guests.models.check_model import judge_model


def step_of(model, dtype=None):
    x = tokens()

    def step():
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return model(x).logits.float().square().mean()

    return step


# -- functions, whatever their parameters are called -----------------------------------------------------------------------


def registered(modeling, function, masks="sdpa"):  # noqa: F811
    from transformers.masking_utils import AttentionMaskInterface

    modeling.AttentionInterface._global_mapping["mine"] = function
    made = AttentionMaskInterface._global_mapping
    made["mine"] = made[masks]
    return Llama("mine")


class Attend:
    def __init__(self, sdpa):
        self.sdpa = sdpa

    def __call__(self, layer, q, k, v, mask, /, scaling, **options):
        return self.sdpa(layer, q, k, v, mask, scaling=scaling, **options)


KINDS = {
    "named otherwise": lambda sdpa: lambda layer, q, k, v, mask, **options: sdpa(layer, q, k, v, mask, **options),
    "any arguments": lambda sdpa: lambda *args, **options: sdpa(*args, **options),
    "partial": lambda sdpa: functools.partial(lambda _, *args, **options: sdpa(*args, **options), "bound"),
    "an object": Attend,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_function_is_called_as_the_model_calls_it(modeling, kind):  # noqa: F811
    model = registered(modeling, kind(modeling.sdpa_attention_forward))

    assert [call.passed for call in check_model(model, step_of(model)).calls] == [True, True]


def test_an_own_function_may_be_handed_its_mask_as_numbers(modeling):  # noqa: F811
    model = registered(modeling, modeling.eager_attention_forward, "eager")

    assert check_model(model, step_of(model), precision="eager").calls


# -- arguments that nothing is known of ----------------------------------------------------------------------------------

INDICES = torch.zeros(2, 45, 4, dtype=torch.long)
HARMLESS = {"position_ids": torch.arange(45)[None], "use_cache": True, "output_hidden_states": True, "cache_position": 3}


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "mine"])
@pytest.mark.parametrize("backend", ["math", lambda q, k, v, workload: causal(q, k, v)], ids=["backend", "function"])
def test_what_takes_attention_s_place_refuses_an_argument_that_it_does_not_know(modeling, implementation, backend):  # noqa: F811
    registered(modeling, modeling.sdpa_attention_forward)
    model = Llama(implementation, indices=INDICES)

    found = judge_model(model, step_of(model), backend)

    assert not found.passed
    assert "its argument indices=a tensor of shape (2, 45, 4) is not read" in found.message


def test_an_own_implementation_that_is_handed_what_nobody_knows_is_not_called_right(modeling):  # noqa: F811
    model = registered(modeling, modeling.sdpa_attention_forward)
    for block in model.blocks:
        block.attn.more = {"indices": INDICES}

    found = judge_model(model, step_of(model))

    assert "its argument indices=" in found.message
    assert len(found.unread) == 2


def test_a_stock_implementation_takes_no_notice_of_what_it_does_not_name(modeling):  # noqa: F811
    model = Llama("eager", indices=INDICES)

    assert check_model(model, step_of(model)).passed
    eager = modeling.eager_attention_forward

    def with_sinks(*args, sinks=None, **options):
        return eager(*args, **options)

    modeling.eager_attention_forward = with_sinks
    model = Llama("eager", sinks=torch.zeros(2, 4, 45, 1))
    assert "its argument sinks=" in judge_model(model, step_of(model)).message


@pytest.mark.parametrize("implementation", ["sdpa", "mine"])
@pytest.mark.parametrize("backend", [None, "math"])
def test_arguments_that_are_only_handed_on_are_harmless(modeling, implementation, backend):  # noqa: F811
    registered(modeling, modeling.sdpa_attention_forward)
    model = Llama(implementation, **HARMLESS, indices=None, head_mask=None)

    assert check_model(model, step_of(model), backend).passed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_dropped_mask_is_found_with_and_without_autocast(modeling, dtype):  # noqa: F811
    sdpa = modeling.sdpa_attention_forward
    model = registered(modeling, lambda layer, q, k, v, mask, **options: sdpa(layer, q, k, v, None, **options))

    found = judge_model(model, step_of(model, dtype))

    assert [call.passed for call in found.calls] == [False, False]
    assert not any("masks" in note for note in found.notes)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_honest_model_passes_under_autocast_with_all_its_masks(modeling, implementation):  # noqa: F811
    model = Llama(implementation)

    found = check_model(model, step_of(model, torch.bfloat16))

    assert {call.workload.dtype for call in found.calls} == {"bfloat16"}
    assert not any("masks" in note for note in found.notes)


@pytest.mark.parametrize(("implementation", "is_cast"), [("sdpa", True), ("eager", False)])
def test_autocast_casts_an_additive_mask_where_sdpa_is_called(implementation, is_cast):
    """Beyond bfloat16 the lowest number of float32 is -inf: a row of it sees no key."""
    q, mask = torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2, 2), torch.finfo(torch.float32).min)

    with torch.autocast("cpu", torch.bfloat16):
        visible, bias, _ = _mask(implementation, {"attention_mask": mask}, q, q)

    assert (visible is not None and not visible.any()) == is_cast
    assert (bias is None) == is_cast


def outputs(model):
    return model(tokens().to(model.head.weight.dtype))


def loss_of_weights(model):
    return sum(weights.float().square().sum() for weights in outputs(model).attentions)


def loss_of_both(model):
    return outputs(model).logits.float().square().mean() + loss_of_weights(model)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("run", [outputs, loss_of_both, loss_of_weights])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_that_a_model_returns_or_learns_from_make_no_gradient_wrong(modeling, run, dtype):  # noqa: F811
    model = Llama("eager").to(dtype)

    found = check_model(model, lambda: run(model))

    assert not any("masks" in note for note in found.notes)
    assert all(ratio < 3 for ratio in found.ratios.values())
    assert (dtype == torch.bfloat16) == bool(found.ratios)


def test_a_layer_that_returns_its_weights_passes_and_its_gradients_are_judged(modeling):  # noqa: F811
    layer = Llama("eager").blocks[0].attn

    (call,) = check_model(layer, lambda: layer(tokens())).calls

    assert {tensor.name for tensor in call.comparison.tensors} == {"out", "dq", "dk", "dv"}


def test_a_backend_that_returns_out_alone_refuses_weights_in_words(modeling):  # noqa: F811
    model = Llama("eager", output_attentions=True)

    found = judge_model(model, lambda: loss_of_both(model), "math")

    assert {refused.reason for refused in found.refused} == {
        "the model asks for attention weights as well, which a replacement does not return"
    }


def anything(*args, **options):
    return causal(*args)


def test_a_function_of_any_arguments_is_read_by_their_order():
    model = stack(lambda q, k, v: anything(q, k, v, is_causal=True))

    assert len(check_model(model, lambda: model(tokens()), functions=[anything]).calls) == 2


def test_a_function_without_a_signature_is_refused_in_words():
    with pytest.raises(ValueError, match="max has no signature; say a function of Python"):
        check_model(stack(causal), lambda: pytest.fail("the step ran"), functions=["builtins.max"])


def with_weights(q, k, v):
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return weights @ v, weights


class Weighed(nn.Module):
    """Returns the sum of its weights beside its output, as a loss that is to be added to another."""

    def __init__(self):
        super().__init__()
        self.attn = Attention(lambda q, k, v: self.attend(q, k, v))

    def attend(self, q, k, v):
        out, self.weights = with_weights(q, k, v)
        return out

    def forward(self, x):
        out = self.attn(x)
        return {"loss": out.float().square().mean() + self.weights.float().square().sum(), "weights": self.weights}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_a_function_of_the_user_returns_beside_out_goes_to_the_model(dtype):
    torch.manual_seed(0)
    model = Weighed().to(dtype)

    found = check_model(model, lambda: model(tokens().to(dtype)), functions=[with_weights], precision="eager")

    assert all(ratio < 3 for ratio in found.ratios.values())
