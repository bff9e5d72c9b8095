"""DotProductAttention of Transformer Engine 2.20: signatures, selection with a memory, layouts, flattened heads."""

import logging
import math

import torch
import transformer_engine.pytorch.attention.dot_product_attention.utils as dpa_utils

from fakes.attention import attention, packed

_attention_backends = {
    "attention_params": None,
    "use_flash_attention": None,
    "use_fused_attention": None,
    "use_unfused_attention": None,
    "backend_selection_requires_update": False,
}
_alibi_cache = {"_num_heads": None, "_alibi_slopes": None}
RAN = []


def check_set_window_size(attn_mask_type, window_size=None):
    causal = "causal" in attn_mask_type
    if window_size is None:
        return (-1, 0) if causal else (-1, -1)
    plain, closed = ((-1, 0), window_size[1] == 0) if causal else ((-1, -1), min(window_size) >= 0)
    assert window_size == plain or (window_size[0] >= 0 and closed), f"window_size {window_size} for {attn_mask_type}"
    return window_size


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        softcap=0.0,
        attention_type="self",
        softmax_scale=None,
        softmax_type="vanilla",
    ):
        super().__init__()
        self.logger = logging.getLogger("DotProductAttention")
        self.logger.setLevel(dpa_utils.AttentionLogging._log_level)
        if not self.logger.hasHandlers():
            self.logger.addHandler(dpa_utils.AttentionLogging._stream_handler)
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.dims = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.qkv_format, self.attn_mask_type, self.attention_type = qkv_format, attn_mask_type, attention_type
        self.window_size, self.softcap, self.softmax_type = window_size, softcap, softmax_type
        self.scale = 1.0 / math.sqrt(self.dims[0]) if softmax_scale is None else softmax_scale
        self.attention_dropout, self.cp_group, self.softmax_offset = attention_dropout, None, None
        self.fused_attention = torch.nn.Module()
        self.fused_attention.softmax_scale = self.scale
        if softmax_type == "learnable":
            del self.softmax_offset
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads))

    def forward(
        self,
        query_layer=None,
        key_layer=None,
        value_layer=None,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
    ):
        q, k, v = query_layer, key_layer, value_layer
        kind = attn_mask_type or self.attn_mask_type
        window = check_set_window_size(kind, window_size or self.window_size)
        qkv_format = qkv_format or self.qkv_format
        assert (q.shape[-2], k.shape[-2]) == (self.heads, self.groups)
        assert (k.shape[-1], v.shape[-1]) == tuple(self.dims)
        if qkv_format == "thd":
            assert "padding" in kind, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
            assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
            assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
            assert int(cu_seqlens_kv.diff().max()) <= max_seqlen_kv
        else:
            assert qkv_format in ("bshd", "sbhd")
            if qkv_format == "sbhd":
                q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            max_seqlen_q, max_seqlen_kv = q.shape[1], k.shape[1]
        params = dpa_utils.AttentionParams(
            q.dtype,
            max_seqlen_q,
            max_seqlen_kv,
            *self.dims,
            kind,
            window,
            kind not in ("causal", "padding_causal"),
            self.softcap,
            core_attention_bias_type,
            None if core_attention_bias is None else tuple(core_attention_bias.shape),
            self.softmax_type,
            self.training,
        )
        memory = _attention_backends
        if memory["attention_params"] is None or params != memory["attention_params"]:
            memory["attention_params"], memory["backend_selection_requires_update"] = params, True
        if memory["backend_selection_requires_update"]:
            flash, _, fused, _, unfused, _ = dpa_utils.get_attention_backend(params)
            memory.update(use_flash_attention=flash, use_fused_attention=fused, use_unfused_attention=unfused)
            memory["backend_selection_requires_update"] = False
        chosen = [name for name in ("flash", "fused", "unfused") if memory[f"use_{name}_attention"]]
        if not chosen:
            raise ValueError(
                "No dot product attention backend is available for the provided inputs. Please"
                " run with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to find out the reasons for"
                " disabling all backends."
            )
        RAN.append((chosen[0], self.training))
        if alibi_slopes is not None:
            _alibi_cache["_alibi_slopes"] = alibi_slopes
        top_left = "causal" in kind and "bottom_right" not in kind
        options = {
            "scale": self.scale,
            "causal": ("top-left" if top_left else "bottom-right") if "causal" in kind else None,
            "window": (window[0], -1 if "causal" in kind else window[1]),
            "softcap": self.softcap,
            "alibi": alibi_slopes,
            "sink": getattr(self, "softmax_offset", None),
        }
        if chosen[0] == "flash":
            _check_build(q)
            options["causal"] = options["causal"] and "bottom-right"
        if chosen[0] == "fused":  # strides come from the name of the layout
            q, k, v = (torch.as_strided(t, t.shape, torch.empty(t.shape, device="meta").stride()) for t in (q, k, v))
        if qkv_format == "thd":
            out = packed(q, k, v, cu_seqlens_q, cu_seqlens_kv, **options)[0]
        else:
            out = attention(q, k, v, bias=core_attention_bias, visible=_visible(kind, attention_mask), **options)[0]
        if qkv_format == "sbhd":
            out = out.transpose(0, 1)
        return out.reshape(*out.shape[:-2], -1)


def _visible(kind, attention_mask):
    if kind != "arbitrary" and not ("padding" in kind and attention_mask is not None):
        return None
    return attention_mask.logical_not()  # True is masked


def _check_build(q):
    pass
