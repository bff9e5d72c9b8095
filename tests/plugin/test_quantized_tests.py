"""Quantized tensors, v inside k, and single layers through pytest itself."""

import pytest

import pytest_attn
from pytest_attn.reports.records import read_records

TESTS = """
import pytest
import torch
from torch import nn
from pytest_attn import Workload

FP8 = Workload(24, batch=2, heads=2, head_dim=32, dtype="float8_e4m3fn", descales="head")
LATENT = Workload(8, 24, heads=2, kv_heads=1, head_dim=48, v_head_dim=32, v_in_k=True)


def attention(q, k, v, q_descale, k_descale, v_descale):
    q, k, v = (t.float() * d[..., None, None] for t, d in ((q, q_descale), (k, k_descale), (v, v_descale)))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).bfloat16()


@pytest.mark.attention(FP8)
def test_right(attn):
    assert [descale.shape for descale in attn.descales] == [(2, 2)] * 3
    assert attn.q.dtype == torch.float8_e4m3fn
    attn.check(lambda q, k, v: attention(q, k, v, *attn.descales))
    attn.assert_close(attention(attn.q, attn.k, attn.v, *attn.descales))
    assert attn.reference.out.dtype == torch.float64


@pytest.mark.attention(FP8)
def test_wrong(attn):
    q_descale, k_descale, v_descale = attn.descales
    attn.check(lambda q, k, v: attention(q, k, v, q_descale, k_descale, k_descale))


@pytest.mark.attention(FP8, LATENT)
def test_backends(attn, attn_backend):
    attn.check(attn_backend)


@pytest.mark.attention(LATENT)
def test_latent(attn):
    assert attn.descales is None
    assert attn.v.data_ptr() == attn.k.data_ptr()
    attn.check(lambda q, k, v: ((q.float() @ k.float().mT * 48**-0.5).softmax(-1) @ k[..., :32].float()).to(q.dtype))


@pytest.mark.attention(Workload(24, heads=2))
def test_quantizes_inside(attn):
    coarse = lambda t: t.float().mul(8).round() / 8
    kernel = lambda q, k, v: nn.functional.scaled_dot_product_attention(*(coarse(t).to(t.dtype) for t in (q, k, v)))
    values = lambda q, k, v: (coarse(q), coarse(k), coarse(v))
    attn.check(kernel, dequantized=values)
    attn.check_invariants(kernel, dequantized=values)


@pytest.mark.attention(Workload(24, batch=3))
def test_layer(attn):
    torch.manual_seed(0)
    comparison = attn.check_module(nn.MultiheadAttention(32, 2, batch_first=True))
    assert [call.workload.id for call in comparison.calls] == ["b3-h2-s24-d16-fp32"]


@pytest.mark.attention_model(backward=False)
def test_layer_of_a_model(attn_model):
    torch.manual_seed(0)
    assert not attn_model.check_module(nn.MultiheadAttention(32, 2)).calls[0].has_gradients
"""


def test_a_test_file(pytester):
    pytester.makepyfile(TESTS)
    options = ("-rs", "--attn-backends=math,eager,sdpa", "--attn-output=run.jsonl", "--attn-save-failures=saved")
    result = pytester.runpytest("-p", "no:randomly", "--attn-device=cpu", *options)
    result.assert_outcomes(passed=10, failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["*suggests * it equals attention with the descale of k for v*", "*does not support fp8 tensors*"]
    )
    records = read_records(pytester.path / "run.jsonl")
    judged = [record for record in records if "is_approximate" in record]
    assert sum(bool(record["is_approximate"]) for record in judged) >= 1
    (saved,) = (pytester.path / "saved").rglob("*.safetensors")
    failure = pytest_attn.load_failure(saved.parent)
    exec(TESTS.partition("\n\n@pytest")[0], found := {})
    attention, (q_descale, k_descale, v_descale) = found["attention"], failure.inputs.descales
    assert failure.check(lambda q, k, v: attention(q, k, v, q_descale, k_descale, v_descale), device="cpu").passed
    with pytest.raises(AssertionError, match="with the descale of k for v"):
        failure.check(lambda q, k, v: attention(q, k, v, q_descale, k_descale, k_descale), device="cpu")
