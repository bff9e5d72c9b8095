"""Calls of FlexAttention that a model makes, read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_attn.guests.models.attention_args import AttentionArguments, AttentionFunction, UnreadableError, refuse_unread
from pytest_attn.workloads.masks import Mask, MaskModMask

#: scores of a mask_mod above which it is kept as a function and not looked at as a tensor
_DENSE = 1 << 28


def _read(given: Mapping[str, Any]) -> AttentionArguments:
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
    _read,
    profile="flex",
    tensors=("query", "key", "value"),
    name="flex_attention",
)
FUNCTIONS = (FLEX,)
