"""Calls of Transformer Engine that a model makes, read back."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from pytest_attn.guests.libraries.flash_attention import mask_of_window
from pytest_attn.guests.models.call_to_workload import AttentionArguments, AttentionFunction, UnreadableError, refuse_unread
from pytest_attn.workloads.masks import Causal, Mask

_TENSORS = ("query_layer", "key_layer", "value_layer")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv")
_PARAMETERS = (
    *("self", *_TENSORS, "attention_mask", "qkv_format", *_LENGTHS, "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("max_seqlen_q", "max_seqlen_kv", "attn_mask_type", "window_size"),
)
_PADDED = {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}
_READ = {*_PARAMETERS, "bottom_right_diagonal", "core_attention_bias_type", "core_attention_bias", "alibi_slopes"} - _PADDED
_WITHOUT_EFFECT = frozenset(("checkpoint_core_attention", "fast_zero_fill", "num_splits", "pad_between_seqs", "bf16_backward"))
#: of a format, the order that makes it (batch, heads, rows, dim), and the order back
_ORDERS = {"bshd": ((0, 2, 1, 3), (0, 2, 1, 3)), "sbhd": ((1, 2, 0, 3), (2, 0, 1, 3))}
_BACKEND_OF_KERNEL = {
    "use_flash_attention": "te_flash",
    "use_fused_attention": "te_fused",
    "use_unfused_attention": "te_unfused",
}
_SUBMODULES = ("fused_attention", "flash_attention", "unfused_attention")


def _ran() -> str:
    """Return the backend that has the kernel which the module selected last, "" where it does not say."""
    module: Any = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    chosen: Mapping[str, Any] = getattr(module, "_attention_backends", None) or {}
    return next((name for key, name in _BACKEND_OF_KERNEL.items() if chosen.get(key)), "")


def _read(given: Mapping[str, Any]) -> AttentionArguments:
    """Read a call, for which the module has the defaults."""
    refuse_unread(given, _READ, _WITHOUT_EFFECT)
    module, qkv_format = given["self"], given.get("qkv_format") or given["self"].qkv_format
    if getattr(module, "cp_group", None) is not None:
        raise UnreadableError("keys that are spread over a context-parallel group are not read")
    if getattr(module, "fp8", False):
        raise UnreadableError("attention in float8 is not read")
    if qkv_format not in ("thd", *_ORDERS):
        raise UnreadableError(f"its format {qkv_format!r} is not read; 'bshd', 'sbhd' and 'thd' are")
    is_packed = qkv_format == "thd"
    to, back = ((0, 1, 2), (0, 1, 2)) if is_packed else _ORDERS[qkv_format]
    heads = given["query_layer"].shape[-2]
    q, k = (given[name].permute(to) for name in _TENSORS[:2])
    visible, mask = _mask(given, module, q, k, is_packed)
    return AttentionArguments.in_layout(
        lambda tensor: tensor.permute(to),
        given,
        _TENSORS,
        visible=visible,
        mask=mask,
        **_scores(given, module),
        dropout=float(module.attention_dropout or 0.0) if module.training else 0.0,
        cu_seqlens=given["cu_seqlens_q"] if is_packed else None,
        cu_seqlens_kv=given["cu_seqlens_kv"] if is_packed else None,
        out_to_native=lambda out: out.view(*out.shape[:-1], heads, -1).permute(to),
        to_result=lambda out: out.permute(back).flatten(-2),
        asks_more="the largest score" if getattr(module, "return_max_logit", False) else "",
    )


def _scores(given: Mapping[str, Any], module: Any) -> dict[str, Any]:
    """Return what changes scores: scale, softcap, bias, slopes and sinks."""
    kind, bias = given.get("core_attention_bias_type") or "no_bias", given.get("core_attention_bias")
    slopes = given.get("alibi_slopes")
    if kind not in ("no_bias", "post_scale_bias", "alibi") or (kind == "alibi" and (slopes is None or slopes.dim() != 1)):
        raise UnreadableError(f"its core_attention_bias_type={kind!r} is not read; 'post_scale_bias' and slopes per head are")
    scales = (getattr(getattr(module, name, None), "softmax_scale", None) for name in _SUBMODULES)
    sinks = getattr(module, "softmax_offset", None)
    return {
        "scale": next((float(scale) for scale in scales if scale is not None), None),
        "softcap": getattr(module, "softcap", None) or None,
        "bias": bias.detach() if kind == "post_scale_bias" and bias is not None else None,
        "alibi_slopes": slopes if kind == "alibi" else None,
        "sinks": None if sinks is None else sinks.flatten(),
    }


def _mask(
    given: Mapping[str, Any], module: Any, q: torch.Tensor, k: torch.Tensor, is_packed: bool
) -> tuple[torch.Tensor | None, Mask | None]:
    """Return what is visible as a tensor, where one is given, and the mask that the type of it names."""
    kind = given.get("attn_mask_type") or module.attn_mask_type
    kind = kind.replace(",", "_").replace("causal_padding", "padding_causal")
    window = given.get("window_size") or getattr(module, "window_size", None)
    named = _named_mask(kind, window, is_packed or q.shape[2] == k.shape[2])
    if is_packed:
        return None, named
    found = given.get("attention_mask")
    if kind == "arbitrary" and found is not None:
        return ~found.expand(-1, -1, q.shape[2], k.shape[2]), named
    return (_padded(given, q, k) if "padding" in kind else None), named


def _named_mask(kind: str, window: Any, is_square: bool) -> Mask | None:
    """Return the mask of a type. is_square: as many queries as keys, so that both corners are one."""
    left = -1 if window is None else window[0]
    if "causal" not in kind:
        return mask_of_window(False, window)
    if "bottom_right" in kind or (is_square and left is not None and left >= 0):
        return mask_of_window(True, (left, 0))
    if left is not None and left >= 0:
        raise UnreadableError(f"its window {tuple(window)} is counted from the top left, which is not read")
    return Causal()


def _padded(given: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return what padded sequences see, (batch, 1, q_len, kv_len); a query that is padded sees nothing."""
    found = given.get("attention_mask")
    if found is not None:
        rows, keys = found if isinstance(found, tuple | list) else (found, found)
        rows, keys = (~t.reshape(q.shape[0], -1) for t in (rows, keys))
    else:
        ends = [given.get(name) for name in _LENGTHS]
        if any(end is None for end in ends):
            raise UnreadableError("neither attention_mask nor cu_seqlens_q and cu_seqlens_kv say what is padding")
        sides = zip((q, k), ends, strict=True)
        rows, keys = (torch.arange(t.shape[2], device=t.device) < end.diff()[:, None] for t, end in sides)  # type: ignore[union-attr]
    visible: torch.Tensor = rows[:, None, :, None] & keys[:, None, None, :]
    return visible


FUNCTIONS = (
    AttentionFunction(
        "transformer_engine.pytorch",
        "DotProductAttention.forward",
        _PARAMETERS,
        _read,
        "te_fused",
        _TENSORS,
        "transformer_engine.DotProductAttention",
        ran=_ran,
    ),
)
