"""dot_product_attention.utils of Transformer Engine 2.20: its log, and the selection of a kernel, as on an H200."""

import logging
import os
from collections import namedtuple
from types import SimpleNamespace

import torch

FlashAttentionUtils = SimpleNamespace(is_installed=True, version="2.8.3")
AttentionLogging = SimpleNamespace(_log_level=logging.WARNING, _stream_handler=logging.StreamHandler())
AttentionParams = namedtuple(
    "AttentionParams",
    "qkv_dtype max_seqlen_q max_seqlen_kv head_dim_qk head_dim_v attn_mask_type window_size bottom_right_diagonal softcap"
    " core_attention_bias_type core_attention_bias_shape softmax_type is_training",
)
FUSED_REASON = ""


def logger():
    made = logging.getLogger("DotProductAttention")
    made.setLevel(AttentionLogging._log_level)
    if not made.hasHandlers():
        made.addHandler(AttentionLogging._stream_handler)
    return made


def get_attention_backend(attention_params=None):
    p, log = attention_params, logger()
    log.debug("Running with config=%s", p)
    names = "FlashAttention 2", "FusedAttention", "UnfusedDotProductAttention"
    switches = "NVTE_FLASH_ATTN=0 or NVTE_FLASH_ATTN_V2=0", "NVTE_FUSED_ATTN=0", "NVTE_UNFUSED_ATTN=0"
    on = {}
    for kernel, name, switch in zip(("flash", "fused", "unfused"), names, switches, strict=True):
        on[kernel] = bool(int(os.environ.get(switch.partition("=")[0], "1")))
        if not on[kernel]:
            log.debug("Disabling %s due to %s", name, switch)
    no_half = p.qkv_dtype not in (torch.bfloat16, torch.float16)
    is_arbitrary, has_bias = p.attn_mask_type == "arbitrary", p.core_attention_bias_type == "post_scale_bias"
    is_top_left = p.attn_mask_type in ("causal", "padding_causal") and p.max_seqlen_q != p.max_seqlen_kv
    longer = "as it does not support sliding window attention with s_q > s_kv for cross-attention"
    for kernel, name, is_against, words in (
        ("flash", "FlashAttention 2", no_half, f"for unsupported qkv_dtype = {p.qkv_dtype}. "),
        ("fused", "FusedAttention", no_half, f"for unsupported qkv_dtype = {p.qkv_dtype}"),
        ("fused", "FusedAttention", p.softcap != 0.0, "as it does not support softcap"),
        ("flash", "FlashAttention", p.softmax_type != "vanilla", f"for softmax_type = {p.softmax_type}"),
        ("flash", "FlashAttention", is_arbitrary, "for arbitrary mask"),
        ("fused", "FusedAttention", is_arbitrary, "for arbitrary mask"),
        ("flash", "FlashAttention", is_top_left, "as it only supports bottom-right-diagonal causal mask"),
        ("fused", "FusedAttention", p.window_size[0] != -1 and p.max_seqlen_q > p.max_seqlen_kv, longer),
        ("flash", "FlashAttention", has_bias, "for pre/post_scale_bias"),
        ("fused", "FusedAttention:", FUSED_REASON, FUSED_REASON),
    ):
        if on[kernel] and is_against:
            log.log(logging.WARNING if "bottom-right" in words else logging.DEBUG, "Disabling %s %s", name, words)
            on[kernel] = False
    flash, fused, unfused = on.values()
    if not fused:
        log.warning("flash-attn v3 may provide important feature support or performance improvement.")
    fused, unfused = fused and not flash, unfused and not (flash or fused)
    return flash, FlashAttentionUtils.version if flash else None, fused, 1 if fused else None, unfused, [*on.values()]
