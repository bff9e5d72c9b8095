"""What sets a workload apart from plain attention of one dense batch: one word for each trait, the same everywhere.

Backends say with these words what they can do, strategies what they draw, --attn-fuzz what a test's workloads have in common.
"""

from __future__ import annotations

from pytest_attn.workloads.workload import Workload, is_interleaved, sequence_lengths

#: where queries and keys lie: all lengths alike, keys padded, sequences end to end, keys in pages, those of packed queries too
LAYOUT_KINDS = ("plain", "padded", "packed", "paged", "packed pages")


def traits_of(w: Workload) -> frozenset[str]:
    """Return the traits of a workload: its kind of mask, its options of scores and softmax, its heads, lengths and layout."""
    return frozenset(trait for trait, is_there in _traits(w).items() if is_there) | ({w.mask.kind} if w.mask else set())


def layout_of(w: Workload) -> str:
    """Return which of LAYOUT_KINDS it has."""
    traits = traits_of(w)
    return next(layout for layout in reversed(LAYOUT_KINDS) if layout in traits)


def _traits(w: Workload) -> dict[str, bool]:
    lengths = sequence_lengths(w)
    is_paged = w.kv_pages is not None
    return {
        # scores and softmax
        "softcap": w.softcap is not None,
        "bias": w.bias is not None,
        "bias before softcap": w.bias_before_softcap,
        "bias of another dtype": w.bias_dtype not in (None, w.dtype),
        "alibi": bool(w.alibi),
        "ALiBi per batch entry": w.alibi == "batch",
        "sinks": bool(w.sinks),
        "sinks of another dtype": isinstance(w.sinks, str) and w.sinks != w.dtype,
        "score_mod": w.score_mod is not None,
        "scale": w.scale is not None,
        "dropout": bool(w.dropout),
        # heads and dtypes
        "grouped heads": w.group > 1,
        "interleaved heads": is_interleaved(w),
        "v_head_dim": w.v_head_dim != w.head_dim,
        "v in k": w.v_in_k,
        "quantized": w.is_quantized,
        # lengths
        "fewer queries": any(q_len < kv_len for q_len, kv_len in lengths),
        "fewer keys": any(q_len > kv_len for q_len, kv_len in lengths),
        "empty sequences": any(0 in pair for pair in lengths),
        # layout
        "plain": w.kv_lens is None and not is_paged,
        "padded": w.kv_lens is not None and not w.is_packed and not is_paged,
        "packed": w.packs_keys,
        "paged": is_paged,
        "packed pages": w.is_packed and is_paged,
        "page layouts": w.kv_pages is not None and not w.kv_pages.is_plain,
        "cached": w.cached is not None,
        "left-padded": w.pad == "left",
    }
