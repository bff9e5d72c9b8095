"""The reference against a second, independent formula, and against torch's own float64 SDPA."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_attn import Pages, Workload, draw_inputs
from pytest_attn.backends.dense import index_tensors
from pytest_attn.backends.precision import PRECISIONS
from pytest_attn.correctness import arithmetic, reference
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.parameters import PARAMETERS, parameters_of

FLASH = PRECISIONS["flash"]
GROUPS = ("smoke", "edges", "softcap", "alibi", "prefix-lm", "relative-bias", "neighborhood", "kv-cache", "documents")
DENSE = [w for group in GROUPS for w in builtin_catalog().select(group) if not w.is_packed]
COMBINED = [
    Workload(33, 40, heads=4, kv_heads=2, softcap=3.0, alibi=True, sinks=True, mask="causal-bottom-right"),
    Workload(24, heads=2, bias="hqk", softcap=2.0, sinks=True, score_mod=lambda s, b, h, q, kv: s * 0.5 + (q - kv) / 8),
    Workload(20, heads=2, head_dim=16, v_head_dim=24, batch=2, kv_lens=(20, 0), mask="causal"),
    Workload(9, 30, batch=2, heads=2, kv_pages=Pages(7), kv_lens=(30, 11), alibi=True),
    *(Workload(10, 14, batch=2, heads=4, kv_heads=2, bias=dims) for dims in ("hqk", "bhqk", "qk", "bk", "hk")),
    Workload(20, 28, heads=6, kv_heads=2, head_groups="interleaved", sinks="float32", mask="causal-bottom-right"),
    Workload(20, heads=2, bias="hqk", softcap=2.0, bias_before_softcap=True, mask="causal"),
    Workload(12, 20, batch=3, heads=4, kv_heads=2, alibi="batch", head_groups="interleaved"),
]


def second_formula(inputs):
    """Attention with explicit exponentials and autograd, no running maximum, no chunks: independent of the reference."""
    w = inputs.workload
    k, v = inputs.gathered()
    given = {"q": inputs.q, "k": k, "v": v, **{name: getattr(inputs, PARAMETERS[name].tensor) for name in parameters_of(w)}}
    leaves = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    b, h, i, j = index_tensors(w, inputs.device)
    heads = torch.arange(w.heads)
    of_key = heads % w.kv_heads if w.head_groups == "interleaved" else heads // w.group
    score = torch.einsum("bhid,bhjd->bhij", leaves["q"], leaves["k"][:, of_key]) * w.softmax_scale
    bias = 0 if inputs.bias is None else leaves.get("bias", inputs.bias.double())
    score = score + bias if w.bias_before_softcap else score
    if w.softcap is not None:
        score = w.softcap * torch.tanh(score / w.softcap)
    score = score if w.bias_before_softcap else score + bias
    if w.alibi:
        keys = inputs.kv_lens.view(-1, 1, 1, 1) if inputs.kv_lens is not None else w.kv_len
        slopes = leaves.get("alibi", inputs.alibi_slopes.double()).view(-1, w.heads, 1, 1)
        score = score - slopes * (i + keys - w.q_len - j).abs()
    if w.score_mod is not None:
        score = w.score_mod(score, b, h, i, j)
    mask_mod = inputs.mask_mod()
    visible = torch.ones(score.shape, dtype=torch.bool) if mask_mod is None else mask_mod(b, h, i, j).expand(score.shape)
    weights = torch.exp(score) * visible
    total = weights.sum(-1)
    if inputs.sinks is not None:
        total = total + torch.exp(leaves["sinks"]).view(1, -1, 1)
    p = weights / torch.where(total == 0, 1, total).unsqueeze(-1)
    out = torch.einsum("bhij,bhjd->bhid", p, leaves["v"][:, of_key])
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.dout.double())
    return {"out": out.detach(), "lse": total.log().detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def largest_difference(found, expected):
    same = (found == expected) | (found.isnan() & expected.isnan())
    return float(torch.where(same, 0.0, (found - expected).abs() / (1 + expected.abs())).max())


@pytest.mark.parametrize("distribution", ["structured", "flat", "peaky"])
@pytest.mark.parametrize(
    "workload", [*(pytest.param(w, marks=pytest.mark.one_in(10)) for w in DENSE), *COMBINED], ids=lambda w: w.id
)
def test_reference_equals_a_second_formula(workload, distribution):
    inputs = draw_inputs(workload, distribution)
    found = compute_reference(inputs, FLASH, backward=True, parameters=tuple(parameters_of(workload))).tensors
    for name, expected in second_formula(inputs).items():
        assert largest_difference(found[name].value.view(expected.shape), expected) < 1e-11, name
        assert name == "lse" or (found[name].tau > 0).any()


@pytest.mark.parametrize("name", ["smoke-full", "smoke-causal-gqa", "edges-d40", "edges-q129-k257-top-left", "vit-196"])
def test_reference_equals_torchs_own_float64_attention(name):
    (workload,) = builtin_catalog().select(name)
    inputs = draw_inputs(workload, "structured")
    q, k, v = (t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    with sdpa_kernel(SDPBackend.MATH):
        causal = workload.mask is not None
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=workload.group > 1)
    found = compute_reference(inputs, FLASH, backward=True).tensors
    assert largest_difference(found["out"].value, out.detach()) < 1e-12
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert largest_difference(found[name].value, grad) < 1e-12


@pytest.mark.parametrize("mask", [None, "causal", "causal-bottom-right"])
def test_packed_sequences_are_judged_one_by_one(mask):
    packed = Workload(q_lens=(7, 1, 20), kv_lens=(9, 4, 20), heads=4, kv_heads=2, mask=mask, head_dim=16)
    inputs = draw_inputs(packed, "structured")
    found = compute_reference(inputs, FLASH, backward=True).tensors
    q_at = kv_at = 0
    for q_len, kv_len in zip(packed.q_lens, packed.kv_lens, strict=True):
        alone = Workload(q_len, kv_len, heads=4, kv_heads=2, mask=mask, head_dim=16)
        rows, keys = slice(q_at, q_at + q_len), slice(kv_at, kv_at + kv_len)
        places = {"q": rows, "dout": rows, "k": keys, "v": keys}
        tensors = {name: getattr(inputs, name)[at].transpose(0, 1)[None] for name, at in places.items()}
        part = replace(draw_inputs(alone, "flat"), **tensors)
        for name, expected in second_formula(part).items():
            at = keys if name in ("dk", "dv") else rows
            assert largest_difference(found[name].value[:, :, at], expected) < 1e-11
        q_at, kv_at = q_at + q_len, kv_at + kv_len


@pytest.mark.one_in(8)
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_chunks_change_nothing(monkeypatch, precision, dtype):
    workload = Workload(50, 70, batch=2, heads=4, kv_heads=2, mask="causal-bottom-right", dtype=dtype)
    inputs = draw_inputs(workload, "structured")
    whole = compute_reference(inputs, precision, backward=True).tensors
    monkeypatch.setattr(arithmetic, "_CHUNK_ELEMENTS", {"cpu": 70 * 2 * 7})
    parts = compute_reference(inputs, precision, backward=True).tensors
    for name in whole:
        assert largest_difference(parts[name].value, whole[name].value) < 1e-12
        if name != "lse":
            torch.testing.assert_close(parts[name].tau, whole[name].tau, rtol=1e-4, atol=0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_sampled_rows_and_keys_are_exact(monkeypatch, backward, mask):
    workload = Workload(500, heads=4, kv_heads=2, mask=mask)
    inputs = draw_inputs(workload, "structured")
    whole = compute_reference(inputs, FLASH, backward).tensors
    monkeypatch.setattr(reference, "_FULL_ELEMENTS", {"cpu": 1})
    monkeypatch.setattr(reference, "_SAMPLED_ROWS", 64)
    sampled = compute_reference(inputs, FLASH, backward).tensors
    assert set(sampled) == set(whole)
    for name, expected in sampled.items():
        rows = expected.rows
        assert 40 < len(rows) < 240
        assert {0, 499, 127, 128} <= set(rows.tolist())
        assert largest_difference(expected.value, whole[name].value[:, :, rows]) < 1e-12
        if name != "lse":
            # the variance of D is estimated from the sampled keys, so that of dk follows it roughly
            close = 1 if name == "dk" else 2e-2
            torch.testing.assert_close(expected.tau, whole[name].tau[:, :, rows], rtol=close, atol=1e-12)


def test_a_row_that_sees_nothing_is_zero_with_lse_minus_infinity():
    workload = Workload(6, 3, mask="causal-bottom-right")
    found = compute_reference(draw_inputs(workload, "structured"), FLASH, backward=True).tensors
    assert not found["out"].value[0, 0, :3].any()
    assert (found["lse"].value[0, 0, :3] == -math.inf).all()
    assert not found["dq"].value[0, 0, :3].any()


def test_memory_grows_with_the_sequence_not_with_its_square():
    """Every temporary of a chunk stays below a bound that a full score matrix would break."""
    assert arithmetic.chunk_elements(torch.device("cpu")) < 2048 * 2048


def test_what_is_small_is_computed_by_one_thread_and_the_number_is_as_before(monkeypatch):
    seen, blocks, threads = [], reference.head_blocks, torch.get_num_threads()
    monkeypatch.setattr(reference, "head_blocks", lambda segment: seen.append(torch.get_num_threads()) or blocks(segment))
    torch.set_num_threads(3)
    try:
        for most in (8 * 8, 8 * 8 - 1):
            monkeypatch.setattr(reference, "_OF_ONE_THREAD", most)
            compute_reference(draw_inputs(Workload(8)), FLASH)
            seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(threads)
    assert seen == [1, 3, 3, 3]
