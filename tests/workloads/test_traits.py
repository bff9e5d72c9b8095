"""The traits of workloads: each word with a workload that has it and no other, and with one that nearly does."""

import pytest
import torch

from pytest_attn import BooleanMask, Document, Neighborhood, Pages, Window, Workload
from pytest_attn.backends.capabilities import FEATURES as CAPABILITIES
from pytest_attn.strategies import FEATURES, LAYOUT_KINDS, MASK_KINDS
from pytest_attn.workloads.traits import layout_of, traits_of


def all_of_it(batch, heads, q_len, kv_len, device):
    return torch.ones(q_len, kv_len, dtype=torch.bool, device=device)


def past(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def halved(score, b, h, q_idx, kv_idx):
    return score / 2


GROUPED = {"heads": 4, "kv_heads": 2}
CASES = [
    (Workload(8), {"plain"}),
    (Workload(8, heads=2, batch=3, dtype="float16", name="x"), {"plain"}),
    (Workload(8, mask="causal"), {"plain", "causal"}),
    (Workload(8, mask="causal-bottom-right"), {"plain", "causal-bottom-right"}),
    (Workload(8, mask=Window(3, 0)), {"plain", "window"}),
    (Workload(8, mask=Document((5, 3))), {"plain", "documents"}),
    (Workload(8, mask=Neighborhood((8,), (3,))), {"plain", "neighborhood"}),
    (Workload(8, mask=BooleanMask(all_of_it)), {"plain", "boolean"}),
    (Workload(8, mask=past), {"plain", "mask_mod"}),
    (Workload(8, softcap=5.0), {"plain", "softcap"}),
    (Workload(8, scale=0.5), {"plain", "scale"}),
    (Workload(8, bias="hq"), {"plain", "bias"}),
    (Workload(8, bias="q", softcap=2.0, bias_before_softcap=True), {"plain", "bias", "softcap", "bias before softcap"}),
    (Workload(8, bias="hq", bias_dtype="bfloat16"), {"plain", "bias"}),
    (Workload(8, bias="hq", bias_dtype="float32"), {"plain", "bias", "bias of another dtype"}),
    (Workload(8, alibi=True), {"plain", "alibi"}),
    (Workload(8, alibi="batch"), {"plain", "alibi", "ALiBi per batch entry"}),
    (Workload(8, sinks=True), {"plain", "sinks"}),
    (Workload(8, sinks="bfloat16"), {"plain", "sinks"}),
    (Workload(8, sinks="float32"), {"plain", "sinks", "sinks of another dtype"}),
    (Workload(8, score_mod=halved), {"plain", "score_mod"}),
    (Workload(8, dropout=0.5), {"plain", "dropout"}),
    (Workload(8, **GROUPED), {"plain", "grouped heads"}),
    (Workload(8, **GROUPED, head_groups="interleaved"), {"plain", "grouped heads", "interleaved heads"}),
    (Workload(8, heads=2, kv_heads=1, head_groups="interleaved"), {"plain", "grouped heads"}),
    (Workload(8, v_head_dim=32), {"plain", "v_head_dim"}),
    (Workload(8, v_in_k=True), {"plain", "v in k"}),
    (Workload(8, dtype="fp8"), {"plain", "quantized"}),
    (Workload(8, 9), {"plain", "fewer queries"}),
    (Workload(9, 8), {"plain", "fewer keys"}),
    (Workload(8, kv_lens=(8, 8)), {"padded"}),
    (Workload(8, kv_lens=(8, 0)), {"padded", "fewer keys", "empty sequences"}),
    (Workload(8, kv_lens=(8, 8), pad="left"), {"padded", "left-padded"}),
    (Workload(q_lens=(8, 3)), {"packed"}),
    (Workload(q_lens=(8, 0)), {"packed", "empty sequences"}),
    (Workload(8, kv_pages=16), {"paged"}),
    (Workload(8, kv_pages=Pages(16, "HND")), {"paged", "page layouts"}),
    (Workload(q_lens=(8, 3), kv_pages=16), {"paged", "packed pages"}),
    (Workload(8, cached=4), {"plain", "cached", "fewer queries"}),
]


@pytest.mark.parametrize(("workload", "traits"), CASES, ids=[workload.id for workload, _ in CASES])
def test_a_workload_has_its_traits_and_no_others(workload, traits):
    assert traits_of(workload) == traits
    assert layout_of(workload) == ("packed pages" if "packed pages" in traits else (traits & set(LAYOUT_KINDS)).pop())


def test_what_backends_and_strategies_speak_of_are_traits():
    known = frozenset().union(*(traits for _, traits in CASES))
    assert {*CAPABILITIES} - {"backward"} <= known
    assert {*FEATURES, *LAYOUT_KINDS, *MASK_KINDS} - {None} <= known
