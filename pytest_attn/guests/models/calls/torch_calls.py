"""Calls of SDPA and FlexAttention that a model makes, read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from pytest_attn.guests.models.call_to_workload import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    four_dimensional,
    refuse_unread,
    visible_and_bias,
)
from pytest_attn.workloads.masks import Causal, Mask, MaskModMask

_QKV, _OPTIONS = ("query", "key", "value"), ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _read_sdpa(given: Mapping[str, Any]) -> AttentionArguments:
    """Read scaled_dot_product_attention, of which autocast casts an additive mask, too."""
    mask: Any = given.get("attn_mask")
    if type(mask).__name__ == "CausalBias":  # of torch.nn.attention.bias, which holds no numbers
        is_bottom_right = mask.variant.name == "LOWER_RIGHT"
        return replace(read_plain({**given, "attn_mask": None}), mask=Causal(bottom_right=is_bottom_right))
    return read_plain(given if mask is None else {**given, "attn_mask": autocast(mask)})


def read_plain(given: Mapping[str, Any]) -> AttentionArguments:
    """Read its arguments: tensors of 2 or more dimensions, of which the leading ones broadcast."""
    q, k = given["query"], given["key"]
    refuse_unread(given, {*_QKV, *_OPTIONS})
    lead, visible, bias = q.shape[:-2], None, None
    if given.get("attn_mask") is not None:
        visible, bias = visible_and_bias(given["attn_mask"], lead, four_dimensional(q), four_dimensional(k))
    return AttentionArguments.in_layout(
        four_dimensional,
        given,
        _QKV,
        visible=visible,
        bias=bias,
        mask=Causal() if given.get("is_causal") else None,
        scale=given.get("scale"),
        dropout=float(given.get("dropout_p") or 0.0),
        to_result=lambda out: out.reshape(*lead, *out.shape[-2:]),
    )


def _kernel_chosen(given: Mapping[str, Any]) -> str:
    """Return which of its kernels torch chooses for these arguments, as it does within the call: "SDPA flash"."""
    try:
        options = {name: given[name] for name in _OPTIONS if name in given}
        chosen = SDPBackend(torch._fused_sdp_choice(*(given[name] for name in _QKV), **options))
    except Exception:  # of devices and releases that do not say
        return "SDPA"
    return f"SDPA {chosen.name.lower().removesuffix('_attention')}"


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype to which autocast casts those of attention, itself where that casts nothing."""
    kind = tensor.device.type
    casts = tensor.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor


def _broadcast(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the leading dimensions of q, k and v expanded as SDPA broadcasts them; heads if not grouped.

    Raises UnreadableError for nested tensors.
    """
    if not all(name in given for name in _QKV):
        return given
    q, k, v = (given[name] for name in _QKV)
    if any(t.is_nested for t in (q, k, v)):
        raise UnreadableError("q, k and v must be dense tensors; nested ones are not read")
    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in (q, k, v)]
    if 1 < min(heads[1:]) < max(heads[1:]):  # grouped otherwise than each other
        k, v = (t.repeat_interleave(max(heads[1:]) // t.shape[-3], -3) for t in (k, v))
        heads[1:] = [max(heads[1:])] * 2
    grouped = 1 < heads[1] < heads[0]
    leads = [t.shape[:-3] if grouped else t.shape[:-2] for t in (q, k, v)]
    if not leads[0] == leads[1] == leads[2]:
        shapes: Any = torch.broadcast_shapes
        lead, kept = shapes(*leads), 3 if grouped else 2
        q, k, v = (t.expand(*lead, *t.shape[-kept:]) for t in (q, k, v))
    return {**given, "query": q, "key": k, "value": v}


SDPA = AttentionFunction(
    "torch.nn.functional",
    "scaled_dot_product_attention",
    (*_QKV, *_OPTIONS),
    _read_sdpa,
    tensors=_QKV,
    name="F.scaled_dot_product_attention",
    unpack=_broadcast,
    kernel_of=_kernel_chosen,
)

# -- FlexAttention -----------------------------------------------------------------------------------------------------------

#: scores of a mask_mod above which it is kept as a function and not looked at as a tensor
_DENSE = 1 << 28


def _read_flex(given: Mapping[str, Any]) -> AttentionArguments:
    """Read flex_attention: its block mask as a mask, its score_mod as it is."""
    known = {"query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "return_aux"}
    refuse_unread(given, known, frozenset(("kernel_options",)))
    q, k, v = given["query"], given["key"], given["value"]
    if k.shape[0] == 1 < q.shape[0]:
        raise UnreadableError("keys of one batch entry for all; expand them to the batch of the queries")
    visible, mask = read_block_mask(given.get("block_mask"), q, k)
    score_mod = given.get("score_mod")
    return AttentionArguments(
        *(q, k, v, visible, mask),
        scale=given.get("scale"),
        score_mod=None if getattr(score_mod, "__name__", "") == "_identity" else score_mod,
        asks_more="lse" if given.get("return_lse") or given.get("return_aux") else "",
    )


def read_block_mask(found: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor | None, Mask | None]:
    """Return a block mask as a boolean tensor, or as its mask_mod where that would be too large."""
    if found is None:
        return None, None
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    if found.mask_mod is noop_mask:
        return None, None
    batch, heads = (None if size == 1 else size for size in found.shape[:2])
    if (batch or 1) * (heads or 1) * q.shape[2] * k.shape[2] > _DENSE:
        return None, MaskModMask(found.mask_mod)
    return create_mask(found.mask_mod, batch, heads, q.shape[2], k.shape[2], device=str(q.device)), None


FLEX = AttentionFunction(
    "torch.nn.attention.flex_attention",
    "flex_attention",
    ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options"),
    _read_flex,
    profile="flex",
    tensors=("query", "key", "value"),
    name="flex_attention",
)
FUNCTIONS = (SDPA, FLEX)
