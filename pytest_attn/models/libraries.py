"""The entry points of attention libraries, and how the arguments of each are read; caught only where a library is imported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_attn.models.asked import Asked, UnreadableError
from pytest_attn.models.entry_points import EntryPoint, refuse_unread, sdpa_mask
from pytest_attn.models.flash_attention import FLASH_ATTENTION, alone, bottom_right, first, swapped
from pytest_attn.models.transformer_engine import TRANSFORMER_ENGINE
from pytest_attn.workloads.masks import Causal, Neighborhood

if TYPE_CHECKING:
    import torch


# -- xFormers, SageAttention, NATTEN, FlashInfer -------------------------------------------------------------------------

_XFORMERS_MASKS = {
    "LowerTriangularMask": Causal(),
    "LowerTriangularFromBottomRightMask": Causal(bottom_right=True),
}


def _read_xformers(given: Mapping[str, Any]) -> Asked:
    refuse_unread(given, {"query", "key", "value", "attn_bias", "p", "scale"}, frozenset(("op",)))
    q, k, v = (given[name] for name in ("query", "key", "value"))
    if q.dim() != 4:
        raise UnreadableError(f"its argument query has shape {tuple(q.shape)}; expected (batch, rows, heads, dim)")
    q, k, v = swapped(q), swapped(k), swapped(v)
    attn_bias, visible, bias, mask = given.get("attn_bias"), None, None, None
    if type(attn_bias).__name__ in _XFORMERS_MASKS:
        mask = _XFORMERS_MASKS[type(attn_bias).__name__]
    elif getattr(attn_bias, "ndim", 0) == 4:
        visible, bias = sdpa_mask(attn_bias, tuple(q.shape[:2]), q, k)  # type: ignore[arg-type]
    elif attn_bias is not None:
        raise UnreadableError(f"its argument attn_bias is a {type(attn_bias).__name__}, which is not read")
    return Asked(
        q,
        k,
        v,
        visible=visible,
        bias=bias,
        mask=mask,
        scale=given.get("scale"),
        dropout=float(given.get("p") or 0.0),
        fold=swapped,
        fold_out=swapped,
        result_of=swapped,
    )


def _read_sage(given: Mapping[str, Any]) -> Asked:
    known = {"q", "k", "v", "tensor_layout", "is_causal", "sm_scale", "return_lse"}
    refuse_unread(given, known, frozenset(("smooth_k", "smooth_v", "pv_accum_dtype", "qk_quant_gran")))
    fold = swapped if given.get("tensor_layout", "HND") == "NHD" else (lambda tensor: tensor)
    return Asked(
        fold(given["q"]),
        fold(given["k"]),
        fold(given["v"]),
        mask=Causal() if given.get("is_causal") else None,
        scale=given.get("sm_scale"),
        fold=fold,
        out_of=first,
        fold_out=fold,
        result_of=lambda out: alone(out, given.get("return_lse"), fold),
    )


def _read_natten(given: Mapping[str, Any], dims: int) -> Asked:
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

    def fold(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten(1, dims).transpose(1, 2)

    return Asked(
        fold(given["query"]),
        fold(given["key"]),
        fold(given["value"]),
        mask=mask,
        scale=given.get("scale"),
        fold=fold,
        fold_out=fold,
        result_of=lambda out: out.transpose(1, 2).reshape(out.shape[0], *shape, out.shape[1], out.shape[3]),
    )


def _read_flashinfer(given: Mapping[str, Any]) -> Asked:
    known = {"q", "k", "v", "causal", "kv_layout", "sm_scale", "window_left", "logits_soft_cap", "return_lse"}
    refuse_unread(
        {name: value for name, value in given.items() if (name, value) != ("pos_encoding_mode", "NONE")},
        known,
        frozenset(("backend", "use_fp16_qk_reduction")),
    )

    def fold(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1)[None]

    kv = fold if given.get("kv_layout", "NHD") == "NHD" else (lambda tensor: tensor[None])
    if kv is not fold:
        raise UnreadableError("its argument kv_layout='HND' is not read; 'NHD' is")
    left = given.get("window_left")
    return Asked(
        fold(given["q"]),
        fold(given["k"]),
        fold(given["v"]),
        mask=bottom_right(given.get("causal"), (-1 if left is None else left, -1)),
        scale=given.get("sm_scale"),
        softcap=given.get("logits_soft_cap") or None,
        fold=fold,
        out_of=first,
        fold_out=fold,
        result_of=lambda out: alone(out, given.get("return_lse"), lambda t: t[0].transpose(0, 1)),
    )


_QKV = ("query", "key", "value")
LIBRARIES = (
    *FLASH_ATTENTION,
    *TRANSFORMER_ENGINE,
    EntryPoint(
        "xformers.ops", "memory_efficient_attention", (*_QKV, "attn_bias", "p", "scale"), _read_xformers, "xformers", _QKV
    ),
    EntryPoint("sageattention", "sageattn", ("q", "k", "v", "tensor_layout", "is_causal", "sm_scale"), _read_sage, "sage"),
    *(
        EntryPoint(
            "natten",
            f"na{dims}d",
            (*_QKV, "kernel_size", "stride", "dilation", "is_causal", "scale"),
            partial(_read_natten, dims=dims),
            "natten",
            _QKV,
        )
        for dims in (1, 2, 3)
    ),
    EntryPoint("flashinfer", "single_prefill_with_kv_cache", ("q", "k", "v"), _read_flashinfer, "flashinfer_fa2"),
)
