"""Models of transformers, each small, with random weights; skipped where it is not installed."""

import copy
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from guests.models.tiny import HEADS, tiny

from pytest_attn import Causal, Window, capture, check_model
from pytest_attn.guests.models.capture import other_sinks
from pytest_attn.guests.models.check_model import judge_model
from pytest_attn.guests.models.small_models import Library

transformers = Library("transformers")
if not hasattr(transformers.modeling_utils.AttentionInterface, "get_interface"):
    pytest.skip("transformers is older than its get_interface", allow_module_level=True)

MODELS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "gemma2": ("Gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gpt-oss": ("GptOss", {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
TOKENS = 48
IDS = torch.randint(64, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def case(name, implementation, dtype=torch.bfloat16, padding=None):
    """Return a sharpened model and its step. padding: "left" or "right"."""
    kind, options = MODELS[name]
    model = tiny(kind, sharper=8, attn_implementation=implementation, **HEADS, **options).train().to(dtype)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    if padding:
        mask[1, slice(0, 15) if padding == "left" else slice(30, None)] = 0
    return model, lambda: model(input_ids=IDS, attention_mask=mask, labels=IDS, use_cache=False)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("mistral", "sdpa"),
        ("mistral", "eager"),
        ("gemma2", "eager"),
        ("gpt-oss", "eager"),
    ],
)
def test_honest_models_pass(name, implementation, dtype, padding):
    model, step = case(name, implementation, dtype, padding)

    found = check_model(model, step)

    assert [call.function for call in found.calls] == [f"transformers:{implementation}"] * 2


def test_eager_code_whose_sinks_come_last_rounds_their_share():
    kind, options = "GraniteMoeSWA", {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip("transformers is older than GraniteMoeSWA")
    model = tiny(kind, sharper=8, attn_implementation="eager", **HEADS, **options).bfloat16()
    calls = capture(lambda: model(input_ids=IDS, use_cache=False), model)
    assert [(call.precision, call.workload.sinks) for call in calls] == [("late_sinks", True)] * 2


@pytest.mark.parametrize(
    ("name", "backend"), [("llama", "math"), ("mistral", "sdpa_flash"), ("gemma2", "eager"), ("gpt-oss", "eager")]
)
def test_a_backend_takes_the_place_of_every_call(name, backend):
    model, step = case(name, "eager", padding="right")

    found = check_model(model, step, backend)

    assert {call.module for call in found.calls} == {f"model.layers.{n}.self_attn" for n in (0, 1)}
    assert model.config._attn_implementation == "eager"
    assert "pytest_attn" not in transformers.modeling_utils.AttentionInterface._global_mapping
    assert "pytest_attn" not in transformers.masking_utils.AttentionMaskInterface._global_mapping


def test_what_a_model_asks_is_read():
    model, step = case("gpt-oss", "eager")
    calls = capture(step, model)

    assert [call.workload.mask for call in calls] == [Window(15, 0), Causal()]
    assert all(call.workload.sinks and call.workload.kv_heads == 2 for call in calls)
    assert capture(case("gemma2", "eager")[1])[0].workload.softcap == 5.0


@pytest.fixture
def registered(request):
    """Register an implementation with the functions of transformers, and not with its masks."""
    sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    name = "sdpa_of_mine"
    transformers.AttentionInterface.register(name, request.param(sdpa))
    yield name
    transformers.AttentionInterface._global_mapping.pop(name)


def _as_it_is(sdpa):
    return lambda *args, **kwargs: sdpa(*args, **kwargs)


def _without_sinks(sdpa):
    def forward(module, query, key, value, attention_mask, s_aux=None, **kwargs):
        return sdpa(module, query, key, value, attention_mask, **kwargs)

    return forward


@pytest.mark.parametrize("registered", [_as_it_is], indirect=True)
@pytest.mark.parametrize(
    ("name", "padding", "said"), [("mistral", None, "whose left window is ignored"), ("llama", "right", "ignores kv_lens")]
)
def test_a_dispatcher_that_drops_the_mask_is_found(registered, name, padding, said):
    model, step = case(name, registered, padding=padding)

    found = judge_model(model, step)

    assert not any(call.passed for call in found.calls)
    assert said in found.message


def _with_sinks_of(change):
    def registers(sdpa):
        eager = import_module("transformers.models.gpt_oss.modeling_gpt_oss").eager_attention_forward

        def forward(module, query, key, value, attention_mask, s_aux=None, **kwargs):
            own = SimpleNamespace(sinks=change(s_aux), num_key_value_groups=2, training=False)
            return eager(own, query, key, value, attention_mask, **kwargs)

        return forward

    return registers


@pytest.mark.parametrize(
    ("registered", "times"),
    [(_with_sinks_of(lambda s: 2 * s - s.detach()), "2"), (_with_sinks_of(lambda s: 2 * s.detach() - s), "-1")],
    indirect=["registered"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_gradient_of_sinks_that_is_another_one_is_found(registered, times, dtype):
    model, step = case("gpt-oss", "eager", dtype)
    model.config._attn_implementation = registered
    transformers.AttentionMaskInterface.register(registered, transformers.masking_utils.eager_mask)
    try:
        found = judge_model(model, step)
    finally:
        transformers.AttentionMaskInterface._global_mapping.pop(registered)

    assert [call.fault for call in found.calls] == [
        f"dsinks is not the gradient of its sinks: {times} times what exact attention gives"
    ] * 2


@pytest.mark.parametrize("registered", [_without_sinks], indirect=True)
def test_sinks_that_are_not_passed_are_found(registered):
    model, step = case("gpt-oss", "eager")
    model.config._attn_implementation = registered
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(2.0)

    found = judge_model(model, step)

    assert not any(call.passed for call in found.calls)


# -- sparse attention, whose layers make a mask of their own -----------------------------------------------------------------


def sparse_case(implementation, dtype=torch.bfloat16):
    """Return a model whose layers choose 8 keys of each query, and its step; the first sequence is padded on the left."""
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
    indexer = {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    options = {**ranks, **experts, **indexer, **heads, "attn_implementation": implementation}
    model = tiny("DeepseekV32", **options).train().to(dtype)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :15] = 0
    return model, lambda: model(input_ids=IDS, attention_mask=mask, labels=IDS, use_cache=False)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_sparse_attention_is_judged_by_the_mask_that_its_layers_make(implementation):
    found = check_model(*sparse_case(implementation))

    assert len(found.calls) == 2
    assert found.notes[0].startswith("2 of 2 calls hide keys that the masks of the model's configuration show, as sparse")


def test_a_backend_in_the_place_of_sdpa_gets_the_sparse_mask_too():
    found = check_model(*sparse_case("sdpa"), "math")

    seen = found.calls[0].workload.mask.function.visible
    assert int(seen.sum(-1).max()) == 8


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [sparse_case, lambda implementation: case("mistral", implementation, padding="left")])
def test_a_stock_function_that_drops_the_mask_it_was_handed_is_found(make, implementation, monkeypatch):
    model, step = make(implementation)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    modeling = sys.modules[type(model).__module__]
    stock = functions["sdpa"] if implementation == "sdpa" else modeling.eager_attention_forward

    def drops(module, query, key, value, attention_mask, **options):
        return stock(module, query, key, value, None, **options)

    monkeypatch.setitem(functions._global_mapping, "sdpa", drops)
    monkeypatch.setattr(modeling, "eager_attention_forward", drops)

    found = judge_model(model, step)
    assert [call.passed for call in found.calls] == [False, False]


def forgetting(layer):
    """Hand no mask to a layer's attention."""
    forward = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **given: forward(*args, **{**given, "attention_mask": None})


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("backend", [None, "math"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_mask_that_one_layer_forgets_is_found(name, backend, implementation):
    model, step = case(name, implementation, padding="left")
    forgetting(model.model.layers[1])

    found = judge_model(model, step, backend, scatter=0)
    assert [call.module for call in found.calls if not call.passed] == ["model.layers.1.self_attn"]
    assert "a mask was forgotten: attention_mask (2, 1, 48, 48) of model.layers.1.self_attn hides key" in found.message


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_window_that_is_one_key_too_long_is_found(implementation):
    model, step = case("mistral", implementation, padding="right")
    wider = copy.copy(model.config)
    wider.sliding_window += 1
    model.model.config = wider  # what masks are built of; the layers have their own

    found = judge_model(model, step, scatter=0)
    assert not any(call.passed for call in found.calls)
    assert "its layer says sliding_window=16, and the call shows key 0 to row 16" in found.message


def test_a_mask_of_pairs_that_the_test_hands_to_a_model_is_what_it_asks_whatever_window_its_layers_have():
    model, _ = case("mistral", "sdpa")
    seen = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()

    assert check_model(model, lambda: model(input_ids=IDS, attention_mask=seen, labels=IDS, use_cache=False), scatter=0).passed


@pytest.mark.parametrize("factor", [1.01, 2.0, 0.25])
def test_a_scale_that_one_layer_has_for_itself_is_found(factor):
    model, step = case("gemma2", "eager")
    model.model.layers[1].self_attn.scaling *= factor

    found = judge_model(model, step, scatter=0)
    assert [call.module for call in found.calls if not call.passed] == ["model.layers.1.self_attn"]


def test_padding_that_a_model_does_not_hand_to_its_layers_is_found():
    model, step = case("llama", "sdpa", padding="left")
    forward = model.model.forward
    model.model.forward = lambda *args, **given: forward(*args, **{**given, "attention_mask": None})

    found = judge_model(model, step, scatter=0)
    assert "a mask was forgotten: attention_mask (2, 48) of model hides key 0 from row 15" in found.message


def test_a_vision_transformer_of_timm_passes_and_is_replaced():
    timm = Library("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10).to(torch.bfloat16)
    images = torch.randn(1, 3, 224, 224, dtype=torch.bfloat16)

    found = check_model(model, lambda: model(images).float().square().mean())

    assert [call.workload.q_len for call in found.calls] == [197, 197]
    assert check_model(model, lambda: model(images).float().square().mean(), "math").passed


def test_sinks_that_get_no_gradient_are_found_and_so_are_those_of_other_heads(monkeypatch):
    model, step = case("gpt-oss", "eager", torch.float32)
    module = sys.modules[type(model).__module__]
    eager = module.eager_attention_forward

    def detached(layer, *args, **options):
        like = {"sinks": layer.sinks.detach(), "num_key_value_groups": layer.num_key_value_groups, "training": False}
        return eager(SimpleNamespace(**like), *args, **options)

    monkeypatch.setattr(module, "eager_attention_forward", detached)
    assert "its sinks get no gradient, and q, k or v get one" in judge_model(model, step, scatter=0).message

    own = model.model.layers[0].self_attn.sinks
    asked = [SimpleNamespace(sinks=sinks) for sinks in (own + torch.arange(4), own.clone(), None)]
    call = SimpleNamespace(arguments={"module": model.model.layers[0].self_attn})
    assert [other_sinks(one, call) for one in asked] == ["its sinks are not those of its module", "", ""]
