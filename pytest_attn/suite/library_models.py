"""Models of timm, transformers and diffusers with random weights: layers, widths and vocabularies are shrunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

#: what models of transformers have in common here
_SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_WINDOW = {"sliding_window": 16}
_ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: by name: class, what it has besides, implementation
_LANGUAGE: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "llama": ("Llama", {}, "sdpa"),
    "qwen3": ("Qwen3", {}, "sdpa"),
    "mistral": ("Mistral", _WINDOW, "sdpa"),
    "gemma2": ("Gemma2", {**_WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}, "eager"),
    "gemma3": (
        "Gemma3",
        {**_WINDOW, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING, "num_hidden_layers": 3},
        "sdpa",
    ),
    "gpt-oss": ("GptOss", {**_WINDOW, **_EXPERTS}, "eager"),
}
Step = Callable[[], Any]


def library_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    """Return a model and its step; skips the test where the library is not installed."""
    torch.manual_seed(0)
    made = _OTHERS.get(name)
    return _language(name, device, dtype) if made is None else made(device, dtype)


def language_model(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a model of tokens in eval mode."""
    torch.manual_seed(0)
    return _language(name, device, dtype)[0].eval()


def token_ids(device: torch.device, tokens: int = 48) -> torch.Tensor:
    """Return token ids, (2, tokens), always the same."""
    return torch.randint(128, (2, tokens), generator=torch.Generator().manual_seed(1)).to(device)


def cache_of(kind: str, model: Any, tokens: int) -> Any:
    """Return an empty cache of a model of transformers: dynamic, static, or sliding, which drops what leaves the window."""
    transformers = Library("transformers")
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=tokens)
    return transformers.DynamicCache(**({"config": model.config} if kind == "sliding" else {}))


class Library:
    """A library that imports its parts when they are first asked for; whatever cannot be imported skips the test."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module = self._imported(lambda: import_module(name))

    def __getattr__(self, part: str) -> Any:
        return self._imported(lambda: getattr(self._module, part))

    def _imported(self, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except (ImportError, RuntimeError) as error:  # as of a torchvision that is built for another torch
            found = error
        if isinstance(found, ModuleNotFoundError) and found.name == self._name:
            reason = f"{self._name} is not installed; pip install {self._name}"
        else:
            reason = f"{self._name} cannot be imported: {_first_cause(found).splitlines()[0]}"
        pytest.skip(reason, allow_module_level=True)


def _first_cause(error: BaseException) -> str:
    while earlier := error.__cause__ or error.__context__:
        error = earlier
    return f"{type(error).__name__}: {error}"


def _sharpened(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Enlarge the projections of q and k: those of random weights make all keys count alike, which hides faults."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "to_q.weight", "to_k.weight")):
                parameter *= 8
    return model.to(device, dtype)


def _language(name: str, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    transformers = Library("transformers")
    kind, options, implementation = _LANGUAGE[name]
    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    config = config_class(**{**_SMALL, **options, "attn_implementation": implementation})
    model = _sharpened(getattr(transformers, f"{kind}ForCausalLM")(config), device, dtype)
    ids = token_ids(device)
    return model, lambda: model(input_ids=ids, labels=ids, use_cache=False)


def _modernbert(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    transformers = Library("transformers")
    small = {name: value for name, value in _SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    options = {**small, **tokens, "num_hidden_layers": 3, "local_attention": 16, "attn_implementation": "sdpa"}
    model = _sharpened(transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**options)), device, dtype)
    ids = token_ids(device)
    mask = (torch.arange(ids.shape[1], device=device) < torch.tensor([[48], [30]], device=device)).long()
    return model, lambda: model(input_ids=ids, attention_mask=mask, labels=ids)


def _siglip(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    transformers = Library("transformers")
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.SiglipVisionConfig(**small, image_size=96, patch_size=16, attn_implementation="sdpa")
    model = _sharpened(transformers.SiglipVisionModel(config), device, dtype)
    images = _images(96, device, dtype)
    # not the mean square of what a normalization returns: that is the same whatever it is made of, and has no gradient
    weights = torch.randn(36, 64, generator=torch.Generator().manual_seed(2)).to(device)
    return model, lambda: (model(pixel_values=images).last_hidden_state.float() * weights).sum()


def _whisper(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    transformers = Library("transformers")
    layers = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))}
    widths = {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 128, "num_mel_bins": 16}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    config = transformers.WhisperConfig(
        **layers, **widths, **tokens, max_source_positions=100, max_target_positions=48, attn_implementation="sdpa"
    )
    model = _sharpened(transformers.WhisperForConditionalGeneration(config), device, dtype)
    sound = torch.randn(2, 16, 200, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    ids = token_ids(device, 24)
    return model, lambda: model(input_features=sound, decoder_input_ids=ids, labels=ids, use_cache=False)


def _timm(device: torch.device, dtype: torch.dtype, side: int = 224, has_class: bool = True) -> tuple[nn.Module, Step]:
    """Two layers of a vision transformer over patches of 16, with or without a class token; ViT-B/16 but for its width."""
    timm = Library("timm")
    more = {} if has_class else {"class_token": False, "global_pool": "avg"}
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10, img_size=side, **more).to(device, dtype)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[: 2 * model.embed_dim] *= 8
    images = _images(side, device, dtype)
    return model, lambda: model(images).float().square().mean()


def _flux(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    diffusers = Library("diffusers")
    sizes = {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    more = {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    model = _sharpened(diffusers.FluxTransformer2DModel(**sizes, **more), device, dtype)
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    batch = {
        "hidden_states": drawn(1, 64, 16),
        "encoder_hidden_states": drawn(1, 24, 32),
        "pooled_projections": drawn(1, 32),
        "timestep": torch.ones(1, device=device, dtype=dtype),
        "img_ids": torch.zeros(64, 3, device=device, dtype=dtype),
        "txt_ids": torch.zeros(24, 3, device=device, dtype=dtype),
    }
    return model, lambda: model(**batch).sample.float().square().mean()


def _wan(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    """Two blocks over a video: each attends to itself, and to a text."""
    diffusers = Library("diffusers")
    if not hasattr(diffusers, "WanTransformer3DModel"):
        pytest.skip("diffusers is older than its Wan")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    more = {"text_dim": 32, "freq_dim": 32, "ffn_dim": 64, "rope_max_seq_len": 32}
    model = _sharpened(diffusers.WanTransformer3DModel(**sizes, **more), device, dtype)
    generator = torch.Generator().manual_seed(1)
    batch = {
        "hidden_states": torch.randn(1, 4, 3, 12, 12, generator=generator).to(device, dtype),
        "encoder_hidden_states": torch.randn(1, 20, 32, generator=generator).to(device, dtype),
        "timestep": torch.ones(1, device=device, dtype=torch.long),
    }
    return model, lambda: model(**batch).sample.float().square().mean()


def _images(side: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1)).to(device, dtype)


#: by name: those that take no tokens
_OTHERS: Mapping[str, Callable[[torch.device, torch.dtype], tuple[nn.Module, Step]]] = {
    "timm-vit-197": _timm,
    "timm-vit-196": partial(_timm, has_class=False),
    "timm-vit-3137": partial(_timm, side=896),
    "timm-vit-3136": partial(_timm, side=896, has_class=False),
    "flux": _flux,
    "wan": _wan,
    "modernbert": _modernbert,
    "siglip": _siglip,
    "whisper": _whisper,
}
