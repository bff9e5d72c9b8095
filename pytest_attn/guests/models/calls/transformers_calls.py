"""Calls of transformers that a model makes, read back."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_attn.guests.libraries.transformers import BOUNDARIES
from pytest_attn.guests.models.call_to_workload import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    refuse_unread,
    shortened,
    swap_rows_and_heads,
    visible_and_bias,
)
from pytest_attn.guests.models.calls.torch_calls import autocast, read_block_mask
from pytest_attn.workloads.functions import parameters_of
from pytest_attn.workloads.masks import Causal, Mask, Window

_PROFILES = {"eager": "eager", "sdpa": "sdpa", "flex_attention": "flex", "flash_attention_2": "flash2"}


def function_called(implementation: str, original: Callable[..., Any]) -> AttentionFunction:
    """Return how the function is read that a model fetches where it is set to an implementation."""
    return AttentionFunction(
        "transformers.modeling_utils",
        "AttentionInterface",
        _POSITIONAL,
        functools.partial(_read, implementation, original),
        _PROFILES.get(implementation, "math"),
        ("query", "key", "value"),
        f"transformers:{implementation}",
    )


_POSITIONAL = ("module", "query", "key", "value", "attention_mask")
_SCORES = ("scaling", "dropout", "softcap", "s_aux", "position_bias", "is_causal", "sliding_window")
_KNOWN = frozenset((*_POSITIONAL, *_SCORES, *BOUNDARIES, "cache", "output_attentions"))
#: what forward passes hand on to every layer, and what says where and how, not of what attention is computed
# fmt: off
_HANDED_ON = frozenset((
    "position_ids", "cache_position", "use_cache", "return_dict", "past_key_values", "num_items_in_batch", "labels",
    "shift_labels", "logits_to_keep", "token_type_ids", "mm_token_type_ids", "seq_idx", "layer_idx", "deterministic",
))
# fmt: on
_OF_INPUTS = ("output_", "input", "decoder_input", "pixel_", "image_", "video_", "audio_")


def _read(implementation: str, original: Callable[..., Any], given: Mapping[str, Any]) -> AttentionArguments:
    """Read a call, and refuse an argument that nothing is known of, unless its function takes no notice of it."""
    unknown = {n: v for n, v in given.items() if n not in _KNOWN | _HANDED_ON and not n.startswith(_OF_INPUTS)}
    named = parameters_of(original) or {}
    is_ignored = implementation in _STOCK
    refuse_unread({n: v for n, v in unknown.items() if n in named or not is_ignored}, set())
    unread = [f"{n}={shortened(v)}" for n, v in unknown.items() if v is not None and v is not False]
    return dataclasses.replace(read_call(implementation, given), unread=", ".join(unread))


#: what transformers itself has that is handed masks of pairs of a query and a key
_STOCK = ("eager", "sdpa", "flex_attention")


def is_stock(function: AttentionFunction) -> bool:
    """Return whether transformers itself has a function that is handed masks of pairs of a query and a key."""
    return function.name.removeprefix("transformers:") in _STOCK


def may_hide_more(shown: str) -> bool:
    """Return whether a function, by its name in reports, may apply a window of its own, which nothing that is read tells."""
    name = shown.removeprefix("transformers:")
    return name != shown and name not in _STOCK and not _is_flash(name)


def read_call(implementation: str, given: Mapping[str, Any]) -> AttentionArguments:
    """Read the arguments of an attention function of transformers: q, k and v "bhsd", out "bshd"."""
    if given.get("cache") is not None:
        raise UnreadableError("a paged cache is not read")
    if _is_flash(implementation) and _has_boundaries(given):
        return _read_packed(given)
    q, k, v = given["query"], given["key"], given["value"]
    visible, bias, mask = _mask(implementation, given, q, k)
    position_bias = given.get("position_bias")
    if position_bias is not None:
        position_bias = position_bias.detach().expand(-1, -1, q.shape[2], -1)[..., : k.shape[2]]
        bias = position_bias if bias is None else bias + position_bias
    return AttentionArguments(
        *(q, k, v, visible, mask, bias),
        **_scores(given),
        out_to_native=swap_rows_and_heads,
        to_result=lambda out: (swap_rows_and_heads(out).contiguous(), None),
    )


def _read_packed(given: Mapping[str, Any]) -> AttentionArguments:
    """Read what flash-attention is called with where the model says where sequences end: (1, heads, tokens, dim)."""
    batch = given["query"].shape[0]

    return AttentionArguments.in_layout(
        lambda tensor: swap_rows_and_heads(tensor).flatten(0, 1),
        given,
        ("query", "key", "value"),
        mask=_named_mask(given, is_flash=True, keys=int(given["max_length_k"])),
        cu_seqlens=given["cu_seq_lens_q"],
        cu_seqlens_kv=given["cu_seq_lens_k"],
        **_scores(given),
        out_to_native=lambda out: out.flatten(0, 1),
        to_result=lambda out: (out.view(batch, -1, *out.shape[1:]), None),
    )


def _is_flash(implementation: str) -> bool:
    return implementation.startswith("flash") or "/" in implementation


def _has_boundaries(given: Mapping[str, Any]) -> bool:
    """Return whether a call without a mask says all that transformers wants of packed sequences."""
    return given.get("attention_mask") is None and all(given.get(name) is not None for name in BOUNDARIES)


def _scores(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changes scores, and how out is taken of what a function returns."""
    sinks = given.get("s_aux")
    return {
        "sinks": None if sinks is None else sinks.flatten(),
        "scale": given.get("scaling"),
        "softcap": given.get("softcap"),
        "dropout": float(given.get("dropout") or 0.0),
        "asks_more": "attention weights" if given.get("output_attentions") else "",
    }


def _mask(
    implementation: str, given: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, Mask | None]:
    """Return what the call's mask hides and adds, and what it is without a tensor."""
    found, is_flash = given.get("attention_mask"), _is_flash(implementation)
    if found is None or (is_flash and found.dim() == 2):
        visible = None if found is None else found[:, None, None, : k.shape[2]].bool()
        if implementation == "eager" or (q.shape[2] == 1 and not is_flash):
            return visible, None, None
        return visible, None, _named_mask(given, is_flash, k.shape[2])
    if type(found).__name__ == "BlockMask":
        visible, mask = read_block_mask(found, q, k)
        return visible, None, mask
    if found.dim() != 4:
        raise UnreadableError(f"its attention_mask has shape {tuple(found.shape)}; expected four dimensions")
    found = found if implementation == "eager" else autocast(found)
    visible, bias = visible_and_bias(found[..., : k.shape[2]], tuple(q.shape[:-2]), q, k)
    return visible, bias, None


def _named_mask(given: Mapping[str, Any], is_flash: bool, keys: int) -> Mask | None:
    """Return the mask of is_causal and sliding_window, which counts the query's own key; the latter is flash-attention's."""
    causal, window = given.get("is_causal"), given.get("sliding_window") if is_flash else None
    if causal is None:
        causal = getattr(given["module"], "is_causal", True)
    if window and (causal or keys > window):
        return Window(window - 1, 0 if causal else window - 1)
    return Causal(bottom_right=is_flash) if causal else None
