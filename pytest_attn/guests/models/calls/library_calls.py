"""Calls of xFormers, NATTEN, SageAttention and FlashInfer that a model makes, read back."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from pytest_attn.guests.libraries.flash_attention import mask_of_window
from pytest_attn.guests.models.call_to_workload import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    refuse_unread,
    swap_rows_and_heads,
    unchanged,
    visible_and_bias,
)
from pytest_attn.workloads.masks import Causal, Mask, Neighborhood, Window

_QKV = ("query", "key", "value")


def _read_xformers(given: Mapping[str, Any]) -> AttentionArguments:
    """Read tensors (batch, rows, heads, dim), with GQA's key heads and their groups in two dimensions, or rows end to end."""
    refuse_unread(given, {"query", "key", "value", "attn_bias", "p", "scale"}, frozenset(("op",)))
    query, attn_bias = given["query"], given.get("attn_bias")
    if query.dim() not in (4, 5):
        raise UnreadableError(f"its argument query has shape {tuple(query.shape)}; expected (batch, rows, heads, dim)")
    is_packed, heads = hasattr(attn_bias, "q_seqinfo"), tuple(query.shape[2:-1])

    def to_native(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.flatten(2, -2)
        return tensor[0] if is_packed else swap_rows_and_heads(tensor)

    def to_result(out: torch.Tensor) -> torch.Tensor:
        out = out[None] if is_packed else swap_rows_and_heads(out)
        return out.reshape(*out.shape[:2], *heads, out.shape[-1])

    read = _read_bias(attn_bias, to_native(query), to_native(given["key"]))
    dropout = float(given.get("p") or 0.0)
    return AttentionArguments.in_layout(
        to_native, given, _QKV, **read, scale=given.get("scale"), dropout=dropout, to_result=to_result
    )


def _read_bias(attn_bias: Any, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """Return what an attn_bias says: a mask by its class, with the ends of its blocks, or what a tensor hides and adds."""
    kind = type(attn_bias).__name__
    if attn_bias is None:
        return {}
    if getattr(attn_bias, "ndim", 0) in (4, 5):
        visible, bias = visible_and_bias(attn_bias.flatten(1, -3), tuple(q.shape[:2]), q, k)
        return {"visible": visible, "bias": bias}
    if kind not in _MASKS:
        raise UnreadableError(f"its argument attn_bias is a {kind}, which is not read")
    ends = {"cu_seqlens": "q_seqinfo", "cu_seqlens_kv": "k_seqinfo"} if hasattr(attn_bias, "q_seqinfo") else {}
    return {"mask": _MASKS[kind](attn_bias), **{name: getattr(attn_bias, side).seqstart for name, side in ends.items()}}


#: the mask that each class of attn_bias means; the size of a local one counts the query's own key
_MASKS: dict[str, Callable[[Any], Mask | None]] = {
    "LowerTriangularMask": lambda bias: Causal(),
    "LowerTriangularFromBottomRightMask": lambda bias: Causal(bottom_right=True),
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda bias: Window(bias._window_size - 1, 0),
    "LocalAttentionFromBottomRightMask": lambda bias: Window(bias.window_left, bias.window_right),
    "BlockDiagonalMask": lambda bias: None,
    "BlockDiagonalCausalMask": lambda bias: Causal(),
    "BlockDiagonalCausalFromBottomRightMask": lambda bias: Causal(bottom_right=True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": lambda bias: Window(bias._window_size - 1, 0),
}


def _read_natten(given: Mapping[str, Any], dims: int) -> AttentionArguments:
    known = {"query", "key", "value", "kernel_size", "stride", "dilation", "is_causal", "scale"}
    tuning = ("backend", "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape")
    more = ("kernel_schedule", "torch_compile", "run_persistent_kernel", "backward_use_pt_reduction", "backward_kv_splits")
    refuse_unread(given, known, frozenset((*tuning, *more)))
    shape = tuple(given["query"].shape[1 : 1 + dims])
    kernel = given["kernel_size"]
    mask = Neighborhood(
        shape,
        (kernel,) * dims if isinstance(kernel, int) else tuple(kernel),
        stride=given.get("stride") or 1,
        dilation=given.get("dilation") or 1,
        causal=given.get("is_causal") or False,
    )

    return AttentionArguments.in_layout(
        lambda tensor: tensor.flatten(1, dims).transpose(1, 2),
        given,
        _QKV,
        mask=mask,
        scale=given.get("scale"),
        to_result=lambda out: out.transpose(1, 2).reshape(out.shape[0], *shape, out.shape[1], out.shape[3]),
    )


_PARAMETERS = (*_QKV, "kernel_size", "stride", "dilation", "is_causal", "scale")


def _read_sage(given: Mapping[str, Any]) -> AttentionArguments:
    known = {"q", "k", "v", "tensor_layout", "is_causal", "sm_scale", "return_lse"}
    refuse_unread(given, known, frozenset(("smooth_k", "smooth_v", "pv_accum_dtype", "qk_quant_gran")))
    to_native = swap_rows_and_heads if given.get("tensor_layout", "HND") == "NHD" else unchanged
    return AttentionArguments.in_layout(
        to_native,
        given,
        mask=Causal() if given.get("is_causal") else None,
        scale=given.get("sm_scale"),
        asks_more="lse" if given.get("return_lse") else "",
    )


def _read_flashinfer(given: Mapping[str, Any]) -> AttentionArguments:
    known = {"q", "k", "v", "causal", "kv_layout", "sm_scale", "window_left", "logits_soft_cap", "return_lse"}
    refuse_unread(
        {name: value for name, value in given.items() if (name, value) != ("pos_encoding_mode", "NONE")},
        known,
        frozenset(("backend", "use_fp16_qk_reduction")),
    )

    if given.get("kv_layout", "NHD") != "NHD":
        raise UnreadableError("its argument kv_layout='HND' is not read; 'NHD' is")
    left = given.get("window_left")
    return AttentionArguments.in_layout(
        lambda tensor: tensor.transpose(0, 1)[None],
        given,
        mask=mask_of_window(given.get("causal"), (-1 if left is None else left, -1)),
        scale=given.get("sm_scale"),
        softcap=given.get("logits_soft_cap") or None,
        to_result=lambda out: out[0].transpose(0, 1),
        asks_more="lse" if given.get("return_lse") else "",
    )


FUNCTIONS = (
    AttentionFunction(
        "xformers.ops", "memory_efficient_attention", (*_QKV, "attn_bias", "p", "scale"), _read_xformers, "xformers", _QKV
    ),
    *(
        AttentionFunction("natten", f"na{dims}d", _PARAMETERS, partial(_read_natten, dims=dims), "natten", _QKV)
        for dims in (1, 2, 3)
    ),
    AttentionFunction(
        "sageattention", "sageattn", ("q", "k", "v", "tensor_layout", "is_causal", "sm_scale"), _read_sage, "sage"
    ),
    AttentionFunction("flashinfer", "single_prefill_with_kv_cache", ("q", "k", "v"), _read_flashinfer, "flashinfer_fa2"),
)
