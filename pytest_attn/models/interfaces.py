"""The attention functions of transformers, caught where a model fetches them, whatever implementation it is set to.

To replace them, a model is switched to a name of ours that is registered in both interfaces: of attention and of masks. A name
that is missing from the second gets no mask at all, without a word (transformers 5.23, `_preprocess_mask_arguments`).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pytest_attn.models.asked import Asked, UnreadableError
from pytest_attn.models.entry_points import EntryPoint, block_mask, sdpa_mask
from pytest_attn.workloads.masks import Causal, Mask, Window

if TYPE_CHECKING:
    import torch

#: what a model is switched to while its attention is replaced
NAME = "pytest_attn"
_PROFILES = {"eager": "eager", "sdpa": "sdpa", "flex_attention": "flex", "flash_attention_2": "flash2"}


@contextmanager
def transformers_caught(
    wrap: Callable[[EntryPoint, Callable[..., Any]], Callable[..., Any]], model: torch.nn.Module | None, replaces: bool
) -> Iterator[None]:
    """Wrap each attention function that a model of transformers fetches; nothing where transformers is not imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    fetch = getattr(interface, "get_interface", None)
    if interface is None or fetch is None:
        yield
        return

    @functools.wraps(fetch)
    def fetched(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        original = fetch(self, attn_implementation, default)
        return wrap(_entry_point(str(attn_implementation)), original)

    with ExitStack() as stack:
        if replaces and model is not None:
            stack.enter_context(_switched(model, interface))
        interface.get_interface = fetched
        stack.callback(setattr, interface, "get_interface", fetch)
        yield


def is_of_transformers(model: torch.nn.Module | None) -> bool:
    """Whether a model has parts of transformers, which say what masks they want."""
    return model is not None and bool(_configs(model))


@contextmanager
def _switched(model: torch.nn.Module, interface: Any) -> Iterator[None]:
    """Switch every part of the model to our implementation, which builds all masks in full; then back."""
    masking_utils: Any = importlib.import_module("transformers.masking_utils")
    masks = masking_utils.AttentionMaskInterface._global_mapping
    functions = interface._global_mapping
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        masks[NAME] = functools.partial(_full_mask, masking_utils.sdpa_mask)
        functions[NAME] = _exact_forward
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
        masks.pop(NAME, None)
        functions.pop(NAME, None)


def _configs(model: torch.nn.Module) -> list[Any]:
    """Return the configurations of the model's parts, and those within them, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if "_attn_implementation_internal" not in getattr(config, "__dict__", {}) or id(config) in found:
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or ():
            add(getattr(config, name, None))

    for part in model.modules():
        add(getattr(part, "config", None))
    return list(found.values())


def _full_mask(sdpa_mask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a mask as SDPA takes it, boolean, and never leave it out."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def _exact_forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Compute exact attention: what stands in where a call is not replaced."""
    from pytest_attn.models.asked import inputs_of
    from pytest_attn.models.exact import exact_attention

    given = {"module": module, "query": query, "key": key, "value": value, "attention_mask": attention_mask, **kwargs}
    asked = _read(NAME, given)
    return asked.result_of(exact_attention(inputs_of(asked)))


# -- reading -------------------------------------------------------------------------------------------------------------


def _entry_point(implementation: str) -> EntryPoint:
    return EntryPoint(
        "transformers.modeling_utils",
        "AttentionInterface",
        ("module", "query", "key", "value", "attention_mask"),
        functools.partial(_read, implementation),
        _PROFILES.get(implementation, "math"),
        ("query", "key", "value"),
        f"transformers:{implementation}",
    )


def _read(implementation: str, given: Mapping[str, Any]) -> Asked:
    """Read the arguments of an attention function of transformers: q, k and v "bhsd", out "bshd"."""
    if given.get("cache") is not None:
        raise UnreadableError("a paged cache is not read")
    q, k, v = given["query"], given["key"], given["value"]
    visible, bias, mask = _mask_of(implementation, given, q, k)
    position_bias = given.get("position_bias")
    if position_bias is not None:
        position_bias = position_bias.detach().expand(-1, -1, q.shape[2], -1)[..., : k.shape[2]]
        bias = position_bias if bias is None else bias + position_bias
    sinks = given.get("s_aux")
    weights = given.get("output_attentions")
    return Asked(
        q,
        k,
        v,
        visible=visible,
        mask=mask,
        bias=bias,
        sinks=None if sinks is None else sinks.flatten(),
        scale=given.get("scaling"),
        softcap=given.get("softcap"),
        dropout=float(given.get("dropout") or 0.0),
        out_of=lambda result: result[0],
        fold_out=lambda out: out.transpose(1, 2),
        result_of=lambda out: _with_weights(out, bool(weights)),
    )


def _with_weights(out: torch.Tensor, asks_weights: bool) -> tuple[torch.Tensor, None]:
    if asks_weights:
        raise UnreadableError("the model asks for attention weights as well, which a replacement does not return")
    return out.transpose(1, 2).contiguous(), None


def _mask_of(
    implementation: str, given: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, Mask | None]:
    """Return what the call's mask hides and adds, and what it is without a tensor."""
    found = given.get("attention_mask")
    causal = given.get("is_causal")
    if causal is None:
        causal = getattr(given["module"], "is_causal", True)
    is_flash = implementation.startswith("flash") or "/" in implementation
    if found is None or (is_flash and found.dim() == 2):
        visible = None if found is None else found[:, None, None, : k.shape[2]].bool()
        if implementation == "eager" or not causal or (q.shape[2] == 1 and not is_flash):
            return visible, None, None
        window = given.get("sliding_window") if is_flash else None
        bottom_right = Window(window - 1, 0) if window else Causal(bottom_right=True)
        return visible, None, bottom_right if is_flash else Causal()
    if type(found).__name__ == "BlockMask":
        visible, mask = block_mask(found, q, k)
        return visible, None, mask
    if found.dim() != 4:
        raise UnreadableError(f"its attention_mask has shape {tuple(found.shape)}; expected four dimensions")
    visible, bias = sdpa_mask(found[..., : k.shape[2]], tuple(q.shape[:-2]), q, k)
    return visible, bias, None
