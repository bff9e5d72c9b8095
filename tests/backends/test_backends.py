import dataclasses
import sys
import types
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fakes.attention import packed as packed_attention
from fakes.judged import H200, HOST

from pytest_attn import Backend, Document, Pages, Window, Workload, draw_inputs
from pytest_attn.backends import machine as machines
from pytest_attn.backends import sdpa
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache

CPU = machines.machine_of(torch.device("cpu"))
CAUSAL = Workload(48, heads=2, mask="causal")


def judged(name, workload, **options):
    question = CheckSpec(workload, torch.device("cpu"), **options)
    return judge(Registry()[name], question, ReferenceCache())


@pytest.mark.parametrize(
    "workload", [CAUSAL, CAUSAL.replace(mask=Window(7, 0)), CAUSAL.replace(kv_len=80, mask="causal-bottom-right")]
)
def test_decoding_step_by_step_equals_one_prefill(workload, monkeypatch):
    lengths, plain = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, *given, **options: lengths.append(q.shape[2]) or plain(q, *given, **options),
    )
    assert judged("kv_cache", workload).passed
    assert lengths[:9] == [40, *[1] * 8], "its prompt at once, then tokens"


def test_a_prompt_takes_the_memory_of_its_scores():
    prompt, registry = Workload(512, 1 << 20, mask="causal-bottom-right"), Registry()
    assert registry["kv_cache"].workspace(prompt) == registry["math"].workspace(prompt) > 0
    assert registry["kv_cache"].workspace(prompt.replace(q_len=8)) == 0


@pytest.mark.parametrize(
    ("name", "workload", "reason"),
    [
        ("sdpa", Workload(8, softcap=1.0), "has no softcap"),
        ("sdpa", Workload(8, sinks=True), "has no sinks"),
        ("sdpa", Workload(8, alibi=True), "would round ALiBi's distances to bfloat16 in attn_mask"),
        ("math", Workload(q_lens=(3, 4)), "does not support packed sequences"),
        ("sdpa_flash", Workload(8, v_head_dim=32), "needs v_head_dim equal to head_dim"),
        ("eager", Workload(q_lens=(3, 4)), "does not support packed sequences"),
        ("flex", Workload(8, kv_pages=Pages(4)), "does not support a paged KV cache"),
        ("flex_decode", Workload(256), "decodes fewer than 128 query rows"),
        ("flex_decode", Workload(1, 64, heads=6, kv_heads=2), "needs a group size that is a power of two, not 3"),
        ("flex_decode", Workload(64, 512, heads=8, kv_heads=2), "finds no kernel for q_len * group = 256 rows"),
        ("kv_cache", Workload(8), "decodes causally"),
        ("kv_cache", Workload(1024, mask="causal"), "decodes token by token: at most 512, not 1024"),
        ("varlen", Workload(8, mask=lambda b, h, q, kv: q >= kv), "has no mask given as a tensor or function"),
        ("varlen", Workload(8, 16, mask="causal"), "has no causal mask aligned to the first key"),
        ("varlen", Workload(8, dtype="fp32"), "takes bfloat16 and float16 only, not float32"),
    ],
)
def test_a_backend_refuses_with_its_reason(name, workload, reason):
    reasons = Registry()[name].unsupported_because(workload, CPU)
    assert any(reason in said for said in reasons), reasons


@pytest.mark.parametrize("name", ["sdpa_efficient", "sdpa_cudnn", "varlen"])
def test_a_gpu_backend_is_unavailable_on_a_cpu(name):
    assert Registry()[name].unavailable_because(CPU) == "needs a CUDA device"


def test_varlen_is_unavailable_where_torch_does_not_have_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", types.ModuleType("varlen"))
    assert "has no torch.nn.attention.varlen" in Registry()["varlen"].unavailable_because(H200)


def test_varlen_packs_dense_batches_and_documents(monkeypatch):
    """Against a stand-in of torch's function: the call that the adapter makes is the one that the function describes."""
    calls = []

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        calls.append((query.shape, cu_seq_q.tolist(), cu_seq_k.tolist(), max_q, max_k, window_size, enable_gqa))
        return packed_attention(query, key, value, cu_seq_q, cu_seq_k, scale=scale, window=window_size)[0]

    module = types.ModuleType("varlen")
    module.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    for workload in (
        Workload(8, 12, batch=2, heads=4, kv_heads=2, mask="causal-bottom-right"),
        Workload(10, heads=2, mask=Document((4, 6), causal=True)),
        Workload(q_lens=(3, 5), kv_lens=(7, 5), heads=2, mask="causal-bottom-right"),
    ):
        backend = Registry()["varlen"]
        assert backend.unsupported_because(workload, H200) == []
        assert judged("varlen", workload).passed
    dense, documents, packed = calls[0], calls[3], calls[6]  # a check makes three calls: two distributions, the first again
    assert dense[1:] == ([0, 8, 16], [0, 12, 24], 8, 12, (-1, 0), True)
    assert documents[1:4] == ([0, 4, 10], [0, 4, 10], 6)
    assert packed[1:3] == ([0, 3, 8], [0, 7, 12])


def test_sdpa_gets_exactly_one_kernel_and_the_choice_is_restored():
    before = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    kernel = Registry()["math"].prepare(draw_inputs(CAUSAL, "flat"))
    inputs = draw_inputs(CAUSAL, "flat")
    kernel(inputs.q, inputs.k, inputs.v)
    assert (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()) == before


@pytest.mark.parametrize("takes_groups", [True, False])
def test_the_cpu_kernel_of_sdpa_refuses_gqa_where_torch_does(monkeypatch, takes_groups):
    monkeypatch.setattr("pytest_attn.backends.sdpa._cpu_kernel_takes_groups", lambda: takes_groups)
    machine = dataclasses.replace(CPU, torch_version="2.6.0+cpu")
    said = Registry()["sdpa_flash"].unsupported_because(Workload(8, heads=4, kv_heads=2), machine)
    reason = "does not support grouped-query attention (GQA) on a CPU in torch 2.6.0+cpu"
    assert said == ([] if takes_groups else [reason])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["sdpa+compile", "eager+compile", "math+compile"])
def test_compiled_variants_are_right(name):
    assert judged(name, Workload(32, heads=2, head_dim=32), inputs=("flat",)).passed


def test_a_variant_that_makes_no_sense_says_so():
    registry = Registry()
    assert registry["flex+compile"].unavailable_because(CPU) == "flex has no variant +compile"
    assert registry["kv_cache+compile"].unavailable_because(CPU) == "kv_cache has no variant +compile"
    with pytest.raises(ValueError, match="unknown variant 'fast' of backend 'sdpa'; known: compile, max_autotune"):
        registry.require("sdpa+fast")
    with pytest.raises(ValueError, match=r"unknown backend 'spda'; did you mean sdpa\? known: math, eager, sdpa"):
        registry["spda"]


def test_flex_tunes_in_one_compilation():
    tuned = Registry()["flex+max_autotune"]
    assert tuned.name == "flex+max_autotune"
    assert tuned.max_autotune


def test_flex_expresses_masks_and_modifications(uncompiled):
    changed = {"softcap": 4.0, "bias": "hqk", "alibi": True, "sinks": True}
    many = Workload(24, 40, heads=4, kv_heads=2, kv_lens=(40, 30), mask="causal", **changed)
    packed = Workload(q_lens=(9, 30), kv_lens=(12, 30), heads=2, mask="causal-bottom-right")
    assert all(judged("flex", workload, inputs=("structured",)).passed for workload in (many, packed))


class Own(Backend):
    name = "own"

    def prepare(self, inputs, backward=False):
        return lambda q, k, v: q


def test_backends_of_ones_own():
    registry = Registry()
    registry.add(Own())
    registry.add_function(
        "swapped", lambda q, k, v, workload: q, layout="bshd", unsupported_because=lambda w: ["no"] * w.alibi
    )
    assert registry.names[-2:] == ["own", "swapped"]
    assert registry["swapped"].unsupported_because(Workload(8, alibi=True), CPU) == ["no"]
    with pytest.raises(ValueError, match="two backends are named 'own'; rename one"):
        registry.add(Own())
    with pytest.raises(ValueError, match="backend 'x': layout must be 'bhsd' or 'bshd', got 'sbhd'"):
        registry.add_function("x", dict, layout="sbhd")
    with pytest.raises(ValueError, match="backend name 'a b' must consist of letters, digits, underscores and dots"):
        registry.add_function("a b", dict)
    with pytest.raises(ValueError, match="backend name 'all' means a selection in --attn-backends; rename yours"):
        registry.add_function("all", dict)
    with pytest.raises(ValueError, match=r"add takes an instance of pytest_attn\.Backend, got <built-in function print>"):
        registry.add(print)
    with pytest.raises(ValueError, match=r"'x': fn must be a function of \(q, k, v, workload\), got 5"):
        registry.add_function("x", 5)
    with pytest.raises(ValueError, match=r"'x': fn must be a function of \(q, k, v, workload\), got .* without it"):
        registry.add_function("x", lambda q, k, v: q)


def test_memory_that_nobody_wrote_may_hold_nan():
    """As dk of Flux in float16 did on an H200: all of it NaN, so that no finite element is off."""
    stale_strides = Registry()["sdpa_cudnn"].known_defects[2]

    def shows(**figures):
        return stale_strides.shows(
            SimpleNamespace(**{"elements": 100, "wrong_positions": 0, "relative_l2": 0.0, **figures}), None
        )

    assert shows(wrong_positions=100)
    assert shows(relative_l2=1.2)
    assert shows(relative_l2=float("nan"))
    assert not shows(wrong_positions=3)
    assert not shows(relative_l2=0.01)


def test_a_known_defect_of_cudnn_is_known_by_its_evidence():
    defect, of_one_tile, stale_strides, *_ = Registry()["sdpa_cudnn"].known_defects
    assert stale_strides.breaks("layout", "dout alone swapped in memory: dq[0, 0, 1, 0] = 1, was 2")
    assert not stale_strides.breaks("layout", "q, k, v and dout with heads and rows swapped in memory: out[0] = 1, was 2")
    assert not stale_strides.breaks("layout", "k and v with heads of stride 0: dq[0] = 1, exact 2")
    assert not stale_strides.breaks("leak", "dout alone swapped in memory: dq[0, 0, 1, 0] = 1, was 2")
    assert of_one_tile.invariants  # a check does not wait for it
    assert defect.issue == "pytorch#196678"


def test_devices():
    assert machines.resolve_device("cpu") == torch.device("cpu")
    assert str(machines.resolve_device("auto")) in machines._devices()
    assert CPU.kind == "cpu"
    assert CPU.memory > 1 << 28
    assert H200.torch_release == (2, 11)


def test_sdpa_asks_torch_for_its_reasons(monkeypatch):
    """On a GPU the words are torch's; here its check is replaced by one that warns as torch does."""

    def refuse(params, debug):
        warnings.warn("Flash attention kernel not used because:  no (Triggered internally at sdp.cpp:1.)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", refuse)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *args: args)
    assert sdpa.native_refusals("flash", CAUSAL, HOST, False) == ["Flash attention kernel not used because: no"]


def test_sdpa_asks_about_a_mask_that_fits_into_no_memory(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", lambda params, debug: asked.append(params) or True)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *args: args)
    w = Workload(1 << 20, heads=32, kv_heads=8, head_dim=128, mask=Window(4095, 0))
    with torch.no_grad():
        assert sdpa.native_refusals("efficient", w, HOST, True) == []
    ((q, k, v, mask, *_),) = asked
    assert [tuple(t.shape) for t in (q, k, v, mask)] == [
        (1, 32, 1 << 20, 128),
        *[(1, 8, 1 << 20, 128)] * 2,
        (1, 1, 1 << 20, 1 << 20),
    ]
    assert all(t.stride(-1) == 1 for t in (q, k, v, mask))
    assert all(t.is_leaf and t.requires_grad for t in (q, k, v))
    assert sum(t.untyped_storage().nbytes() for t in (q, k, v, mask)) < 1 << 21
