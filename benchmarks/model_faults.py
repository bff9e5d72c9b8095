"""Faults planted in what models hand on, and by which question each is found: attn_model.check, or check_invariants.

    python benchmarks/model_faults.py [--only llama,gpt-oss] [--faults window,cache] [--dtype float32]

Tiny models of transformers, dense, windowed and with experts, and of timm and diffusers where these are installed: of text,
images and videos. Each fault is planted at one seam: what a layer's attention is handed, projects or returns, what its cache
returns, the positions, or the function that computes attention. Its honest twin has the same seam, which changes nothing.
Printed: fault by fault by which question it is found, the shares, and the false alarms of the twins.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import transformers
from transformers import cache_utils, masking_utils, modeling_utils

from pytest_attn.guests.models.check_model import judge_model
from pytest_attn.guests.models.token_invariants import judge_model_invariants

TOKENS, WINDOW, VOCABULARY = 40, 12, 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
SLIDING = {"sliding_window": WINDOW}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
#: whose second layer, where faults are planted, has a window
SECOND = {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]}
FOUR = {"num_hidden_layers": 4}
#: two layers with a window, of which the second is one, and two without
HALF = {**SLIDING, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]}
CLASSES = {"cls_token_id": 1, "sep_token_id": 1}
_OF_STACKS = {"layers": 4, "ffn_dim": 64, "attention_heads": 4}
_PER_STACK = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in _OF_STACKS.items()}
DECODER = {**_PER_STACK, "d_model": 64, "num_layers": 4, "num_decoder_layers": 4, "decoder_start_token_id": 1}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: by name: class, head, what its configuration says besides
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", {}),
    "qwen3": ("Qwen3", "ForCausalLM", {}),
    "phi3": ("Phi3", "ForCausalLM", {"sliding_window": None}),
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "roberta": ("Roberta", "ForMaskedLM", {"max_position_embeddings": 80, "type_vocab_size": 1}),
    "mistral": ("Mistral", "ForCausalLM", SLIDING),
    "gemma2": ("Gemma2", "ForCausalLM", {**SECOND, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", "ForCausalLM", {**MIXED, "query_pre_attn_scalar": 16}),
    "mixtral": ("Mixtral", "ForCausalLM", EXPERTS),
    "qwen3-moe": ("Qwen3Moe", "ForCausalLM", EXPERTS),
    "gpt-oss": ("GptOss", "ForCausalLM", {**SECOND, **EXPERTS}),
    "llama-4": ("Llama", "ForCausalLM", FOUR),
    "qwen3-4": ("Qwen3", "ForCausalLM", FOUR),
    "olmo2-4": ("Olmo2", "ForCausalLM", FOUR),
    "bert-4": ("Bert", "ForMaskedLM", FOUR),
    "modernbert": ("ModernBert", "ForMaskedLM", {**FOUR, "num_hidden_layers": 6, "local_attention": 2 * WINDOW, **CLASSES}),
    "gemma2-4": ("Gemma2", "ForCausalLM", {**FOUR, **HALF, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3-4": ("Gemma3", "ForCausalLM", {**FOUR, **HALF, "query_pre_attn_scalar": 16}),
    "t5": ("T5", "ForConditionalGeneration", {**FOUR, **DECODER, "d_kv": 16, "d_ff": 64, "num_heads": 4, "dropout_rate": 0.0}),
    "bart": ("Bart", "ForConditionalGeneration", {**FOUR, **DECODER}),
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {**FOUR, **DECODER, "num_mel_bins": 16, "max_source_positions": TOKENS},
    ),
}
Change = Callable[..., Any]


def vit() -> Any:
    options = {"depth": 4, "num_classes": 10, "img_size": 64, "embed_dim": 64, "num_heads": 4, "qk_norm": True}
    return import_module("timm").create_model("vit_tiny_patch16_224", **options)


def wan() -> Any:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 4}
    return import_module("diffusers").WanTransformer3DModel(**sizes, text_dim=32, freq_dim=32, ffn_dim=64, rope_max_seq_len=32)


def pixart() -> Any:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 4, "cross_attention_dim": 64}
    more = {"sample_size": 16, "patch_size": 2, "caption_channels": 32, "use_additional_conditions": False}
    return import_module("diffusers").PixArtTransformer2DModel(**sizes, **more)


def paligemma() -> Any:
    text = {**SIZES, **HEADS, "num_hidden_layers": 6, "model_type": "gemma"}
    vision = {
        **SIZES,
        **HEADS,
        "model_type": "siglip_vision_model",
        "image_size": 32,
        "patch_size": 8,
        "vision_use_head": False,
    }
    tokens = {"image_token_id": VOCABULARY - 1, "pad_token_id": 0, "projection_dim": 64}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, **tokens, attn_implementation="eager")
    return transformers.PaliGemmaForConditionalGeneration(config)


#: models of more than text, by name, and what has to be installed
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "vit": (vit, "timm"),
    "wan": (wan, "diffusers"),
    "pixart": (pixart, "diffusers"),
    "paligemma": (paligemma, "transformers"),
}


def build(name: str, dtype: torch.dtype, sharper: float = 8) -> Any:
    """Return a model in eval mode. sharper: by how much its projections of q and k are enlarged, to tell keys apart."""
    torch.manual_seed(0)
    if name in OTHERS:
        model = OTHERS[name][0]()
    else:
        kind, head, options = MODELS[name]
        config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
        how = "sdpa" if name in ("bart", "whisper") else "eager"
        model = getattr(transformers, f"{kind}{head}")(config_class(**{**SIZES, **HEADS, **options}, attn_implementation=how))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("q_proj.w", "k_proj.w", "query.w", "key.w", "qkv_proj.w", "c_attn.w")):
                parameter *= sharper
    return model.eval().to(dtype)


def ids_of(batch: int = 3, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(2, VOCABULARY - 1, (batch, tokens), generator=torch.Generator().manual_seed(1))


def inputs_of(name: str, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a model is given, by name."""
    ids, at = ids_of(batch), torch.arange(batch) + 5

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    if name == "vit":
        return {"x": drawn(3, 64, 64)}
    if name == "wan":
        return {"hidden_states": drawn(4, 3, 8, 8), "timestep": at, "encoder_hidden_states": drawn(12, 32)}
    if name == "pixart":
        given = {"hidden_states": drawn(4, 16, 16), "timestep": at, "encoder_hidden_states": drawn(12, 32)}
        mask, more = (torch.arange(12) < 14 - at[:, None]).long(), {"resolution": None, "aspect_ratio": None}
        return {**given, "encoder_attention_mask": mask, "added_cond_kwargs": more}
    if name == "paligemma":
        ids[:, :16] = VOCABULARY - 1
        kinds = (torch.arange(TOKENS) >= TOKENS - 10).long().expand(batch, -1)
        return {"input_ids": ids, "pixel_values": drawn(3, 32, 32), "token_type_ids": kinds}
    if name == "whisper":
        return {"input_features": drawn(16, 2 * TOKENS), "decoder_input_ids": ids_of(batch, 24)}
    return {"input_ids": ids, **({"decoder_input_ids": ids_of(batch, 24)} if name in ("t5", "bart") else {})}


# -- seams ---------------------------------------------------------------------------------------------------------------


def attentions(model: Any) -> list[Any]:
    """Return the attention module of each layer."""
    return _named(model, ("self_attn", ".attn", "attention.self", "attn1", "SelfAttention"))


def crossings(model: Any) -> list[Any]:
    """Return the module of each layer that attends to another sequence."""
    return _named(model, ("encoder_attn", "EncDecAttention", "attn2"))


def _named(model: Any, ends: tuple[str, ...]) -> list[Any]:
    return [part for name, part in model.named_modules() if name.endswith(ends) and "vision" not in name]


@contextlib.contextmanager
def attention(model: Any, change: Change, of: Callable[[Any], list[Any]] = attentions) -> Iterator[None]:
    """Change what the second layer's attention is handed: change(its arguments by name, the model)."""
    part = of(model)[1]
    forward, signature = part.forward, inspect.signature(part.forward)

    def handed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        change(bound.arguments, model)
        return forward(*bound.args, **bound.kwargs)

    part.forward = handed
    yield
    del part.forward


@contextlib.contextmanager
def bias(model: Any, change: Change) -> Iterator[None]:
    """Change the bias by positions that the second layer's attention adds, not the one that it hands on."""
    part = attentions(model)[1]
    forward = part.forward

    def handed(*args: Any, position_bias: Any = None, **kwargs: Any) -> Any:
        found, _, *rest = forward(*args, position_bias=change(position_bias), **kwargs)
        return found, position_bias, *rest

    part.forward = handed
    yield
    del part.forward


@contextlib.contextmanager
def whole(model: Any, change: Change) -> Iterator[None]:
    """Change the model itself, at once: change(model)."""
    change(model)
    yield


def crossing(model: Any, change: Change) -> contextlib.AbstractContextManager[None]:
    """Change what the second layer's cross-attention is handed, as `attention` does."""
    return attention(model, change, crossings)


@contextlib.contextmanager
def result(model: Any, change: Change) -> Iterator[None]:
    """Change what the second layer's attention returns: change(result, its first argument) -> result."""

    def returned(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return (change(found[0], given), *found[1:]) if isinstance(found, tuple) else change(found, given)

    hook = attentions(model)[1].register_forward_hook(returned, with_kwargs=True)
    yield
    hook.remove()


@contextlib.contextmanager
def projection(model: Any, change: Change) -> Iterator[None]:
    """Change what the second layer's attention projects to k and v: change(projected) -> projected."""
    names = ("k_proj", "v_proj", "to_k", "to_v", "qkv", "key", "value", "attn.Wqkv")
    parts = [part for name, part in attentions(model)[1].named_modules() if name in names]
    hooks = [part.register_forward_hook(lambda _, __, found: change(found)) for part in parts]
    yield
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def merging(model: Any, change: Change) -> Iterator[None]:
    """Change what the second layer's attention projects at last, (batch, tokens, heads * dim)."""
    parts = [part for name, part in attentions(model)[1].named_modules() if name in ("o_proj", "out_proj", "proj", "to_out.0")]
    hook = parts[0].register_forward_pre_hook(lambda _, args: (change(args[0]),))
    yield
    hook.remove()


@contextlib.contextmanager
def cache(model: Any, change: Change) -> Iterator[None]:
    """Change what the second layer's cache returns: change(k, v, new tokens, the cache) -> k, v."""
    del model
    update = cache_utils.Cache.update

    def updated(self: Any, k: Any, v: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        found = update(self, k, v, layer_idx, *args, **kwargs)
        return change(*found, k.shape[2], self) if layer_idx == 1 else found

    cache_utils.Cache.update = updated
    yield
    cache_utils.Cache.update = update


@contextlib.contextmanager
def positions(model: Any, change: Change) -> Iterator[None]:
    """Change the positions of tokens: change(positions) -> positions."""
    found = [part for name, part in model.named_modules() if name.endswith(("rotary_emb", "wpe", "position_embeddings"))]
    for part in found:
        forward = part.forward

        def moved(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            if "position_ids" in kwargs:
                kwargs["position_ids"] = change(kwargs["position_ids"])
            else:
                at = 0 if len(args) == 1 else 1
                args = (*args[:at], change(args[at]), *args[at + 1 :])
            return forward(*args, **kwargs)

        part.forward = moved
    yield
    for part in found:
        del part.forward


@contextlib.contextmanager
def function(model: Any, change: Change) -> Iterator[None]:
    """Compute attention by a function: change(by name its tensors and options), which it may change, before softmax(...) v."""

    def planted(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any) -> Any:
        given = {"q": query, "k": key, "v": value, "mask": attention_mask, "groups": query.shape[1] // key.shape[1], **options}
        given.setdefault("scaling", query.shape[-1] ** -0.5)
        change(given, module)
        q, k, v, mask = (given[name] for name in ("q", "k", "v", "mask"))
        within = given.get("dtype", torch.float32)
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(given["groups"], 1) for t in (k, v))
        scores = q.to(within) @ k.to(within).transpose(2, 3) * given["scaling"]
        if cap := given.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        if (sinks := given.get("s_aux")) is not None:
            scores = torch.cat([scores, sinks.to(within).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return (weights @ v.to(within)).to(q.dtype).transpose(1, 2).contiguous(), None

    modeling_utils.AttentionInterface.register("planted", planted)
    masking_utils.AttentionMaskInterface.register("planted", masking_utils.eager_mask)
    model.set_attn_implementation("planted")
    yield
    model.set_attn_implementation("eager")


@contextlib.contextmanager
def router(model: Any, change: Change) -> Iterator[None]:
    """Change what the first layer's router is handed: change(hidden states (tokens, width)) -> hidden states."""
    part = next(part for name, part in model.named_modules() if name.endswith(("mlp.gate", "mlp.router")))
    forward = part.forward
    part.forward = lambda x, *args, **kwargs: forward(change(x), *args, **kwargs)
    yield
    del part.forward


# -- what is done there ------------------------------------------------------------------------------------------------------


def masked(how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    """Return a change of the mask: how(visible, how far each key lies behind its query) -> visible."""

    def change(given: dict[str, Any], of: Any) -> None:
        del of
        name = "attention_mask" if "attention_mask" in given else "mask"
        mask = given.get(name)
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
            return
        rows, keys = mask.shape[-2:]
        behind = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
        visible = how(mask if mask.dtype == torch.bool else mask == 0, behind).expand_as(mask)
        low = torch.zeros(mask.shape, dtype=mask.dtype).masked_fill(~visible, -torch.inf) if mask.dtype != torch.bool else None
        given[name] = visible if low is None else low.clamp(min=torch.finfo(mask.dtype).min)

    return change


def setting(**values: Any) -> Change:
    """Return a change that sets arguments."""

    def change(given: dict[str, Any], of: Any) -> None:
        del of
        given.update(values)

    return change


def attribute(name: str, of: Callable[[Any], Any], layers: slice = slice(1, 2), parts: Any = attentions) -> Change:
    """Return a change of an attribute of the attention of the second layer, or of others, made once."""

    def change(given: dict[str, Any], model: Any) -> None:
        del given
        for part in parts(model)[layers]:
            if not hasattr(part, "was"):
                part.was = getattr(part, name)
                setattr(part, name, of(part.was))

    return change


def without_norms(model: Any) -> None:
    """Let no layer run what normalizes q and k, as where its code knows it by another name."""
    for part in attentions(model):
        for name in ("q_norm", "k_norm", "norm_q", "norm_k"):
            if isinstance(norm := getattr(part, name, None), torch.nn.Module):
                norm.forward = lambda x: x


def other_memory(of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    """Return a change of the sequence that cross-attention is handed: of(it, the layer's own states)."""

    def change(given: dict[str, Any], model: Any) -> None:
        del model
        name = "key_value_states" if "key_value_states" in given else "encoder_hidden_states"
        given[name] = of(given[name], given["hidden_states"])

    return change


def causal_memory(given: dict[str, Any], model: Any) -> None:
    del model
    rows, keys = given["hidden_states"].shape[1], given["encoder_hidden_states"].shape[1]
    given["attention_mask"] = torch.ones(rows, keys).tril().log()[None, None]


def padding_ignored_where_it_decodes(given: dict[str, Any], model: Any) -> None:
    del model
    name = "mask" if "mask" in given else "attention_mask"
    if given["hidden_states"].shape[1] == 1:
        given[name] = None


def on_queries(given: dict[str, Any], model: Any) -> None:
    del model
    mask = given.get("attention_mask")
    given["attention_mask"] = None if mask is None else mask.expand(-1, -1, mask.shape[-1], -1).mT


def weaker(given: dict[str, Any], model: Any) -> None:
    """Hide keys by -10, as where the lowest number was meant for probabilities, or was divided by the scale."""
    del model
    mask = given.get("attention_mask")
    given["attention_mask"] = None if mask is None else mask.float().clamp(min=-10)


def interleaved(given: dict[str, Any], model: Any) -> None:
    """Rotate neighbors by angles that are meant for halves."""
    del model
    given["position_embeddings"] = tuple(
        t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in given["position_embeddings"]
    )


def unmerged(x: torch.Tensor) -> torch.Tensor:
    """Return what the heads give as it is where nobody swaps heads and rows before they are merged."""
    return x.unflatten(-1, (4, -1)).transpose(1, 2).reshape(x.shape)


def doubled(given: dict[str, Any], module: Any) -> None:
    del module
    if given.get("s_aux") is not None:
        given["s_aux"] = 2 * given["s_aux"] - given["s_aux"].detach()


def later(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Change:
    """Return a change of what a cache returns once it decodes."""
    return lambda k, v, new, of: change(k, v) if new == 1 else (k, v)


def blank(t: torch.Tensor, at: int) -> torch.Tensor:
    t = t.clone()
    t[:, :, at] = 0
    return t


def kept_forever(kept: list[torch.Tensor]) -> Change:
    """Return a change by which keys of the first call stay, as where a cache is not emptied."""

    def change(given: dict[str, Any], module: Any) -> None:
        del module
        if not kept:
            kept.append(given["k"][:1, :, :8].clone())
        elif given["k"].shape[2] >= 8:
            given["k"] = torch.cat([kept[0].expand(len(given["k"]), -1, -1, -1), given["k"][:, :, 8:]], 2)

    return change


def in_second_layer(change: Change) -> Change:
    """Return a change of a function in the second layer only."""
    return lambda given, module: change(given, module) if getattr(module, "layer_idx", 0) == 1 else None


def scaled(times: float) -> Change:
    """Return a change of a function's scale."""

    def change(given: dict[str, Any], module: Any) -> None:
        del module
        given["scaling"] = given["scaling"] * times

    return change


def in_the_dtype(times: float) -> Change:
    """Return a change by which a function rounds all to the dtype, as eager code does, and its scale is off as well."""

    def change(given: dict[str, Any], module: Any) -> None:
        scaled(times)(given, module)
        given["dtype"] = given["q"].dtype

    return change


def in_blocks(given: dict[str, Any], module: Any) -> None:
    del module
    given["k"], given["v"] = (t.repeat(1, given["groups"], 1, 1) for t in (given["k"], given["v"]))


def rotated_later(given: dict[str, Any], model: Any) -> None:
    """Rotate by the angle of one position more where it decodes."""
    cos, sin = given["position_embeddings"]
    if cos.shape[1] == 1:
        at = model.get_decoder().rotary_emb.inv_freq
        step = torch.cat([at, at])[: cos.shape[-1]].to(cos.dtype)
        given["position_embeddings"] = cos * step.cos() - sin * step.sin(), sin * step.cos() + cos * step.sin()


class Fault(NamedTuple):
    """A change at a seam, and the models in which it is planted."""

    name: str
    seam: Callable[[Any, Change], contextlib.AbstractContextManager[None]]
    change: Callable[[], Change]
    models: str


_WIDER, _NARROWER = (
    masked(lambda seen, behind, by=by: seen & (behind < WINDOW - 1) if by else seen | (behind == WINDOW)) for by in (0, 1)
)
FAULTS = (
    Fault(
        "mask forgotten",
        attention,
        lambda: setting(attention_mask=None),
        "llama phi3 gpt2 mistral gemma3 mixtral qwen3-moe gpt-oss",
    ),
    Fault("next token seen", attention, lambda: masked(lambda seen, behind: seen | (behind == -1)), "qwen3 gemma2 gpt-oss"),
    Fault(
        "own token not seen",
        attention,
        lambda: masked(lambda seen, behind: seen & (behind > 0) | (behind == behind.max())),
        "llama mixtral",
    ),
    Fault("padding ignored in a layer", attention, lambda: masked(lambda seen, behind: behind >= 0), "llama gpt2 qwen3-moe"),
    Fault("padding ignored in a layer", attention, lambda: masked(lambda seen, behind: behind == behind), "roberta"),
    Fault(
        "documents see each other in a layer",
        attention,
        lambda: masked(lambda seen, behind: behind >= 0),
        "qwen3 phi3 mixtral",
    ),
    Fault("window forgotten", attention, lambda: masked(lambda seen, behind: behind >= 0), "mistral gemma2 gpt-oss"),
    Fault("window + 1", attention, lambda: _WIDER, "mistral gemma2 gpt-oss"),
    Fault("window - 1", attention, lambda: _NARROWER, "mistral gemma2 gpt-oss"),
    Fault("window of another layer", attention, lambda: masked(lambda seen, behind: seen & (behind < WINDOW)), "gemma3"),
    Fault(
        "causal from the top left",
        attention,
        lambda: masked(lambda seen, behind: seen & (behind - behind[0, 0] >= 0) if len(behind) > 1 else seen),
        "llama qwen3-moe",
    ),
    Fault(
        "scale 5 % off in a layer",
        attention,
        lambda: attribute("scaling", lambda was: was * 1.05),
        "llama qwen3 mistral gemma2 qwen3-moe gpt-oss",
    ),
    Fault(
        "scale 5 % off in all layers",
        attention,
        lambda: attribute("scaling", lambda was: was * 1.05, slice(None)),
        "llama gpt-oss",
    ),
    Fault("soft-cap dropped in a layer", attention, lambda: attribute("attn_logit_softcapping", lambda was: None), "gemma2"),
    Fault("RoPE one off where it decodes", attention, lambda: rotated_later, "llama mistral mixtral"),
    Fault(
        "newest key is stale",
        cache,
        lambda: later(lambda k, v: (torch.cat([k[:, :, :-1], k[:, :, -2:-1]], 2), v)),
        "llama qwen3 gemma2 mixtral gpt-oss gpt2",
    ),
    Fault("written one slot late", cache, lambda: later(lambda k, v: (k.roll(1, 2), v.roll(1, 2))), "gpt2"),
    Fault("values one slot late", cache, lambda: later(lambda k, v: (k, v.roll(1, 2))), "llama mistral qwen3-moe"),
    Fault("first key forgotten", cache, lambda: later(lambda k, v: (blank(k, 0), v)), "phi3 mixtral"),
    Fault("heads of k and v swapped", cache, lambda: later(lambda k, v: (k.flip(1), v.flip(1))), "llama gpt-oss"),
    Fault("sequences swapped", cache, lambda: later(lambda k, v: (k.flip(0), v.flip(0))), "qwen3 mixtral"),
    Fault("keys of another call stay", function, lambda: in_second_layer(kept_forever([])), "llama mixtral"),
    Fault(
        "position off by one where it decodes",
        positions,
        lambda: lambda at: at + 1 if at.shape[-1] == 1 else at,
        "llama gpt2 mistral qwen3-moe gpt-oss",
    ),
    Fault(
        "positions from 0 in each call",
        positions,
        lambda: lambda at: at - at[..., :1] if at.shape[-1] < 5 else at,
        "qwen3 mixtral",
    ),
    Fault("positions count padding", positions, lambda: lambda at: torch.arange(at.shape[-1]).expand_as(at), "gpt2"),
    Fault("positions stop at 32", positions, lambda: lambda at: at.clamp(max=31), "gpt2 llama"),
    Fault("scale 5 % off in the function", function, lambda: in_second_layer(scaled(1.05)), "llama mistral mixtral"),
    Fault("scale 1 % off in the function", function, lambda: in_second_layer(scaled(1.01)), "llama phi3 gpt2 gemma2 gpt-oss"),
    *(
        Fault(
            f"eager in the dtype, scale {times:.3g} times",
            function,
            lambda times=times: in_second_layer(in_the_dtype(times)),
            "llama qwen3 phi3 gpt2 gemma2 gpt-oss",
        )
        for times in (1.05, 1.02, 1.01)
    ),
    Fault("groups in the wrong order", function, lambda: in_second_layer(in_blocks), "qwen3 mixtral"),
    Fault("mask dropped by the function", function, lambda: in_second_layer(setting(mask=None)), "llama gemma3 qwen3-moe"),
    Fault("soft-cap dropped by the function", function, lambda: setting(softcap=None), "gemma2"),
    Fault("sinks dropped by the function", function, lambda: setting(s_aux=None), "gpt-oss"),
    Fault("window + 1 in the function", function, lambda: in_second_layer(_WIDER), "mistral gpt-oss"),
    Fault("router sees the token before", router, lambda: lambda x: x.roll(1, 0), "mixtral qwen3-moe"),
    Fault(
        "keys and values of another entry", projection, lambda: lambda t: t.roll(1, 0), "vit wan pixart llama-4 bart whisper"
    ),
    Fault(
        "batch and tokens reshaped",
        projection,
        lambda: lambda t: t.reshape(t.shape[1], t.shape[0], -1).transpose(0, 1),
        "vit wan pixart bert-4",
    ),
    Fault("result dropped", result, lambda: lambda found, given: found.detach() * 0, "vit wan pixart llama-4"),
    Fault("states in place of the result", result, lambda: lambda found, given: given, "vit wan qwen3-4"),
    Fault("result detached", result, lambda: lambda found, given: found.detach(), "bert-4 vit modernbert"),
    Fault("keys and values detached", projection, lambda: lambda t: t.detach(), "llama-4 vit wan"),
    Fault("dropout of the result", result, lambda: lambda found, _: torch.dropout(found, 0.1, True), "vit wan pixart llama-4"),
    Fault(
        "cross-attention is causal",
        crossing,
        lambda: attribute("is_causal", lambda was: True, slice(None), crossings),
        "bart whisper",
    ),
    Fault("cross-attention is causal", crossing, lambda: causal_memory, "wan pixart"),
    Fault("memory of another entry", crossing, lambda: other_memory(lambda t, own: t.roll(1, 0)), "t5 whisper wan pixart"),
    Fault("memory of the first entry for all", crossing, lambda: other_memory(lambda t, own: t[:1].expand_as(t)), "bart wan"),
    Fault("own states in place of the memory", crossing, lambda: other_memory(lambda t, own: own), "t5 bart whisper wan"),
    Fault("memory detached", crossing, lambda: other_memory(lambda t, own: t.detach()), "t5 bart wan"),
    Fault("padding of the memory ignored where it decodes", crossing, lambda: padding_ignored_where_it_decodes, "t5 bart"),
    Fault("newest key is stale", cache, lambda: later(lambda k, v: (blank(k, -1), v)), "t5 bart whisper"),
    Fault("norms of q and k are not run", whole, lambda: without_norms, "vit wan qwen3-4 olmo2-4"),
    Fault("gradient of sinks doubled", function, lambda: in_second_layer(doubled), "gpt-oss"),
    Fault(
        "window - 1 to both sides",
        attention,
        lambda: masked(lambda seen, behind: seen & (behind.abs() < WINDOW)),
        "modernbert",
    ),
    Fault("bias left out", bias, lambda: torch.zeros_like, "t5"),
    Fault("padding of queries, not of keys", attention, lambda: on_queries, "bert-4 modernbert"),
    Fault("mask of the first sequence for all", attention, lambda: masked(lambda seen, behind: seen[:1]), "llama-4 bert-4"),
    Fault("keys hidden by -10", attention, lambda: weaker, "llama-4 gemma3-4"),
    Fault("images are causal", attention, lambda: masked(lambda seen, behind: seen & (behind >= 0)), "paligemma"),
    Fault("neighbors rotated in place of halves", attention, lambda: interleaved, "llama-4 qwen3-4 gemma3-4"),
    Fault("heads merged without a transpose", merging, lambda: unmerged, "llama-4 bart vit wan"),
    Fault(
        "scale of the hidden size",
        attention,
        lambda: attribute("scaling", lambda was: 64**-0.5, slice(None)),
        "llama-4 qwen3-4 bert-4",
    ),
    Fault("soft-cap halved", attention, lambda: attribute("attn_logit_softcapping", lambda was: was / 2), "gemma2-4"),
    Fault("softmax in float16", function, lambda: in_second_layer(setting(dtype=torch.float16)), "llama-4 bert-4 gpt-oss"),
    Fault(
        "position off from the fourth decoded token on",
        positions,
        lambda: lambda at: at + 1 if at.shape[-1] == 1 and at.max() > TOKENS // 2 + 6 else at,
        "llama-4 gemma3-4 qwen3-4",
    ),
)


# -- who finds them ----------------------------------------------------------------------------------------------------------


def checked(model: Any, name: str, dtype: torch.dtype) -> str:
    """Return what `attn_model.check` says of a step of a model, of a decoder also where it decodes, "" where all is right."""
    given = inputs_of(name, 2, dtype)
    steps: list[tuple[Callable[[], Any], bool]] = [(lambda: model(**given, **labels_of(name, given)), True)]
    if "decoder_input_ids" in given:
        steps.append((lambda: decoded(model, given), False))
    try:
        for step, backward in steps:
            found = judge_model(model, step, backward=backward, scatter=0)
            if not found.passed:
                return found.message
    except Exception as error:  # a check that raises is no judgment
        return f"raised {type(error).__name__}: {error}"
    return ""


def labels_of(name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {} if name in OTHERS else {"labels": given.get("decoder_input_ids", given.get("input_ids"))}


def decoded(model: Any, given: dict[str, Any]) -> Any:
    """Return the output for the last of three tokens, one after the other, after a padded sequence if it is of tokens."""
    ids, cache, found = given["decoder_input_ids"], None, None
    rest = {name: t for name, t in given.items() if name != "decoder_input_ids"}
    if "input_ids" in rest:
        rest["attention_mask"] = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 9]])).long()
    for at in range(3):
        found = model(**rest, decoder_input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        cache = found.past_key_values
    return found.logits


def invariant(model: Any, name: str, dtype: torch.dtype) -> str:
    """Return which invariants are broken, "" for none."""
    try:
        return ", ".join(finding.invariant for finding in judge_model_invariants(model, inputs_of(name, 3, dtype)).broken)
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"


def nothing(seam: Any) -> Change:
    """Return the change of a twin: none."""
    if seam is cache:
        return lambda k, v, new, of: (k, v)
    if seam is result:
        return lambda found, given: found
    return (lambda given, of: None) if seam in (attention, crossing, function) else (lambda given: given)


def main() -> None:
    """Plant each fault and its twin, and print who finds it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models, by comma")
    parser.add_argument("--faults", default="", help="parts of names, by comma")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    dtype, only, parts = getattr(torch, options.dtype), options.only.split(","), options.faults.split(",")
    cases = [
        (fault, name)
        for fault in FAULTS
        for name in fault.models.split()
        if (not options.only or name in only) and any(part in fault.name for part in parts)
        if name not in OTHERS or find_spec(OTHERS[name][1])
    ]
    by_check = by_invariants = by_both = alarms = 0
    twins: dict[tuple[str, str], tuple[str, str]] = {}
    for fault, name in cases:
        model = build(name, dtype)
        with fault.seam(model, fault.change()):
            first, second = checked(model, name, dtype), invariant(model, name, dtype)
        twin = (fault.seam.__name__, name)
        if twin not in twins:
            model = build(name, dtype)
            with fault.seam(model, nothing(fault.seam)):
                twins[twin] = checked(model, name, dtype), invariant(model, name, dtype)
            for question, found in zip(("check", "check_invariants"), twins[twin], strict=True):
                if found:
                    alarms += 1
                    print(f"FALSE ALARM of {question} on {name}, seam {twin[0]}: {found:.300}", flush=True)
        by_check, by_invariants, by_both = (
            by_check + bool(first),
            by_invariants + bool(second),
            by_both + bool(first or second),
        )
        verdict = "found" if first or second else "NOT FOUND"
        print(
            f"{verdict:9}  {name:9}  {fault.name:38}  check: {'yes' if first else 'no':3}  invariants: {second[:99] or 'no'}",
            flush=True,
        )
    total = len(cases)
    print(f"{total} faults in {len({name for _, name in cases})} models, {len(twins)} honest twins, {options.dtype}")
    for question, found in (("check", by_check), ("check_invariants", by_invariants), ("both together", by_both)):
        print(f"  {question}: {found} of {total} ({found / max(total, 1):.1%})")
    print(f"  false alarms: {alarms}")


if __name__ == "__main__":
    main()
