"""Calls of NATTEN that a model makes, read back."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pytest_attn.guests.models.attention_args import AttentionArguments, AttentionFunction, refuse_unread
from pytest_attn.workloads.masks import Neighborhood


def _read(given: Mapping[str, Any], dims: int) -> AttentionArguments:
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


_QKV = ("query", "key", "value")
_PARAMETERS = (*_QKV, "kernel_size", "stride", "dilation", "is_causal", "scale")
FUNCTIONS = tuple(
    AttentionFunction("natten", f"na{dims}d", _PARAMETERS, partial(_read, dims=dims), "natten", _QKV) for dims in (1, 2, 3)
)
