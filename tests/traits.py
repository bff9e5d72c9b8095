"""What a workload has, in the words of `pytest_attn.strategies`."""

from pytest_attn import BooleanMask, Document, Neighborhood, Window
from pytest_attn.workloads.masks import Causal, MaskModMask
from pytest_attn.workloads.workload import sequence_lengths


def mask_kind(w):
    kinds = {Window: "window", Document: "documents", Neighborhood: "neighborhood", BooleanMask: "boolean"}
    if isinstance(w.mask, Causal):
        return "causal-bottom-right" if w.mask.bottom_right else "causal"
    return {**kinds, MaskModMask: "mask_mod", type(None): None}[type(w.mask)]


def layout(w):
    return (
        ("packed pages" if w.is_packed else "paged")
        if w.kv_pages
        else "packed"
        if w.is_packed
        else "padded"
        if w.kv_lens
        else "plain"
    )


def features(w):
    lengths = sequence_lengths(w)
    has = {
        "fewer queries": any(q < k for q, k in lengths),
        "fewer keys": w.q_len > w.kv_len,
        "grouped heads": w.group > 1,
        "v_head_dim": w.v_head_dim != w.head_dim,
        "empty sequences": any(0 in pair for pair in lengths),
        **{
            name: getattr(w, name) not in (None, False) for name in ("scale", "softcap", "bias", "alibi", "sinks", "score_mod")
        },
    }
    return {name for name, is_there in has.items() if is_there}
