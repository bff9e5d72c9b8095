"""Faults planted in what models hand on, and by which question each is found: attn_model.check, or check_invariants.

    python benchmarks/model_faults.py [--only llama,gpt-oss] [--faults window,cache] [--dtype float32]

Tiny models of transformers, dense, windowed and with experts. Each fault is planted at one seam: what a layer's attention is
handed, what its cache returns, the positions, or the function that computes attention. Its honest twin has the same seam,
which changes nothing. Printed: fault by fault by which question it is found, the shares, and the false alarms of the twins.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from transformers import cache_utils, masking_utils, modeling_utils

from pytest_attn.models.check import judge_model
from pytest_attn.models.token_invariants import judge_model_invariants

TOKENS, WINDOW, VOCABULARY = 40, 12, 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
SLIDING = {"sliding_window": WINDOW}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
#: whose second layer, where faults are planted, has a window
SECOND = {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]}
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
}
Change = Callable[..., Any]


def build(name: str, dtype: torch.dtype, sharper: float = 8) -> Any:
    """Return a model in eval mode. sharper: by how much its projections of q and k are enlarged, to tell keys apart."""
    kind, head, options = MODELS[name]
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}{head}")(config_class(**{**SIZES, **HEADS, **options}, attn_implementation="eager"))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("q_proj.w", "k_proj.w", "query.w", "key.w", "qkv_proj.w", "c_attn.w")):
                parameter *= sharper
    return model.eval().to(dtype)


def ids_of(batch: int = 3) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


# -- seams ---------------------------------------------------------------------------------------------------------------


def attentions(model: Any) -> list[Any]:
    """Return the attention module of each layer."""
    return [part for name, part in model.named_modules() if name.endswith(("self_attn", ".attn", "attention.self"))]


@contextlib.contextmanager
def attention(model: Any, change: Change) -> Iterator[None]:
    """Change what the second layer's attention is handed: change(its arguments by name, the model)."""
    part = attentions(model)[1]
    forward, signature = part.forward, inspect.signature(part.forward)

    def handed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        change(bound.arguments, model)
        return forward(*bound.args, **bound.kwargs)

    part.forward = handed
    yield
    del part.forward


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


def attribute(name: str, of: Callable[[Any], Any], layers: slice = slice(1, 2)) -> Change:
    """Return a change of an attribute of the attention of the second layer, or of others, made once."""

    def change(given: dict[str, Any], model: Any) -> None:
        del given
        for part in attentions(model)[layers]:
            if not hasattr(part, "was"):
                part.was = getattr(part, name)
                setattr(part, name, of(part.was))

    return change


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
)


# -- who finds them ----------------------------------------------------------------------------------------------------------


def checked(model: Any) -> str:
    """Return what `attn_model.check` says of a training step of a model, "" where all is right."""
    ids = ids_of(2)
    try:
        found = judge_model(model, lambda: model(input_ids=ids, labels=ids), scatter=0)
    except Exception as error:  # a check that raises is no judgment
        return f"raised {type(error).__name__}: {error}"
    return "" if found.passed else found.message


def invariant(model: Any) -> str:
    """Return which invariants are broken, "" for none."""
    try:
        return ", ".join(finding.invariant for finding in judge_model_invariants(model, ids_of()).broken)
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"


def nothing(seam: Any) -> Change:
    """Return the change of a twin: none."""
    if seam is cache:
        return lambda k, v, new, of: (k, v)
    return (lambda given, of: None) if seam in (attention, function) else (lambda given: given)


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
    ]
    by_check = by_invariants = by_both = alarms = 0
    twins: dict[tuple[str, str], tuple[str, str]] = {}
    for fault, name in cases:
        model = build(name, dtype)
        with fault.seam(model, fault.change()):
            first, second = checked(model), invariant(model)
        twin = (fault.seam.__name__, name)
        if twin not in twins:
            model = build(name, dtype)
            with fault.seam(model, nothing(fault.seam)):
                twins[twin] = checked(model), invariant(model)
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
            f"{verdict:9}  {name:9}  {fault.name:38}  check: {'yes' if first else 'no':3}  invariants: {second or 'no'}",
            flush=True,
        )
    total = len(cases)
    print(f"{total} faults in {len({name for _, name in cases})} models, {len(twins)} honest twins, {options.dtype}")
    for question, found in (("check", by_check), ("check_invariants", by_invariants), ("both together", by_both)):
        print(f"  {question}: {found} of {total} ({found / max(total, 1):.1%})")
    print(f"  false alarms: {alarms}")


if __name__ == "__main__":
    main()
