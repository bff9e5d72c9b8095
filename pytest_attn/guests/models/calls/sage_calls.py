"""Calls of SageAttention that a model makes, read back."""

from collections.abc import Mapping
from typing import Any

from pytest_attn.guests.models.attention_args import (
    AttentionArguments,
    AttentionFunction,
    refuse_unread,
    swap_rows_and_heads,
    unchanged,
)
from pytest_attn.workloads.masks import Causal


def _read(given: Mapping[str, Any]) -> AttentionArguments:
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


FUNCTIONS = (
    AttentionFunction("sageattention", "sageattn", ("q", "k", "v", "tensor_layout", "is_causal", "sm_scale"), _read, "sage"),
)
