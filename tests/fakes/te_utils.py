"""dot_product_attention.utils of Transformer Engine 2.20: its log, and the selection of a kernel, as on an H200."""

import logging
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

FlashAttentionUtils = SimpleNamespace(is_installed=True, version="2.8.3")


class AttentionLogging:
    _log_level = logging.WARNING
    _stream_handler = logging.StreamHandler()


@dataclass
class AttentionParams:
    qkv_dtype: Any
    max_seqlen_q: int
    max_seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    attn_mask_type: str
    window_size: tuple
    bottom_right_diagonal: bool
    softcap: float
    core_attention_bias_type: str
    core_attention_bias_shape: Any
    softmax_type: str
    is_training: bool


def get_attention_backend(attention_params=None):
    p = attention_params
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(AttentionLogging._log_level)
    if not logger.hasHandlers():
        logger.addHandler(AttentionLogging._stream_handler)
    logger.debug("Running with config=%s", p)
    flash = bool(int(os.environ.get("NVTE_FLASH_ATTN", "1")))
    fused = bool(int(os.environ.get("NVTE_FUSED_ATTN", "1")))
    unfused = bool(int(os.environ.get("NVTE_UNFUSED_ATTN", "1")))
    if not flash:
        logger.debug("Disabling FlashAttention 2 due to NVTE_FLASH_ATTN=0 or NVTE_FLASH_ATTN_V2=0")
    if not fused:
        logger.debug("Disabling FusedAttention due to NVTE_FUSED_ATTN=0")
    if not unfused:
        logger.debug("Disabling UnfusedDotProductAttention due to NVTE_UNFUSED_ATTN=0")

    def disable(kernel, on, why):
        if on:
            logger.debug("Disabling %s %s", kernel, why)
        return False

    if p.qkv_dtype not in (torch.bfloat16, torch.float16):
        flash = disable("FlashAttention 2", flash, f"for unsupported qkv_dtype = {p.qkv_dtype}. ")
        fused = disable("FusedAttention", fused, f"for unsupported qkv_dtype = {p.qkv_dtype}")
    if p.softcap != 0.0:
        fused = disable("FusedAttention", fused, "as it does not support softcap")
    if p.softmax_type != "vanilla":
        flash = disable("FlashAttention", flash, f"for softmax_type = {p.softmax_type}")
    if p.attn_mask_type == "arbitrary":
        flash = disable("FlashAttention", flash, "for arbitrary mask")
        fused = disable("FusedAttention", fused, "for arbitrary mask")
    if flash and p.attn_mask_type in ("causal", "padding_causal") and p.max_seqlen_q != p.max_seqlen_kv:
        logger.warning("Disabling FlashAttention as it only supports bottom-right-diagonal causal mask")
        flash = False
    if p.window_size[0] != -1 and p.max_seqlen_q > p.max_seqlen_kv:
        why = "as it does not support sliding window attention with s_q > s_kv for cross-attention"
        fused = disable("FusedAttention", fused, why)
    if p.core_attention_bias_type == "post_scale_bias":
        flash = disable("FlashAttention", flash, "for pre/post_scale_bias")
    if fused and FUSED_REASON:
        fused = disable("FusedAttention:", fused, FUSED_REASON)
    available = [flash, fused, unfused]
    if not fused:
        logger.warning("flash-attn v3 may provide important feature support or performance improvement.")
    fused, unfused = fused and not flash, unfused and not (flash or fused)
    return flash, FlashAttentionUtils.version if flash else None, fused, 1 if fused else None, unfused, available


FUSED_REASON = ""
