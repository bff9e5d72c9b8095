"""Gradients of sinks, of the bias and of ALiBi's slopes."""

import math

import pytest
import torch
from judging import judged, positions

from pytest_attn import Workload
from pytest_attn.correctness import gradients
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.parameters import PARAMETERS, parameters_of

CPU = torch.device("cpu")
REFERENCES = ReferenceCache()
SHAPE = {"q_len": 70, "kv_len": 80, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
WORKLOADS = [
    Workload(**SHAPE, sinks=True, mask="causal-bottom-right"),
    Workload(**SHAPE, sinks=True, softcap=20.0, dtype="float32"),
    Workload(**SHAPE, alibi=True, dtype="float16"),
    Workload(**SHAPE, alibi=True, sinks=True, kv_lens=(80, 33)),
    *(Workload(**SHAPE, bias=dims) for dims in ("hqk", "bhqk", "qk", "bk", "hk")),
    Workload(**SHAPE, bias="hqk", softcap=5.0, mask="causal-bottom-right", dtype="float16"),
    Workload(**SHAPE, bias="bk", sinks=True, alibi=True, dtype="float32"),
]


def attention_of(inputs, leaves, precise=torch.float32):
    """A kernel in float32 that closes over the leaves, with P rounded as in flash-attention."""
    w = inputs.workload
    mask_mod = inputs.mask_mod()

    def attention(q, k, v):
        group = w.group
        k, v = (t.repeat_interleave(group, 1).to(precise) for t in (k, v))
        score = q.to(precise) @ k.mT * w.softmax_scale
        score = score if w.softcap is None else w.softcap * torch.tanh(score / w.softcap)
        if "bias" in leaves:
            score = score + leaves["bias"].to(precise)
        rows, keys = positions(w.q_len, w.kv_len)
        if "alibi" in leaves:
            lens = torch.tensor(w.kv_lens or (w.kv_len,) * w.batch).view(-1, 1, 1, 1)
            score = score - leaves["alibi"].view(-1, 1, 1).to(precise) * (rows + lens - w.q_len - keys).abs()
        if mask_mod is not None:
            b, h = torch.arange(w.batch).view(-1, 1, 1, 1), torch.arange(w.heads).view(1, -1, 1, 1)
            score = score.masked_fill(~mask_mod(b, h, rows, keys), -math.inf)
        if "sinks" in leaves:
            sink = leaves["sinks"].to(precise).view(1, -1, 1, 1).expand(*score.shape[:3], 1)
            score = torch.cat([score, sink], -1)
        return (score.softmax(-1)[..., : w.kv_len] @ v).to(q.dtype)

    return attention


def leaves_of(workload, seed=0):
    inputs = draw_inputs(workload, "structured", seed)
    own = {"sinks": inputs.sinks, "bias": inputs.bias, "alibi": inputs.alibi_slopes}
    return inputs, {name: own[name].clone().requires_grad_() for name in parameters_of(workload)}


def spec_of(workload, leaves, **more):
    return CheckSpec(workload, CPU, True, parameters=leaves, **more)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.id)
def test_an_honest_kernel_is_right_and_its_gradients_are_compared(workload):
    inputs, leaves = leaves_of(workload)
    comparison = judged(attention_of(inputs, leaves), spec_of(workload, leaves), REFERENCES)
    assert comparison.passed, describe(comparison)
    assert {row.name for row in comparison.tensors} == {"out", "dq", "dk", "dv", *(f"d{name}" for name in leaves)}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.id)
def test_the_exact_gradients_are_autograd_s(workload):
    inputs, leaves = leaves_of(workload)
    reference = REFERENCES.reference_of(spec_of(workload, leaves))
    doubles = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    q, k, v = (getattr(inputs, name).double() for name in "qkv")
    out = attention_of(inputs, doubles, torch.float64)(q, k, v)
    for name, grad in zip(leaves, torch.autograd.grad(out, list(doubles.values()), inputs.dout.double()), strict=True):
        exact = reference.tensors[f"d{name}"]
        assert torch.allclose(exact.value.view(grad.shape), grad, rtol=1e-9, atol=1e-12)
        assert (exact.tau > 0).any()


def faulty(inputs, leaves, name, change):
    """Change the gradient of one parameter, and nothing else."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, leaf):
            return leaf.view_as(leaf)

        @staticmethod
        def backward(ctx, grad):
            return change(grad)

    def attention(q, k, v):
        return attention_of(inputs, {**leaves, name: Changed.apply(leaves[name])})(q, k, v)

    return attention


def scaled(grad):
    return 1.03 * grad


def of_one_head_lost(grad):
    grad = grad.clone()
    grad[..., -1] = 0
    return grad


@pytest.mark.parametrize("change", [scaled, of_one_head_lost, torch.neg])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.id)
def test_a_wrong_gradient_of_a_parameter_is_seen_and_named(workload, change):
    inputs, leaves = leaves_of(workload)
    for name in leaves:
        if change is scaled and workload.bias in ("hqk", "bhqk", "qk") and name == "bias":
            continue  # each element is known to three digits, no better
        comparison = judged(faulty(inputs, leaves, name, change), spec_of(workload, leaves), REFERENCES)
        assert describe(comparison).startswith(f"mismatch: d{name} of ")
        assert {row.name for row in comparison.tensors if not row.passed} == {f"d{name}"}


def test_a_kernel_that_does_not_use_them_is_told_to():
    workload = WORKLOADS[0]
    inputs, leaves = leaves_of(workload)
    others = {name: leaf.detach() for name, leaf in leaves.items()}
    with pytest.raises(AssertionError, match=r"dsinks is missing: .* the callable must use attn\.sinks itself"):
        judged(attention_of(inputs, others), spec_of(workload, leaves), REFERENCES)


def test_a_packed_kernel_whose_sinks_learn_wrongly_is_a_mismatch():
    workload = Workload(q_lens=(30, 40), heads=2, head_dim=32, sinks=True, dtype="float32")
    _, leaves = leaves_of(workload)

    def packed(q, k, v):
        out, start = [], 0
        sinks = leaves["sinks"].detach() + 0.5 * (leaves["sinks"] - leaves["sinks"].detach())
        for length in workload.q_lens:
            one = (t[start : start + length].transpose(0, 1)[None].float() for t in (q, k, v))
            queries, keys, values = one
            score = queries @ keys.mT * workload.softmax_scale
            score = torch.cat([score, sinks.view(1, -1, 1, 1).expand(*score.shape[:3], 1)], -1)
            out.append((score.softmax(-1)[..., :length] @ values)[0].transpose(0, 1))
            start += length
        return torch.cat(out)

    comparison = judged(packed, spec_of(workload, leaves), REFERENCES)
    assert describe(comparison).startswith("mismatch: dsinks of ")


def test_what_comes_before_a_score_mod_has_no_gradient_that_is_known():
    workload = Workload(64, heads=2, bias="hqk", sinks=True, score_mod=lambda score, b, h, q, k: 2 * score)
    assert parameters_of(workload) == ["sinks"]


def test_a_new_gradient_is_a_line_of_each_of_two_tables(monkeypatch):
    """ALiBi's slopes once more, under the name of a field that workloads are given here."""
    monkeypatch.setattr(Workload, "slopes", property(lambda workload: workload.alibi), raising=False)
    monkeypatch.setitem(PARAMETERS, "slopes", PARAMETERS["alibi"]._replace(name="slopes"))
    monkeypatch.setitem(gradients.REDUCTIONS, "slopes", gradients.REDUCTIONS["alibi"])
    workload = Workload(**SHAPE, alibi=True)
    inputs, leaves = leaves_of(workload)
    spec = spec_of(workload, {"slopes": leaves["alibi"]})
    right = judged(attention_of(inputs, leaves), spec)
    assert right.passed
    assert "dslopes" in {row.name for row in right.tensors}
    wrong = judged(faulty(inputs, leaves, "alibi", scaled), spec)
    assert {row.name for row in wrong.tensors if not row.passed} == {"dslopes"}


def test_the_two_tables_have_the_same_parameters():
    assert gradients.REDUCTIONS.keys() == PARAMETERS.keys()
