"""Models of transformers, each small, with random weights; skipped where it is not installed."""

import pytest
import torch

from pytest_attn import Causal, Window, capture, check_model
from pytest_attn.models.check import judge_model
from pytest_attn.suite.models import Library

transformers = Library("transformers")
if not hasattr(transformers.modeling_utils.AttentionInterface, "get_interface"):
    pytest.skip("transformers is older than its get_interface", allow_module_level=True)

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attn_implementation": "sdpa",
}
MODELS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "gemma2": ("Gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gpt-oss": ("GptOss", {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
TOKENS = 48


def case(name, implementation, dtype=torch.bfloat16, padding=None):
    """Return a sharpened model and its step. padding: "left" or "right"."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options, "attn_implementation": implementation})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "q_proj.weight" in parameter_name or "k_proj.weight" in parameter_name:
                parameter *= 8
    ids = torch.randint(128, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    if padding:
        mask[1, slice(0, 15) if padding == "left" else slice(30, None)] = 0
    return model, lambda: model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False)


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


@pytest.mark.parametrize("registered", [_without_sinks], indirect=True)
def test_sinks_that_are_not_passed_are_found(registered):
    model, step = case("gpt-oss", "eager")
    model.config._attn_implementation = registered
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(2.0)

    found = judge_model(model, step)

    assert not any(call.passed for call in found.calls)


def test_a_vision_transformer_of_timm_passes_and_is_replaced():
    timm = Library("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10).to(torch.bfloat16)
    images = torch.randn(1, 3, 224, 224, dtype=torch.bfloat16)

    found = check_model(model, lambda: model(images).float().square().mean())

    assert [call.workload.q_len for call in found.calls] == [197, 197]
    assert check_model(model, lambda: model(images).float().square().mean(), "math").passed
