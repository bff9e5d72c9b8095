"""DotProductAttention of Transformer Engine 2.20: selection with a memory, layouts, flattened heads."""

import math

import torch
import transformer_engine.pytorch.attention.dot_product_attention.utils as dpa_utils

from fakes.attention import attention, packed
from fakes.signatures import row

_attention_backends = {
    "attention_params": None,
    **{f"use_{name}_attention": None for name in ("flash", "fused", "unfused")},
    "backend_selection_requires_update": False,
}
_alibi_cache = {"_num_heads": None, "_alibi_slopes": None}
RAN = []
NONE_AVAILABLE = (
    "No dot product attention backend is available for the provided inputs. Please run with NVTE_DEBUG=1"
    " NVTE_DEBUG_LEVEL=2 to find out the reasons for disabling all backends."
)


def check_set_window_size(attn_mask_type, window_size=None):
    causal = "causal" in attn_mask_type
    if window_size is None:
        return (-1, 0) if causal else (-1, -1)
    plain, closed = ((-1, 0), window_size[1] == 0) if causal else ((-1, -1), min(window_size) >= 0)
    assert window_size == plain or (window_size[0] >= 0 and closed), f"window_size {window_size} for {attn_mask_type}"
    return window_size


class DotProductAttention(torch.nn.Module):
    @row("te", "__init__")
    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups, softmax_scale, softmax_type, **given):
        super().__init__()
        self.logger = dpa_utils.logger()
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.dims = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.__dict__.update(given, softmax_type=softmax_type, cp_group=None)
        self.fused_attention = torch.nn.Module()
        self.fused_attention.softmax_scale = 1.0 / math.sqrt(self.dims[0]) if softmax_scale is None else softmax_scale
        self.scale = self.fused_attention.softmax_scale
        learnable = softmax_type == "learnable"
        self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads)) if learnable else None

    @row("te", "forward")
    def forward(
        self, query_layer, key_layer, value_layer, attention_mask, qkv_format, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q,
        max_seqlen_kv, attn_mask_type, window_size, core_attention_bias_type, core_attention_bias, alibi_slopes,
    ):  # fmt: skip
        q, k, v = query_layer, key_layer, value_layer
        kind, qkv_format = attn_mask_type or self.attn_mask_type, qkv_format or self.qkv_format
        window = check_set_window_size(kind, window_size or self.window_size)
        assert (q.shape[-2], k.shape[-2]) == (self.heads, self.groups)
        assert (k.shape[-1], v.shape[-1]) == tuple(self.dims)
        if qkv_format == "thd":
            assert "padding" in kind, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
            for ends, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_kv, max_seqlen_kv)):
                assert ends.dtype == torch.int32
                assert int(ends.diff().max()) <= longest
        else:
            assert qkv_format in ("bshd", "sbhd")
            if qkv_format == "sbhd":
                q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            max_seqlen_q, max_seqlen_kv = q.shape[1], k.shape[1]
        bias = core_attention_bias_type, None if core_attention_bias is None else tuple(core_attention_bias.shape)
        is_bottom_right = kind not in ("causal", "padding_causal")
        ran = self._chosen(
            dpa_utils.AttentionParams(
                *(q.dtype, max_seqlen_q, max_seqlen_kv, *self.dims, kind, window, is_bottom_right, self.softcap),
                *(*bias, self.softmax_type, self.training),
            )
        )
        RAN.append((ran, self.training))
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
        if ran == "flash":
            _check_build(q)
            options["causal"] = options["causal"] and "bottom-right"
        if ran == "fused":  # strides come from the name of the layout
            q, k, v = (torch.as_strided(t, t.shape, torch.empty(t.shape, device="meta").stride()) for t in (q, k, v))
        if qkv_format == "thd":
            out = packed(q, k, v, cu_seqlens_q, cu_seqlens_kv, **options)[0]
        else:
            out = attention(q, k, v, bias=core_attention_bias, visible=_visible(kind, attention_mask), **options)[0]
        if qkv_format == "sbhd":
            out = out.transpose(0, 1)
        return out.reshape(*out.shape[:-2], -1)

    def _chosen(self, params):
        memory = _attention_backends
        if memory["attention_params"] is None or params != memory["attention_params"]:
            memory["attention_params"], memory["backend_selection_requires_update"] = params, True
        if memory["backend_selection_requires_update"]:
            flash, _, fused, _, unfused, _ = dpa_utils.get_attention_backend(params)
            memory.update(use_flash_attention=flash, use_fused_attention=fused, use_unfused_attention=unfused)
            memory["backend_selection_requires_update"] = False
        for name in ("flash", "fused", "unfused"):
            if memory[f"use_{name}_attention"]:
                return name
        raise ValueError(NONE_AVAILABLE)


def _visible(kind, attention_mask):
    if kind != "arbitrary" and not ("padding" in kind and attention_mask is not None):
        return None
    return attention_mask.logical_not()  # True is masked


def _check_build(q):
    pass
