"""Profiles of what fault-free kernels round: each excuses its kernels on every distribution, and is needed."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from honest.variants import VARIANTS, ScaledKey
from judging import judged, spec_of
from torch.utils.checkpoint import checkpoint

from pytest_attn import Precision, Workload
from pytest_attn.backends.backend import FunctionBackend
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.precision import PRECISIONS, precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import compare_all, judge, lost_gradients
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.kernel import KernelBackend
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import DISTRIBUTIONS
from pytest_attn.workloads.inputs import draw_inputs

CPU = torch.device("cpu")
REFERENCES = ReferenceCache()
ROUNDING = {
    v.name: v
    for v in VARIANTS
    if v.precision in ("kscale", "qscale", "decode", "eager_shifted", "rounded_sinks", "rounded_sum", "rescale")
}
#: softcap beside a bias, sinks, grouped heads, one row
NAMES = ("features-bias-softcap", "features-sinks-causal", "smoke-causal-gqa", "edges-one-row")
WORKLOADS = [workload for name in NAMES for workload in builtin_catalog().select(name)]
#: of workloads beside the first all kernels are asked in the slow run
FEW = [pytest.param(w, id=w.id, marks=[pytest.mark.slow] * (number > 0)) for number, w in enumerate(WORKLOADS)]


def spec(workload, precision, inputs=tuple(DISTRIBUTIONS), **more):
    return CheckSpec(workload, CPU, not workload.has_no_gradient_because, inputs, Declaration(precision=precision), **more)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("workload", FEW)
def test_what_a_profile_declares_is_excused_on_every_distribution(name, workload):
    variant = ROUNDING[name]
    comparison = judged(variant.backend(), spec(workload, variant.precision), REFERENCES)
    assert comparison.passed, comparison.worst


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("scaled-key", Workload(96, heads=2, head_dim=40)),
        ("rounded-products", Workload(96, heads=2, head_dim=64)),
        ("shifted-scores", Workload(96, heads=2, head_dim=64)),
        ("rounded-sinks", Workload(64, heads=2, head_dim=32, sinks=True)),
        ("rounded-sum", Workload(96, heads=2, head_dim=64)),
    ],
)
def test_under_flash_the_same_kernel_is_wrong(name, workload):
    variant = ROUNDING[name]
    inputs = ("structured", "outlier")
    backend = KernelBackend(name, variant.make(), "flash", returns_lse=True)
    assert not judged(backend, spec(workload, "flash", inputs), REFERENCES).passed
    backend = KernelBackend(name, variant.make(), variant.precision, returns_lse=True)
    assert judged(backend, spec(workload, variant.precision, inputs), REFERENCES).passed


def test_a_profile_of_ones_own_is_taken_as_it_is():
    mine = Precision("folded", rounds_scaled_key=True, sums_rounded_heads=True)
    workload = Workload(96, heads=4, kv_heads=2, head_dim=64)
    backend = KernelBackend("folds", ScaledKey(), mine)
    assert judged(backend, spec(workload, mine), REFERENCES).passed
    assert precision_named(mine) is mine


def test_a_profile_without_a_name_is_refused():
    with pytest.raises(ValueError, match="a profile of your own needs a name"):
        precision_named(Precision("", rounds_scores=True))


def test_a_profile_under_the_name_of_another_is_refused():
    assert precision_named(Precision("flash")) == PRECISIONS["flash"]
    with pytest.raises(ValueError, match="'flash' is the name of another profile; give yours one of its own"):
        precision_named(Precision("flash", rounds_scores=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "length", "kv_heads"), [("float16", 128, 1), ("bfloat16", 512, 4)])
def test_what_calls_torchs_own_kernel_on_a_cpu_has_room_by_default(dtype, length, kv_heads):
    w = Workload(length, heads=4, kv_heads=kv_heads, head_dim=64, dtype=dtype)
    is_grouped = w.group > 1

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped)

    found = judged(attention, CheckSpec(w, CPU, backward=True), REFERENCES)
    assert {row.name for row in found.tensors} == {"out", "dq", "dk", "dv"}
    for row in found.tensors:
        assert max(row.z_element / 8, row.z_row / 4, row.z_head / 1.5) < 0.75, row
    assert not judged(attention, spec(w, "flash", ("structured", "flat")), REFERENCES).passed


@pytest.mark.parametrize("declared", [{}, {"backend": True}])
def test_who_declares_no_profile_is_judged_by_the_devices_own(declared):
    made = FunctionBackend("mine", print) if declared else print
    for device, name in (("cpu", "torch_cpu"), ("cuda", "flash")):
        asked = CheckSpec(Workload(16), torch.device(device))
        assert asked.profile.name == name
        assert asked.for_subject(asked.subject(Registry(), made)).profile.name == name
        stated = CheckSpec(Workload(16), torch.device(device), declared=Declaration(precision="flash"))
        assert stated.for_subject(stated.subject(Registry(), print)).profile.name == "flash"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_maximum_that_is_subtracted_may_be_a_sink_s(dtype):
    workload = Workload(64, 256, heads=2, head_dim=32, sinks=True, dtype=dtype)

    def attention(q, k, v):  # as gpt-oss's eager code
        sinks = draw_inputs(workload).sinks
        score = torch.cat([q @ k.mT * workload.softmax_scale, sinks.view(1, -1, 1, 1).expand(1, 2, 64, 1)], -1)
        return (score - score.amax(-1, keepdim=True)).softmax(-1)[..., :256] @ v

    assert judged(attention, spec_of(workload, backward=True, precision="eager_shifted"), REFERENCES).passed


@pytest.mark.parametrize("fault", ["", "detached", "larger"])
def test_sinks_may_come_last_and_then_their_share_is_judged(fault):
    w = Workload(53, batch=2, heads=4, head_dim=32, mask="causal", sinks=True, dtype="bfloat16", scale=0.5)
    seen, sinks = torch.ones(53, 53).tril().bool(), draw_inputs(w).sinks

    def attention(q, k, v):  # as GraniteMoeSWA's eager code
        score = (q @ k.mT * w.softmax_scale).masked_fill(~seen, torch.finfo(q.dtype).min)
        share = (score.logsumexp(-1, keepdim=True) - sinks.view(-1, 1, 1).bfloat16()).float().sigmoid()
        share = share.detach() if fault == "detached" else share * 1.02 if fault else share
        return score.softmax(-1, dtype=torch.float32).to(q.dtype) @ v * share.to(q.dtype)

    late, early = (spec_of(w, backward=True, precision=precision) for precision in ("late_sinks", "eager"))
    assert judge(late.subject(Registry(), attention), late, REFERENCES).passed == (not fault)
    assert not judge(early.subject(Registry(), attention), early, REFERENCES).passed


# -- where dP is beyond float16 ----------------------------------------------------------------------------------------------


def with_large_dp(fault=lambda found: None):
    """Return the rows of honest eager code of which one dP is infinite, with a fault; and what is not judged of it."""
    w = Workload(72, batch=2, heads=4, kv_heads=2, head_dim=32, dtype="float16", mask="causal")
    inputs = draw_inputs(w)
    inputs.dout[0, 1, 3] *= 30_000
    inputs.q[0, 1, 3] = 0  # times NaN
    given = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = eager(w, inputs, torch.float32)(*given)
    found = {"out": out.detach()}
    found |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, given, inputs.dout), strict=True)
    assert found["dq"][0, 1, 3].isnan().all()
    assert found["dk"][0, 0].isnan().all()
    fault(found)
    reference = compute_reference(inputs, PRECISIONS["eager"], backward=True)
    return compare_all("", found, reference, w, limits_named("default")), lost_gradients(reference)


def test_gradients_of_infinite_dp_are_said_to_be_not_judged():
    rows, lost = with_large_dp()
    assert all(row.passed for row in rows)
    assert [one.partition(":")[0] for one in lost] == ["dq", "dk"]
    assert "1 of its 576 rows" in lost[0]
    assert "72 of its 288 rows" in lost[1]


@pytest.mark.parametrize(
    ("name", "at", "factor"),
    [
        ("dq", (0, 1, 4), math.nan),
        ("dq", (0, 2), 1.02),
        ("dq", (0, 1, 60), 1.2),
        ("dk", (0, 1), 1.02),
        ("dv", (0, 0, 3), math.nan),
    ],
)
def test_a_fault_beside_infinite_dp_is_found(name, at, factor):
    rows, _ = with_large_dp(lambda found: found[name][at].mul_(factor))
    assert [row.name for row in rows if not row.passed] == [name]


# -- eager code, which writes each step of its scores in the dtype -----------------------------------------------------------

STEPS = {
    "bias": {"bias": "hqk"},
    "bias-then-softcap": {"bias": "hqk", "bias_before_softcap": True, "softcap": 20.0},
    "softcap-then-bias": {"bias": "hqk", "softcap": 5.0},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "bias-and-alibi": {"bias": "hqk", "alibi": True},
}


def eager(w, inputs, softmax_dtype=None, larger=1.0):
    """Return eager code in the dtype throughout, with the additive mask of a model. larger: a fault, of the bias."""
    i, j = (torch.arange(n) for n in (w.q_len, w.kv_len))
    hidden = torch.zeros(w.q_len, w.kv_len, dtype=inputs.q.dtype)
    if w.mask is not None:
        hidden.masked_fill_(j > i[:, None] + w.kv_len - w.q_len, torch.finfo(hidden.dtype).min)

    def call(q, k, v):
        k, v = (t.repeat_interleave(w.group, 1) for t in (k, v))
        score = q @ k.mT * w.softmax_scale
        if w.bias_before_softcap:
            score = score + inputs.bias * larger
        if w.softcap:
            score = torch.tanh(score / w.softcap) * w.softcap
        if w.bias and not w.bias_before_softcap:
            score = score + inputs.bias * larger
        if w.alibi:
            distances = (i[:, None] + w.kv_len - w.q_len - j).abs().to(score.dtype)
            score = score - inputs.alibi_slopes.to(score.dtype)[:, None, None] * distances
        score = score + hidden
        return score.softmax(-1, dtype=softmax_dtype).to(q.dtype) @ v

    return call


def judged_eager(options, dtype, **how):
    w = Workload(64, 80, batch=2, heads=4, kv_heads=2, head_dim=32, mask="causal-bottom-right", dtype=dtype, **options)
    inputs = draw_inputs(w)
    parameters = {
        name: t.requires_grad_() for name, t in (("bias", inputs.bias), ("alibi", inputs.alibi_slopes)) if t is not None
    }
    inputs_of = ("structured", "flat", "peaky", "outlier")
    more = {"backward": True, "inputs": inputs_of, "precision": "eager", "parameters": parameters}
    return judged(eager(w, inputs, **how), spec_of(w, **more), REFERENCES)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", STEPS)
def test_eager_code_may_round_each_step_of_its_scores(name, dtype):
    for softmax_dtype in (None, torch.float32):
        comparison = judged_eager(STEPS[name], dtype, softmax_dtype=softmax_dtype)
        assert comparison.passed, comparison.worst


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["bias", "bias-then-softcap", "softcap-then-bias"])
def test_eager_code_with_a_bias_that_is_too_large_is_wrong(name):
    assert not judged_eager(STEPS[name], "bfloat16", larger=1.125).passed


def test_a_bias_of_hundreds_moves_scores_by_what_the_dtype_rounds_there():
    w = Workload(64, heads=2, head_dim=32, bias="hqk", dtype="bfloat16")
    drawn = draw_inputs(w)
    inputs = replace(drawn, bias=drawn.bias * 100)
    expected = compute_reference(inputs, PRECISIONS["eager"]).tensors["out"]

    z = (eager(w, inputs)(drawn.q, drawn.k, drawn.v).double() - expected.value) / expected.tau

    assert z.abs().max() < 6
    assert z.square().mean() < 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", "flash"), ("float16", "eager_shifted"), ("bfloat16", "eager_shifted")]
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_maximum_may_have_a_gradient_which_is_what_its_row_lost(dtype, precision, has_sinks):
    w = Workload(60, batch=2, heads=4, head_dim=16, mask="causal", sinks=has_sinks, dtype=dtype)
    seen = torch.ones(60, 60).tril().bool()

    def attention(q, k, v):
        score = (q @ k.mT * w.softmax_scale).masked_fill(~seen, -torch.inf)
        if has_sinks:
            sinks = draw_inputs(w, seed=seed).sinks
            score = torch.cat([score, sinks.view(1, -1, 1, 1).expand(2, -1, 60, 1)], -1)
        shifted = score - score.max(-1, keepdim=True).values
        return shifted.softmax(-1)[..., :60] @ v

    for seed in range(4):
        more = {"inputs": ("flat", "randn"), "seed": seed, "precision": precision, "backward": True}
        comparison = judged(attention, spec_of(w, **more), REFERENCES)
        assert comparison.passed, comparison.worst


def test_in_float32_sums_may_rise_and_fall_where_values_change_slowly_from_key_to_key():
    w = Workload(32, 2048, heads=1, head_dim=16, dtype="float32")
    drawn = draw_inputs(w)
    waves = torch.sin(torch.arange(2048)[:, None] * (2 * torch.pi / 2048) + torch.arange(16) / 5)
    inputs = replace(drawn, q=drawn.q / 100, v=waves.view(1, 1, 2048, 16))
    p = (inputs.q @ inputs.k.mT * w.softmax_scale).softmax(-1)
    expected = compute_reference(inputs, PRECISIONS["flash"]).tensors["out"]

    out = torch.zeros(1, 1, 32, 16)
    for key in range(2048):
        out += p[..., key, None] * inputs.v[:, :, key, None]

    z = (out.double() - expected.value) / expected.tau
    assert z.abs().max() < 6
    assert z.square().mean().sqrt() < 1.5


@pytest.mark.parametrize("seed", [0, 3])
def test_in_float32_the_rounding_of_lse_shows_in_a_d_that_is_the_sum_of_p_dp(seed):
    seen = torch.ones(96, 96, dtype=torch.bool).tril()

    def attention(q, k, v):
        scores = (q @ k.mT / 32**0.5).masked_fill(~seen, -torch.inf)
        return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v

    w = Workload(96, heads=2, head_dim=32, dtype="float32", mask="causal", name="smoke-single")
    comparison = judged(attention, spec_of(w, inputs=("outlier",), backward=True, precision="flash", seed=seed))
    assert comparison.passed, comparison.worst


def test_where_q_and_k_are_both_scaled_both_round():
    inputs = draw_inputs(Workload(64, heads=2), "peaky")
    both = Precision("both", rounds_scaled_query=True, rounds_scaled_key=True)
    one, two = (compute_reference(inputs, p).tensors["lse"].tau.square().mean() for p in (PRECISIONS["kscale"], both))
    assert two > 1.9 * one


@pytest.mark.parametrize(("rows", "passes"), [(1, True), (64, False)])
def test_one_query_moves_the_whole_head_of_dv(rows, passes):
    w = Workload(rows, 129, heads=2, dtype="float32")
    reference = compute_reference(draw_inputs(w), PRECISIONS["flash"], True)
    dv = reference.tensors["dv"]
    two_budgets_off = (dv.value + 2 * dv.tau).float()
    (row,) = compare_all("structured", {"dv": two_budgets_off}, reference, w, limits_named("default"))
    assert row.passed == passes


def casts_weights(factor=1.0):
    """Softmax in float32 and P.to(dtype) @ v, whose dP autograd rounds; dK is off by a factor."""

    def attention(q, k, v):
        k = k * factor - (k * factor - k).detach()
        weights = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1)
        return (weights.to(q.dtype).float() @ v.float()).to(q.dtype)

    return attention


@pytest.mark.parametrize("workload", [Workload(96, heads=2), Workload(64, heads=2)], ids=lambda w: w.id)
def test_a_cast_of_weights_that_autograd_sees_needs_no_profile(workload):
    """Of 64 keys P has as many elements as out, whose own cast is none of weights. A checkpoint hides what is cast."""
    of = CheckSpec(workload, CPU, backward=True)
    assert judged(casts_weights(), of).passed
    assert judged(behind_checkpoint(casts_weights()), of).passed
    assert not judged(casts_weights(), replace(of, declared=Declaration(precision="flash2"))).passed
    assert judged(casts_weights(factor=1.02), of).mismatch.row.name == "dk"


def faulty(fault):
    """Causal attention whose dk is 1 % too large, dq in one head, or dv as if there were no mask."""

    def attention(q, k, v):
        larger = 1 + 0.01 * torch.arange(q.shape[1])[:, None, None] if fault == "dq" else 1.01
        named = ("dq", q.float()), ("dk", k.float())
        rows, keys = (t * larger - (t * larger - t).detach() if fault == name else t for name, t in named)
        score = rows @ keys.mT * q.shape[-1] ** -0.5
        seen = torch.ones(score.shape[-2:]).tril().bool()
        weights, all_seen = (one.softmax(-1).to(q.dtype).float() for one in (score.masked_fill(~seen, -torch.inf), score))
        moved = v.float() - v.float().detach()
        of_v = (all_seen.detach() if fault == "dv" else weights) @ moved
        return (weights @ v.float().detach() + of_v).to(q.dtype)

    return attention


def behind_checkpoint(fn):
    return lambda *given: checkpoint(fn, *given, use_reentrant=True) if given[0].requires_grad else fn(*given)


def compiled(fn):
    return torch.compile(fn, backend="aot_eager")


@pytest.mark.parametrize("hiding", [behind_checkpoint, pytest.param(compiled, marks=pytest.mark.slow("compiles"))])
@pytest.mark.parametrize("fault", ["", "dk", "dv", "dq"])
def test_a_fault_is_found_where_casts_are_hidden(fault, hiding):
    of = CheckSpec(Workload(131, heads=2, mask="causal"), CPU, backward=True)
    found = judge(of.subject(Registry(), hiding(faulty(fault))), of, REFERENCES)
    assert (found.mismatch.row.name if found.mismatch else "") == fault
