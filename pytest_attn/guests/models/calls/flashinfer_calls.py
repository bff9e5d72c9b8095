"""Calls of FlashInfer that a model makes, read back."""

from collections.abc import Mapping
from typing import Any

from pytest_attn.guests.libraries.flash_attention import mask_of_window
from pytest_attn.guests.models.attention_args import AttentionArguments, AttentionFunction, UnreadableError, refuse_unread


def _read(given: Mapping[str, Any]) -> AttentionArguments:
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


FUNCTIONS = (AttentionFunction("flashinfer", "single_prefill_with_kv_cache", ("q", "k", "v"), _read, "flashinfer_fa2"),)
