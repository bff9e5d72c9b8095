"""Libraries in a model: flash-attention's functions, plain, packed and through caches; FlashInfer; Transformer Engine.

How each library's arguments are read: tests/guests/libraries/test_round_trip.py.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from fakes import put
from guests.models.zoo import TOKENS, case_of, stack

from pytest_attn import Causal, Window, check_model
from pytest_attn.guests.models.check_model import judge_model

HEADS, HEAD_DIM = 4, 16
ENDS = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32)


def bshd(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def in_sequence(*tensors):
    return [t.transpose(1, 2).flatten(0, 1) for t in tensors]


def by_batch(out):
    return out.unflatten(0, (2, TOKENS)).transpose(1, 2)


def plain(lib, q, k, v, **options):
    return lib.flash_attn_func(*bshd(q, k, v), **options).transpose(1, 2)


def qkvpacked(lib, q, k, v, **options):
    return lib.flash_attn_qkvpacked_func(torch.stack(bshd(q, k, v), 2), **options).transpose(1, 2)


def kvpacked(lib, q, k, v, **options):
    q, *kv = bshd(q, k, v)
    return lib.flash_attn_kvpacked_func(q, torch.stack(kv, 2), **options).transpose(1, 2)


def varlen_qkvpacked(lib, q, k, v, **options):
    return by_batch(lib.flash_attn_varlen_qkvpacked_func(torch.stack(in_sequence(q, k, v), 1), ENDS, TOKENS, **options))


def varlen_kvpacked(lib, q, k, v, **options):
    q, *kv = in_sequence(q, k, v)
    lengths = (ENDS, ENDS, TOKENS, TOKENS)
    return by_batch(lib.flash_attn_varlen_kvpacked_func(q, torch.stack(kv, 1), *lengths, **options))


CALLS = {
    "flash_attn_func": plain,
    **{f"flash_attn_{call.__name__}_func": call for call in (qkvpacked, kvpacked, varlen_qkvpacked, varlen_kvpacked)},
}


@pytest.fixture
def flash_attn(monkeypatch, tmp_path):
    """Install a stand-in of flash-attn 2.8; returns its module."""
    put(monkeypatch, tmp_path, "flash2")
    return importlib.import_module("flash_attn")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CALLS)
def test_plain_and_packed_tensors_are_judged_and_replaced(flash_attn, name):
    options = {"causal": True, "window_size": (9, 0), "softmax_scale": 0.2}
    model, step = case_of(stack(lambda q, k, v: CALLS[name](flash_attn, q, k, v, **options)), torch.bfloat16)

    found = check_model(model, step, scatter=0)

    assert [call.function for call in found.calls] == [f"flash_attn.{name}"] * 2
    assert (found.calls[0].workload.mask, found.calls[0].workload.scale) == (Window(9, 0), 0.2)
    assert all(call.has_gradients and len(call.comparison.tensors) == 4 for call in found.calls)
    assert check_model(model, step, in_a_loop(flash_attn) if "varlen" in name else "math", scatter=0).passed


def in_a_loop(lib):
    """Return a replacement that takes sequences end to end, which no backend here does."""

    def mine(q, k, v, workload):
        lengths = (ENDS, ENDS, TOKENS, TOKENS)
        options = {"causal": True, "window_size": (workload.mask.left, 0), "softmax_scale": workload.scale}
        return lib.flash_attn_varlen_func(q, k, v, *lengths, **options)

    return mine


def test_a_gradient_behind_packed_tensors_is_found_in_its_layer(flash_attn, monkeypatch):
    calls = []

    def faulty(qkv, **options):
        calls.append(qkv)
        q, k, v = qkv.unbind(2)
        if len(calls) % 2 == 0:
            v = v.view_as(v)
            v.register_hook(lambda gradient: gradient * 1.5)
        return flash_attn.flash_attn_func(q, k, v, **options)

    monkeypatch.setattr(flash_attn, "flash_attn_qkvpacked_func", faulty)
    attend = stack(lambda q, k, v: qkvpacked(flash_attn, q, k, v, causal=True, window_size=(9, 0)))

    found = judge_model(*case_of(attend, torch.bfloat16), scatter=0)

    assert [call.module for call in found.calls if not call.passed] == ["blocks.1.attn"]
    assert found.calls[1].comparison.mismatch.row.name == "dv"


def decoding(lib, lengths, is_paged=False):
    """Return what attends through a cache that holds `lengths` keys already: the last 5 rows ask, and append theirs."""

    def attend(q, k, v):
        q, k, v = bshd(q, k, v)
        caches = torch.zeros(2, *k.shape)
        for b, n in enumerate(lengths):
            caches[:, b, :n] = torch.stack([k, v])[:, b, :n]
        seqlens = torch.tensor(lengths, dtype=torch.int32)
        new = k[:, -5:], v[:, -5:]
        out = lib.flash_attn_with_kvcache(q[:, -5:], *caches, *new, cache_seqlens=seqlens, causal=True)
        q[:, -5:] = out  # the shape that the projection expects
        return q.transpose(1, 2)

    return attend


@pytest.mark.parametrize("lengths", [(20, 20), (30, 12)], ids=["alike", "ragged"])
def test_a_cache_is_judged_with_what_is_appended_and_replaced_with_it(flash_attn, lengths):
    model, step = case_of(stack(decoding(flash_attn, lengths)).requires_grad_(False))

    found = check_model(model, step, backward=False)

    call = found.calls[0]
    assert (call.function, call.workload.q_len) == ("flash_attn.flash_attn_with_kvcache", 5)
    assert call.workload.mask == Causal(bottom_right=True)
    assert call.workload.kv_lens == (None if len(set(lengths)) == 1 else tuple(n + 5 for n in lengths))
    assert check_model(model, step, "math", backward=False).passed


def test_a_replacement_leaves_the_cache_as_the_function_would(flash_attn):
    caches = [torch.zeros(2, 8, HEADS, HEAD_DIM) for _ in range(4)]
    new = torch.randn(2, 3, HEADS, HEAD_DIM)

    def step(pair):
        return lambda: flash_attn.flash_attn_with_kvcache(new, *pair, new, -new, cache_seqlens=2, causal=True)

    check_model(torch.nn.Identity(), step(caches[:2]), "math", backward=False)
    step(caches[2:])()
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


def test_a_key_that_a_cache_loses_is_found(flash_attn, monkeypatch):
    honest = flash_attn.flash_attn_with_kvcache

    def loses(q, k_cache, v_cache, k, v, cache_seqlens, causal):
        return honest(q, k_cache, v_cache, k[:, :-1], v[:, :-1], cache_seqlens=cache_seqlens, causal=causal)

    monkeypatch.setattr(flash_attn, "flash_attn_with_kvcache", loses)
    model, step = case_of(stack(decoding(flash_attn, (20, 20))).requires_grad_(False))

    found = judge_model(model, step, backward=False)

    assert not any(call.passed for call in found.calls)


def test_positions_that_a_cache_rotates_are_told_as_not_read(flash_attn):
    pair = [torch.zeros(2, 8, HEADS, HEAD_DIM) for _ in range(2)]
    new, angles = torch.randn(2, 3, HEADS, HEAD_DIM), torch.ones(8, HEAD_DIM // 2)

    def step():
        options = {"rotary_cos": angles, "rotary_sin": angles, "cache_seqlens": 2, "causal": True}
        return flash_attn.flash_attn_with_kvcache(new, *pair, new, new, **options)

    with pytest.raises(AssertionError, match=r"flash_attn_with_kvcache was not judged: its argument rotary_cos="):
        check_model(torch.nn.Identity(), step, backward=False)


def single_prefill_with_kv_cache(q, k, v, causal=False, kv_layout="NHD", sm_scale=None, window_left=-1):
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)


def test_a_module_that_calls_flashinfer_once_for_each_sequence_numbers_the_calls(monkeypatch):
    module = ModuleType("flashinfer")
    module.single_prefill_with_kv_cache = single_prefill_with_kv_cache
    monkeypatch.setitem(sys.modules, "flashinfer", module)

    def attend(q, k, v):
        parts = [module.single_prefill_with_kv_cache(*(t[b].transpose(0, 1) for t in (q, k, v)), causal=True) for b in (0, 1)]
        return torch.stack(parts).transpose(1, 2)

    found = check_model(*case_of(stack(attend)))

    assert [call.label for call in found.calls].count("blocks.0.attn, call 2") == 1
    assert found.calls[0].workload.mask == Causal(bottom_right=True)


@pytest.fixture
def te(monkeypatch, tmp_path):
    """Install a stand-in of Transformer Engine 2.20; returns transformer_engine.pytorch."""
    put(monkeypatch, tmp_path, "transformer_engine")
    return importlib.import_module("transformer_engine.pytorch")


def te_case(te, qkv_format="bshd", call=None, **options):
    """Return a case in bfloat16 whose two layers hold a module of Transformer Engine. call: arguments of the call."""
    modules = torch.nn.ModuleList(te.DotProductAttention(HEADS, HEAD_DIM, qkv_format=qkv_format, **options) for _ in range(2))
    turn = iter(range(1 << 20))

    def attend(q, k, v):
        module = modules[next(turn) % 2]
        rows = {"sbhd": 2, "bshd": 1}.get(qkv_format)
        if qkv_format == "thd":
            lengths = {"cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS, "max_seqlen_q": TOKENS, "max_seqlen_kv": TOKENS}
            out = module(*in_sequence(q, k, v), **lengths, **(call or {}))
            return by_batch(out.unflatten(-1, (HEADS, -1)))
        order = (2, 0, 1, 3) if rows == 2 else (0, 2, 1, 3)
        out = module(*(t.permute(order).contiguous() for t in (q, k, v)), **(call or {})).unflatten(-1, (HEADS, -1))
        return out.permute((1, 2, 0, 3) if rows == 2 else (0, 2, 1, 3))

    model = stack(attend)
    model.te = modules
    return case_of(model, torch.bfloat16)


@pytest.mark.parametrize(
    ("qkv_format", "kind", "mask"),
    [
        ("bshd", "causal", Causal()),
        ("sbhd", "causal", Causal()),
        ("bshd", "no_mask", None),
        ("thd", "padding_causal", Causal()),
        ("bshd", "causal_bottom_right", Causal(bottom_right=True)),
    ],
)
def test_transformer_engine_is_judged_and_replaced(te, qkv_format, kind, mask):
    model, step = te_case(te, qkv_format, attn_mask_type=kind, softmax_scale=0.2)

    found = check_model(model, step, scatter=0)

    assert [call.function for call in found.calls] == ["transformer_engine.DotProductAttention"] * 2
    assert (found.calls[0].workload.mask, found.calls[0].workload.scale) == (mask, 0.2)
    assert found.calls[0].module == "te.0"
    assert all(call.has_gradients for call in found.calls)
    assert qkv_format == "thd" or check_model(model, step, "math", scatter=0).passed


def test_windows_and_sinks_of_transformer_engine_are_read(te):
    model, step = te_case(te, window_size=(9, 0), softmax_type="learnable")
    with torch.no_grad():
        for module in model.te:
            module.softmax_offset.fill_(1.0)

    (call, _) = check_model(model, step, scatter=0).calls

    assert (call.workload.mask, call.workload.sinks) == (Window(9, 0), True)


def test_padding_of_transformer_engine_is_read_and_its_padded_rows_are_its_own(te):
    padded = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [30]])
    model, step = te_case(te, call={"attention_mask": padded[:, None, None]}, attn_mask_type="padding_causal")

    (call, _) = check_model(model, step, scatter=0).calls

    assert call.workload.mask is not None


@pytest.mark.parametrize(("changed", "said"), [({"scale": 0.25 * 1.05}, "scale"), ({"window": (8, -1)}, "one key too short")])
def test_a_fault_of_transformer_engine_is_found_in_its_layer(te, monkeypatch, changed, said):
    model, step = te_case(te, window_size=(9, 0), call={"attn_mask_type": "causal"})
    kernels = sys.modules[te.DotProductAttention.__module__]
    honest, calls = kernels.attention, []

    def faulty(*tensors, **options):
        calls.append(tensors)
        return honest(*tensors, **({**options, **changed} if len(calls) % 2 == 0 else options))

    monkeypatch.setattr(kernels, "attention", faulty)
    found = judge_model(model, step, scatter=0)

    assert [call.module for call in found.calls if not call.passed] == ["te.1"]
    assert said in found.message


def test_dropout_of_a_module_in_training_is_refused_and_elsewhere_is_none(te):
    from pytest_attn.guests.models.call_to_workload import DropoutError

    model, step = te_case(te, attention_dropout=0.1)
    with pytest.raises(DropoutError):
        check_model(model, step)
    model.te.eval()
    assert check_model(model, step, scatter=0).passed
