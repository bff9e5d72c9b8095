import types

import pytest
import torch
from fakes.judged import judged

import pytest_attn
from pytest_attn import Machine, Window, Workload
from pytest_attn.backends import eager
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.workloads.inputs import draw_inputs

THIS_CPU = Machine("cpu", "CPU", None, "cpu", 8 << 30, 0, "2.11.0")
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


def faulty(text, replacement):
    """Return the backend of a source with a fault in it, still telling honestly what it makes of its inputs."""
    with open(eager.__file__) as file:
        source = file.read()
    assert text in source
    module = types.ModuleType("pytest_attn.backends.faulty")
    exec(compile(source.replace(text, replacement), "faulty.py", "exec"), module.__dict__)
    backend = module.Int8Dynamic()
    backend.dequantized = eager.Int8Dynamic().dequantized
    return backend


@pytest.mark.parametrize(
    "workload",
    [
        W,
        W.replace(dtype="fp16", v_head_dim=24),
        W.replace(dtype="fp32", scale=0.3),
        W.replace(mask="causal"),
        W.replace(mask="causal-bottom-right"),
        W.replace(q_len=80, kv_len=48, mask="causal-bottom-right"),
        W.replace(mask=Window(9, 3)),
        W.replace(mask=lambda b, h, q, kv: (q + kv) % 3 > 0),
        W.replace(kv_lens=(80, 33)),
        W.replace(q_len=1, kv_len=600),
    ],
    ids=lambda w: w.id,
)
@pytest.mark.parametrize("distribution", ["structured", "flat", "outlier", "peaky", "onehot", "large"])
def test_it_is_exact_attention_on_what_int8_leaves(workload, distribution):
    backend = Registry()["int8_dynamic"]
    assert backend.unavailable_because(THIS_CPU) is None
    assert backend.unsupported_because(workload, THIS_CPU) == []
    comparison = judged(backend, workload, inputs=(distribution,))
    assert comparison.passed, describe(comparison)
    assert comparison.is_approximate
    assert comparison.worst.excess < 0.75


@pytest.mark.parametrize(
    ("text", "replacement"),
    [
        ("(v_scale / _LARGEST)", "(1.01 * v_scale / _LARGEST)"),
        ("(q_scale * scale)", "(q_scale * scale * 1.05)"),
        ("top = scores.amax", "scores[..., -1] = -math.inf; top = scores.amax"),
        ("weight_steps = (weights * _LARGEST).round()", "weight_steps = 2 * (weights * _LARGEST / 2).round()"),
        ("weight_steps = (weights * _LARGEST).round()", "weight_steps = (weights * _LARGEST).floor()"),
        ("* k_scale.transpose(-1, -2)", "* k_scale.transpose(-1, -2).roll(1, -1)"),
        ("(v_scale / _LARGEST)", "(v_scale.roll(1, -1) / _LARGEST)"),
        ("(x / scale).round()", "(x / scale).trunc()"),
    ],
)
def test_a_fault_after_or_in_the_quantization_is_found(text, replacement):
    workload = Workload(128, heads=2)
    assert not judged(faulty(text, replacement), workload).passed


@pytest.mark.parametrize("dim", [-1, -2])
def test_int8_steps_are_whole_and_reach_from_minus_127_to_127(dim):
    x = draw_inputs(W, "outlier").k
    x[0, 0] = 0
    steps, scale = eager.quantized(x, dim)
    assert torch.equal(steps, steps.round())
    assert (steps[1].abs().amax(dim) == 127).all()
    assert not steps[0, 0].any()
    assert ((steps.float() * scale - x.float()).abs() <= scale * 0.5001).all()


def quantized_weights(rounded):
    """Return an attention whose P, as a part of its row's largest, goes through `rounded`."""

    def attention(q, k, v):
        scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        return (rounded(p) @ v.float() / p.sum(-1, keepdim=True)).to(q.dtype)

    return attention


def in_int8(p):
    return (p * 127).round() / 127


def in_fp8(peak):
    return lambda p: (p * peak).to(torch.float8_e4m3fn).float() / peak


USERS = Workload(128, 300, heads=2)
OPTIONS = {"inputs": ("structured", "flat", "randn", "peaky", "onehot"), "device": "cpu"}


@pytest.mark.parametrize(
    ("precision", "rounded"), [("int8", in_int8), ("fp8", in_fp8(1)), ("fp8", in_fp8(256)), ("fp8", in_fp8(448))]
)
def test_a_users_kernel_may_declare_that_it_quantizes_its_probabilities(precision, rounded):
    assert pytest_attn.check(quantized_weights(rounded), USERS, precision=precision, **OPTIONS).passed


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("precision", "rounded"),
    [
        ("int8", lambda p: in_int8(p / 2) * 2),
        ("int8", lambda p: in_int8(p) * (torch.arange(300) < 299)),
        ("fp8", lambda p: 1.05 * in_fp8(1)(p)),
        ("fp8", lambda p: in_fp8(1)(p) * (torch.arange(300) < 299)),
    ],
)
def test_probabilities_that_lose_more_than_declared_are_found(precision, rounded):
    with pytest.raises(AssertionError, match="mismatch"):
        pytest_attn.check(quantized_weights(rounded), USERS, precision=precision, **OPTIONS)
