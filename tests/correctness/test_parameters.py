"""Gradients of sinks, of the bias and of ALiBi's slopes."""

import pytest
import torch
from judging import judged
from reported_faults.judging import LEAVES
from reported_faults.kernel import Attention

from pytest_attn import Workload
from pytest_attn.correctness import exact_gradients
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.parameters import PARAMETERS, parameters_of
from pytest_attn.workloads.source import decode_workload, encode_workload

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
    Workload(20, heads=2, head_dim=16, bias="hqk", softcap=2.0, bias_before_softcap=True, mask="causal"),
    Workload(20, heads=4, kv_heads=2, head_dim=16, sinks="float32", head_groups="interleaved"),
    Workload(12, 20, batch=3, heads=4, kv_heads=2, head_dim=16, alibi="batch", head_groups="interleaved"),
]


def with_a_key_of_zeros(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, *(torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v)))


def test_sinks_of_a_number_are_one_more_key_of_zeros():
    workload = Workload(40, batch=2, heads=2, head_dim=16, sinks=0.0, dtype="float32")
    comparison = judged(with_a_key_of_zeros, CheckSpec(workload, CPU, True), REFERENCES)
    assert comparison.passed
    assert not comparison.unjudged  # they have no gradient
    forgotten = judged(torch.nn.functional.scaled_dot_product_attention, CheckSpec(workload, CPU, True), REFERENCES)
    assert forgotten.faults == ("sinks-ignored",)
    assert workload != workload.replace(sinks=False)
    assert decode_workload(encode_workload(workload)) == workload


def leaves_of(workload, seed=0):
    inputs = draw_inputs(workload, seed=seed)
    return inputs, {
        name: getattr(inputs, PARAMETERS[name].tensor).clone().requires_grad_() for name in parameters_of(workload)
    }


def attention_of(inputs, leaves):
    return lambda q, k, v: Attention()(inputs, q, k, v, **{LEAVES[name]: leaf for name, leaf in leaves.items()})[0]


def spec_of(workload, leaves, **more):
    return CheckSpec(workload, CPU, True, parameters=leaves, **more)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.id)
def test_an_honest_kernel_is_right_and_its_gradients_are_compared(workload):
    inputs, leaves = leaves_of(workload)
    comparison = judged(attention_of(inputs, leaves), spec_of(workload, leaves), REFERENCES)
    assert comparison.passed, describe(comparison)
    assert {row.name for row in comparison.tensors} == {"out", "dq", "dk", "dv", *(f"d{name}" for name in leaves)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize(
    "workload",
    [
        Workload(q_lens=(17,) * 12, heads=4, head_dim=32, sinks="bfloat16", dtype="float32"),
        Workload(40, batch=12, heads=4, head_dim=32, sinks="bfloat16", dtype="float32"),
        Workload(20, batch=12, heads=2, head_dim=32, bias="hqk", bias_dtype="bfloat16", dtype="float32"),
        Workload(20, batch=12, heads=2, head_dim=32, bias="hk", bias_dtype="bfloat16", dtype="float32"),
    ],
    ids=lambda workload: workload.id,
)
def test_a_kernel_may_take_sequence_by_sequence(workload, seed):
    """Autograd then adds the gradients of a parameter in its dtype: most of two that are of unlike sign may be lost."""
    _, leaves = leaves_of(workload, seed)
    spec = spec_of(workload, leaves, seed=seed)

    def one(q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if "bias" in leaves:
            scores = scores + leaves["bias"][0]
        if "sinks" in leaves:
            scores = torch.cat([scores, leaves["sinks"][:, None, None].expand(-1, scores.shape[1], 1)], -1)
        return scores.softmax(-1)[..., : k.shape[1]] @ v

    def attention(q, k, v):
        if not workload.is_packed:
            return torch.stack([one(*sequence) for sequence in zip(q, k, v, strict=True)])
        parts = (t.split(workload.q_lens) for t in (q, k, v))
        return torch.cat([one(*(t.transpose(0, 1) for t in part)).transpose(0, 1) for part in zip(*parts, strict=True)])

    comparison = judged(attention, spec, REFERENCES)
    assert comparison.passed, describe(comparison)


def faulty(inputs, leaves, name, change):
    def attention(q, k, v):
        leaf = leaves[name].view_as(leaves[name])
        leaf.register_hook(change)
        return attention_of(inputs, {**leaves, name: leaf})(q, k, v)

    return attention


def scaled(grad):
    return 1.03 * grad


def of_one_head_lost(grad):
    grad = grad.clone()
    grad[..., -1] = 0
    return grad


@pytest.mark.one_in(6)
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
    inputs, leaves = leaves_of(workload)
    comparison = judged(faulty(inputs, leaves, "sinks", lambda grad: 0.5 * grad), spec_of(workload, leaves), REFERENCES)
    assert describe(comparison).startswith("mismatch: dsinks of ")


def test_what_comes_before_a_score_mod_has_no_gradient_that_is_known():
    workload = Workload(64, heads=2, bias="hqk", sinks=True, score_mod=lambda score, b, h, q, k: 2 * score)
    assert parameters_of(workload) == ["sinks"]


def test_a_new_gradient_is_a_line_of_each_of_two_tables(monkeypatch):
    """ALiBi's slopes once more, under the name of a field that workloads are given here."""
    monkeypatch.setattr(Workload, "slopes", property(lambda workload: workload.alibi), raising=False)
    monkeypatch.setitem(PARAMETERS, "slopes", PARAMETERS["alibi"]._replace(name="slopes"))
    monkeypatch.setitem(exact_gradients.REDUCTIONS, "slopes", exact_gradients.REDUCTIONS["alibi"])
    workload = Workload(**SHAPE, alibi=True)
    inputs, leaves = leaves_of(workload)
    spec = spec_of(workload, {"slopes": leaves["alibi"]})
    right = judged(attention_of(inputs, leaves), spec)
    assert right.passed
    assert "dslopes" in {row.name for row in right.tensors}
    wrong = judged(faulty(inputs, leaves, "alibi", of_one_head_lost), spec)
    assert {row.name for row in wrong.tensors if not row.passed} == {"dslopes"}


def test_the_two_tables_have_the_same_parameters():
    assert exact_gradients.REDUCTIONS.keys() == PARAMETERS.keys()
