"""Traits that set a workload apart from plain attention of one dense batch: one word for each trait, the same everywhere.

Backends say with these words what they can do, strategies what they draw, --attn-fuzz what a test's workloads have in common.
"""

from pytest_attn.workloads.dtypes import DTYPES
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


#: an option, and the one that it includes
_INCLUDED = {
    "ALiBi per batch entry": "alibi",
    "sinks of another dtype": "sinks",
    "bias before softcap": "bias",
    "interleaved heads": "grouped heads",
    "v in k": "v_head_dim",
}
#: up to which head dimensions libraries have kernels of their own, and from how many rows and keys on they take another one
_HEAD_DIMS, _ROWS, _KEYS = (32, 64, 96, 128, 192, 256), (2, 128), (257, 1024)


def options_of(w: Workload) -> frozenset[str]:
    """Return the options of a workload: its traits, those that include another alone, and what traits leave open."""
    traits = set(traits_of(w))
    traits -= {general for special, general in _INCLUDED.items() if special in traits}
    more = {
        "one query": w.q_len == 1 and w.kv_len > 200,
        "q < k": 1 < w.q_len < w.kv_len,
        "q > k": w.q_len > w.kv_len,
        "one sequence": w.is_packed and w.batch == 1,
        "page size": w.kv_pages is not None and w.kv_pages.size != 16,
        **{dtype: w.dtype == dtype for dtype in DTYPES if dtype != "bfloat16"},
    }
    return frozenset(traits - {"plain", "fewer queries", "fewer keys"} | {word for word, is_there in more.items() if is_there})


def kernels_of(w: Workload) -> frozenset[str]:
    """Return which of a library's kernels a workload may reach: by its dtype and head dimensions, its rows, its keys."""
    dims = [next((str(most) for most in _HEAD_DIMS if dim <= most), "more") for dim in (w.head_dim, w.v_head_dim)]
    rows, keys = (sum(n >= least for least in steps) for n, steps in ((w.q_len, _ROWS), (w.kv_len, _KEYS)))
    return frozenset((f"{w.dtype}, head_dim {'/'.join(dict.fromkeys(dims))}", f"rows {rows}", f"keys {keys}"))


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
        "sinks of another dtype": bool(w.sinks) and w.sinks_dtype != w.out_dtype,
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
