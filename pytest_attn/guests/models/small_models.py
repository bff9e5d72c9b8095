"""Small models: of plain torch, each of which asks attention for something else, and of timm, transformers and diffusers."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: by how much the projections of q and k are larger than torch makes them: else all keys count alike, and faults hide
_SHARPER = 6.0
_SIDE, _KERNEL, _SOFTCAP, _WINDOW = 12, 5, 20.0, 33


class Attention(nn.Module):
    """Projections around an attention function of (q, k, v), (batch, heads, rows, dim)."""

    def __init__(self, attend: Attend, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        head_dim = dim // heads
        self.q, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k, self.v = nn.Linear(dim, kv_heads * head_dim), nn.Linear(dim, kv_heads * head_dim)
        self.heads, self.kv_heads, self.attend = heads, kv_heads, attend
        with torch.no_grad():
            self.q.weight *= _SHARPER
            self.k.weight *= _SHARPER

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over x, (batch, rows, dim)."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for p in (self.k, self.v))
        out: torch.Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer's block, norms first."""

    def __init__(self, attend: Attend, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(attend, dim, heads, kv_heads)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, (batch, rows, dim), after attention and the perceptron."""
        x = x + self.attn(self.norm(x))
        out: torch.Tensor = x + self.mlp(x)
        return out


def _full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _grouped_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _soft_capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _flex(q, k, v, score_mod=lambda score, b, h, i, j: _SOFTCAP * torch.tanh(score / _SOFTCAP))


def _neighborhood(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each place of an image sees the 5 x 5 places around it, or fewer at its borders."""

    def near(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        rows, columns = (i // _SIDE - j // _SIDE).abs(), (i % _SIDE - j % _SIDE).abs()
        return (rows <= _KERNEL // 2) & (columns <= _KERNEL // 2)

    places = q.shape[-2]
    return _flex(q, k, v, block_mask=flex.create_block_mask(near, None, None, places, places, device=str(q.device)))


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # compiling takes half a minute
        out: Any = flex.flex_attention(q, k, v, **options)  # by its module: names of this package are not looked at
    found: torch.Tensor = out
    return found


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    at = torch.arange(q.shape[-2], device=q.device)
    behind = at[:, None] - at
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind < _WINDOW))


#: by name: attention, rows, width, heads, heads of k and v, whether it has a backward pass on a CPU
_MODELS: dict[str, tuple[Attend, int, int, int, int, bool]] = {
    "vit": (_full, 197, 128, 2, 2, True),
    "vit-196": (_full, 196, 128, 2, 2, True),
    "vit-3137": (_full, 3137, 128, 2, 2, True),
    "vit-3136": (_full, 3136, 128, 2, 2, True),
    "llama": (_grouped_causal, 128, 128, 4, 2, True),
    "mistral": (_windowed, 128, 128, 2, 2, True),
    "softcap": (_soft_capped, _SIDE**2, 64, 2, 2, False),
    "neighborhood": (_neighborhood, _SIDE**2, 64, 2, 2, False),
}


def torch_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a model of two blocks, and its step on a batch that is always the same."""
    attend, rows, dim, heads, kv_heads, has_backward = _MODELS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(attend, dim, heads, kv_heads) for _ in range(2)), nn.Linear(dim, 10)).to(device, dtype)
    model.requires_grad_(has_backward or device.type != "cpu")  # flex_attention has no gradients on a CPU
    x = torch.randn(2, rows, dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    labels = torch.arange(2 * rows, device=device) % 10
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1).float(), labels)


# -- of libraries, with random weights: layers, widths and vocabularies are shrunk --------------------------------------------

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
_SLIDING = {"sliding_window": 16}
_ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: by name: class, what it has besides, implementation
_LANGUAGE: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "llama": ("Llama", {}, "sdpa"),
    "qwen3": ("Qwen3", {}, "sdpa"),
    "mistral": ("Mistral", _SLIDING, "sdpa"),
    "gemma2": ("Gemma2", {**_SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}, "eager"),
    "gemma3": (
        "Gemma3",
        {**_SLIDING, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING, "num_hidden_layers": 3},
        "sdpa",
    ),
    "gpt-oss": ("GptOss", {**_SLIDING, **_EXPERTS}, "eager"),
}
Step = Callable[[], Any]


def library_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    """Return a model and its step; skips the test where the library is not installed."""
    torch.manual_seed(0)
    return _OTHERS[name](device, dtype) if name in _OTHERS else _language(name, device, dtype)


def language_model(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a model of tokens in eval mode."""
    torch.manual_seed(0)
    return _language(name, device, dtype)[0].eval()


def token_ids(device: torch.device, tokens: int = 48) -> torch.Tensor:
    """Return token ids, (2, tokens), always the same."""
    return torch.randint(128, (2, tokens), generator=torch.Generator().manual_seed(1)).to(device)


def decoding(model: Any, ids: torch.Tensor, kind: str) -> Callable[[], torch.Tensor]:
    """Return a step that reads 40 tokens at once, then four one by one, through a cache: dynamic, static or sliding."""
    transformers = Library("transformers")
    named = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # the older name
    empty = partial(transformers.DynamicCache, **({"config": model.config} if kind == "sliding" else {}))
    if kind == "static":
        empty = partial(transformers.StaticCache, config=model.config, max_cache_len=ids.shape[1])

    def step() -> torch.Tensor:
        with torch.no_grad():
            cache, logits = {named: empty()}, []
            for start, end in ((0, 40), *((at, at + 1) for at in range(40, 44))):
                found = model(input_ids=ids[:, start:end], use_cache=True, **cache)
                logits.append(found.logits)
        return torch.cat(logits, 1)

    return step


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
            if isinstance(error, ModuleNotFoundError) and error.name == self._name:
                reason = f"{self._name} is not installed; pip install {self._name}"
            else:
                first: BaseException = error
                while earlier := first.__cause__ or first.__context__:
                    first = earlier
                reason = f"{self._name} cannot be imported: {type(first).__name__}: {first}".splitlines()[0]
        pytest.skip(reason, allow_module_level=True)


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
    # without its head, of which the loss has nothing, and whose attention torch writes out
    size = {"image_size": 96, "patch_size": 16, "vision_use_head": False}
    config = transformers.SiglipVisionConfig(**small, **size, attn_implementation="sdpa")
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
