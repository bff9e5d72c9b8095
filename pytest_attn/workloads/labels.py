"""The id of a workload: every field that differs from its default, in a fixed order."""

from __future__ import annotations

from typing import Any

from pytest_attn.workloads.dtypes import short_dtype
from pytest_attn.workloads.fields import short_lengths
from pytest_attn.workloads.functions import function_label


def shape_id(w: Any) -> str:
    """Return the id of a Workload, which imports this file, without name and dtype."""
    parts = [
        f"b{w.batch}" if w.batch != 1 and not w.is_packed else "",
        f"h{w.heads}" if w.heads != 1 else "",
        f"kv{w.kv_heads}" if w.kv_heads != w.heads else "",
        "interleaved" if w.head_groups == "interleaved" else "",
        _lengths(w),
        f"d{w.head_dim}",
        f"dv{w.v_head_dim}" if w.v_head_dim != w.head_dim else "",
        w.mask.label if w.mask else "",
        f"softcap{w.softcap:g}" if w.softcap is not None else "",
        f"scale{w.scale:g}" if w.scale is not None else "",
        f"bias.{w.bias}" if w.bias else "",
        "biasfirst" if w.bias_before_softcap else "",
        ("alibi.b" if w.alibi == "batch" else "alibi") if w.alibi else "",
        (f"sinks.{w.sinks}" if isinstance(w.sinks, str) else "sinks") if w.sinks else "",
        f"dropout{w.dropout:g}" if w.dropout else "",
        f"mod.{function_label(w.score_mod)}" if w.score_mod else "",
        w.kv_pages.label if w.kv_pages else "",
        f"cached{short_lengths(w.cached if len(set(w.cached)) > 1 else w.cached[:1])}" if w.cached else "",
        f"kv{short_dtype(w.kv_dtype)}" if w.kv_dtype else "",
        f"descale.{w.descales}" if w.descales not in (None, "tensor") else "",
        "vink" if w.v_in_k else "",
    ]
    return "-".join(part for part in parts if part)


def _lengths(w: Any) -> str:
    if w.q_lens is not None and w.kv_lens is not None:
        packed = f"packed{short_lengths(w.q_lens)}"
        return packed if w.kv_lens == w.q_lens else f"{packed}-k{short_lengths(w.kv_lens)}"
    shape = f"s{w.q_len}" if w.q_len == w.kv_len else f"q{w.q_len}-k{w.kv_len}"
    if w.kv_lens is None or (set(w.kv_lens) == {w.kv_len} and w.pad == "right"):
        return shape
    return f"{shape}-{'left' if w.pad == 'left' else ''}pad{short_lengths(w.kv_lens)}"
