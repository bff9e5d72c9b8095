"""Calls of xFormers that a model makes, read back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_attn.guests.models.attention_args import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    refuse_unread,
    swap_rows_and_heads,
    visible_and_bias,
)
from pytest_attn.workloads.masks import Causal, Mask, Window


def _read(given: Mapping[str, Any]) -> AttentionArguments:
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
_QKV = ("query", "key", "value")
FUNCTIONS = (
    AttentionFunction(
        "xformers.ops", "memory_efficient_attention", (*_QKV, "attn_bias", "p", "scale"), _read, "xformers", _QKV
    ),
)
