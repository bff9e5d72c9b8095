"""What the field has both ways, said on the workload: head groups, bias and softcap, sinks' dtype, slopes per batch entry."""

import math
from types import SimpleNamespace

import pytest
import torch
from judging import judged, spec_of

import pytest_attn
from pytest_attn import Workload, draw_inputs
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.mutants.kernel import honest_backend
from pytest_attn.workloads.workload import grouped, key_heads, ungrouped

CPU = torch.device("cpu")
INTERLEAVED = Workload(20, 28, heads=6, kv_heads=2, head_dim=16, head_groups="interleaved", mask="causal-bottom-right")
BIAS_FIRST = Workload(20, heads=2, head_dim=16, bias="hqk", softcap=2.0, bias_before_softcap=True, mask="causal")
SINKS = Workload(20, heads=4, kv_heads=2, head_dim=16, sinks="float32", head_groups="interleaved")
SLOPES = Workload(12, 20, batch=3, heads=4, kv_heads=2, head_dim=16, alibi="batch", head_groups="interleaved")
PACKED = Workload(heads=4, kv_heads=2, head_dim=16, q_lens=(5, 9), mask="causal", alibi="batch", head_groups="interleaved")
PAGED = Workload(1, 30, batch=2, heads=4, kv_heads=2, head_dim=16, kv_pages=8, head_groups="interleaved")
ALL = (INTERLEAVED, BIAS_FIRST, SINKS, SLOPES, PACKED, PAGED)


def attention(q, k, v, w, inputs, *, of_key=None, bias_first=None, slopes=None, sinks=None):
    """Dense attention in float32, one step after the other."""
    heads = key_heads(w) if of_key is None else of_key
    k, v = k[:, heads], v[:, heads]
    scores = q.float() @ k.float().mT * w.softmax_scale
    bias = 0 if inputs.bias is None else inputs.bias.float()
    bias_first = w.bias_before_softcap if bias_first is None else bias_first
    scores = scores + bias if bias_first else scores
    scores = scores if w.softcap is None else (scores / w.softcap).tanh() * w.softcap
    scores = scores if bias_first else scores + bias
    if w.alibi:
        slopes = inputs.alibi_slopes if slopes is None else slopes
        distance = (torch.arange(w.q_len)[:, None] + w.kv_len - w.q_len - torch.arange(w.kv_len)).abs()
        scores = scores - (slopes[..., None, None] if slopes.dim() == 2 else slopes[:, None, None]) * distance
    if w.mask is not None:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1 + w.kv_len - w.q_len).bool(), -math.inf)
    if w.sinks:
        sinks = (inputs.sinks if sinks is None else sinks).float()
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : w.kv_len] @ v.float()).to(q.dtype)


@pytest.mark.parametrize("w", ALL[:4], ids=lambda w: w.id)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dense_attention_is_right(w, dtype):
    w = w.replace(dtype=dtype)
    inputs = draw_inputs(w)
    pytest_attn.check(lambda q, k, v: attention(q, k, v, w, inputs), w, backward=True)
    pytest_attn.check_invariants(lambda q, k, v: attention(q, k, v, w, inputs), w, backward=True)


@pytest.mark.parametrize("w", ALL, ids=lambda w: w.id)
def test_backends_take_it_or_say_that_they_do_not(w):
    registry, took = Registry(), []
    for backend in (*(registry[name] for name in ("eager", "math", "sdpa", "flex")), honest_backend()):
        backward = not w.kv_pages and backend.name != "flex"
        spec = CheckSpec(w, CPU, backward, inputs=("structured",))
        if backend.obstacle(w, machine_of(CPU), backward) is None and backend.name != "flex":  # which would be compiled
            took.append(backend.name)
            assert judge(backend, spec, ReferenceCache()).passed, backend.name
    assert "honest" in took
    assert w.is_packed or "eager" in took


@pytest.mark.parametrize("w", ALL[:4], ids=lambda w: w.id)
def test_flex_takes_it(w):
    assert judge(Registry()["flex"], CheckSpec(w, CPU, inputs=("structured",)), ReferenceCache()).passed


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (INTERLEAVED, "does not support interleaved head groups (h % kv_heads)"),
        (BIAS_FIRST, "adds a bias after the softcap, not before"),
        (SINKS, "takes sinks in bfloat16 only"),
        (SLOPES, "does not support ALiBi slopes per batch entry"),
    ],
    ids=lambda one: getattr(one, "id", ""),
)
def test_others_refuse_in_plain_words(w, words):
    for name in ("flash2", "flash3", "te_unfused", "natten", "sage", "cudnn", "xformers", "varlen"):
        assert words in Registry()[name].capabilities.refusals(w)


def test_the_reference_is_that_of_repeated_heads():
    inputs = draw_inputs(INTERLEAVED)
    one = ReferenceCache().reference_of(CheckSpec(INTERLEAVED, CPU, backward=True))
    heads = key_heads(INTERLEAVED)
    q, k, v = (t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    scores = q @ k[:, heads].mT / 4
    scores = scores.masked_fill(torch.ones(20, 28).triu(9).bool(), -math.inf)
    out = scores.softmax(-1) @ v[:, heads]
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
    for name, exact in zip(("out", "lse", "dq", "dk", "dv"), (out, scores.logsumexp(-1), *grads), strict=True):
        torch.testing.assert_close(one.tensors[name].value, exact.detach(), atol=1e-12, rtol=1e-9)


def test_grouping_is_undone():
    heads = torch.arange(6)[None]
    assert grouped(heads, INTERLEAVED).tolist() == [[0, 2, 4, 1, 3, 5]]
    assert ungrouped(grouped(heads, INTERLEAVED), INTERLEAVED).tolist() == heads.tolist()


@pytest.mark.parametrize(
    ("w", "fault", "named"),
    [
        (INTERLEAVED, {"of_key": [0, 0, 0, 1, 1, 1]}, "heads-in-neighboring-groups"),
        (INTERLEAVED.replace(head_groups="contiguous"), {"of_key": [0, 1] * 3}, "heads-interleaved"),
        (BIAS_FIRST, {"bias_first": False}, "softcap-before-bias"),
        (BIAS_FIRST.replace(bias_before_softcap=False), {"bias_first": True}, "softcap-after-bias"),
        (SLOPES, {"slopes": "first"}, "alibi-slopes-of-first-batch-entry"),
        (SINKS, {"sinks": "rounded"}, "sinks-rounded"),
    ],
)
def test_the_other_way_is_found_and_named(w, fault, named):
    inputs = draw_inputs(w)
    if "slopes" in fault:
        fault = {"slopes": inputs.alibi_slopes[:1]}
    if "sinks" in fault:
        w = w.replace(dtype="float32", sinks=True)
        inputs = draw_inputs(w)
        fault = {"sinks": inputs.sinks.bfloat16()}
    assert judged(lambda q, k, v: attention(q, k, v, w, inputs, **fault), spec_of(w)).faults == (named,)


@pytest.mark.parametrize("w", [BIAS_FIRST, SINKS, SLOPES], ids=lambda w: w.id)
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_gradients_of_parameters(w, factor):
    name = "bias" if w.bias else "sinks" if w.sinks else "alibi"
    held = {"bias": "bias", "sinks": "sinks", "alibi": "alibi_slopes"}[name]
    inputs = draw_inputs(w)
    tensor = getattr(inputs, held).requires_grad_()

    def kernel(q, k, v):
        shown = tensor + (factor - 1) * (tensor - tensor.detach())  # the value, with a gradient that may be too large
        return attention(q, k, v, w, SimpleNamespace(**{"bias": None, "sinks": None, "alibi_slopes": None, held: shown}))

    spec = CheckSpec(w, CPU, True, parameters={name: tensor})
    subject = spec.subject(Registry(), kernel)
    judged = judge(subject, spec, ReferenceCache())
    assert judged.passed == (factor == 1)
    assert {row.name for row in judged.tensors if not row.passed} == (set() if factor == 1 else {f"d{name}"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"head_groups": "tiled"}, "head_groups must be one of 'contiguous', 'interleaved', got 'tiled'"),
        ({"bias_before_softcap": True, "bias": "hqk"}, "bias_before_softcap needs a bias and a softcap"),
        ({"bias_before_softcap": 1, "bias": "hqk", "softcap": 2.0}, "bias_before_softcap must be True or False"),
        ({"sinks": "fp8"}, "sinks must be one of False, True, 'bfloat16', 'float16', 'float32', got 'fp8'"),
        ({"alibi": "heads"}, "alibi must be one of False, True, 'batch'"),
    ],
)
def test_fields_that_do_not_fit(fields, said):
    with pytest.raises(ValueError, match=said):
        Workload(8, **fields)


def test_ids_show_the_fields():
    assert INTERLEAVED.id == "h6-kv2-interleaved-q20-k28-d16-causal-br"
    assert BIAS_FIRST.id == "h2-s20-d16-causal-softcap2-bias.hqk-biasfirst"
    assert "sinks.float32" in SINKS.id
    assert "alibi.b" in SLOPES.id
    assert BIAS_FIRST.replace(softcap=None).bias_before_softcap is False
