"""A fault is named only if it explains all that the kernel returned, also on the distributions that passed."""

import itertools

import pytest
import torch
from judging import judged, with_gradients
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis import diagnose
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.kernel import KernelBackend
from pytest_attn.suite.test_correctness import INPUTS
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import DISTRIBUTIONS
from pytest_attn.workloads.inputs import draw_inputs

CPU = torch.device("cpu")
CAUSAL = Workload(192, heads=2, head_dim=64, mask="causal")


def online_softmax_in_the_dtype(q, k, v, block=64):
    """Keep the accumulator, the sum and the maximum in the dtype of q: an honest sum would be in float32."""
    top = torch.full_like(q[..., :1], -torch.inf)
    total, acc = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, k.shape[2], block):
        s = (q @ k[:, :, start : start + block].mT) * q.shape[-1] ** -0.5
        new = top.maximum(s.amax(-1, keepdim=True))
        p, factor = (s - new).exp(), (top - new).exp()
        total, acc, top = total * factor + p.sum(-1, keepdim=True), acc * factor + p @ v[:, :, start : start + block], new
    return acc / total


def faults(kernel, workload, **more):
    comparison = judged(kernel, CheckSpec(workload, CPU, **more))
    assert not comparison.passed
    return comparison.faults


@pytest.mark.parametrize("length", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_profile_is_suggested_only_if_the_whole_case_would_pass_with_it(length):
    workload = Workload(length, heads=2, head_dim=64)
    for fault in faults(online_softmax_in_the_dtype, workload, inputs=tuple(DISTRIBUTIONS)):
        profile = fault.removeprefix("precision-")
        assert pytest_attn.check(
            online_softmax_in_the_dtype, workload, inputs=tuple(DISTRIBUTIONS), precision=profile, device="cpu"
        ).passed


def scaled(times):
    return lambda q, k, v: ((q @ k.mT) * (q.shape[-1] ** -0.5 * times)).softmax(-1) @ v


def test_a_profile_is_suggested_with_what_to_compare_before():
    text = describe(judged(scaled(1), CheckSpec(Workload(128, heads=2), CPU)))
    assert "it fits the precision profile 'eager' (z " in text
    assert "if it really rounds scores to bfloat16, say precision='eager'" in text
    assert "A scale off by 1 % may look the same: compare in float32 first, which must pass as it is" in text


def test_a_truncated_out_is_no_fault_of_a_mask_that_hides_the_same():
    """Where tiles of keys are as long as those of rows, masking the last one alone is exact attention."""

    def truncated(q, k, v):
        out = sdpa(q.float(), k.float(), v.float(), is_causal=True)
        return (out.view(torch.int32) & -65536).view(torch.float32).to(q.dtype)

    assert faults(truncated, Workload(200, heads=2, mask="causal")) == ()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("workload", [CAUSAL, CAUSAL.replace(heads=4, kv_heads=2, batch=2, mask=None)])
def test_heads_that_are_taken_for_tokens_are_told(workload):
    def takes_bshd(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return sdpa(q, k, v, is_causal=workload.mask is not None, enable_gqa=True).transpose(1, 2)

    assert faults(takes_bshd, workload) == ("heads-taken-for-rows",)
    assert faults(lambda q, k, v: takes_bshd(*(t.mT.contiguous().mT * 1.01 for t in (q, k, v))), workload) == ()


def told(kernel, workload):
    return [hint.words for hint in judged(kernel, CheckSpec(workload, CPU, backward=True)).mismatch.hints]


def noisy_dp(q, k, v):
    """Attention with noise in dP that is as large as its rounding to bfloat16."""
    weights = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1)
    if weights.requires_grad:
        noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(0))
        weights.register_hook(lambda dp: dp * (1 + noise * 2**-9))
    return (weights @ v.float()).to(q.dtype)


def test_noise_in_dp_is_not_told_for_its_rounding():
    assert told(noisy_dp, Workload(129, heads=4)) == []


@pytest.mark.one_in(8)
@pytest.mark.parametrize("times", [0.99, 0.995, 1.005, 1.01])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_scale_that_is_little_off_is_no_matter_of_a_profile(times, head_dim):
    workload = Workload(128, heads=4, head_dim=head_dim)
    assert faults(scaled(times), workload) == ()
    assert faults(scaled(1), workload) == ("precision-eager",)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("values-summed-in-float16", "features-mod-fp32"),
        ("maximum-over-hidden-scores", "features-alibi"),
        ("maximum-of-tile-alone", "features-alibi-br"),
        ("denominator-in-the-tensors-dtype", "features-alibi"),
    ],
)
def test_no_profile_lets_a_sum_or_a_maximum_in_that_is_wrong(name, workload):
    """Without lse, which would tell that scores are exact."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    (found,) = builtin_catalog().select(workload)
    subject = KernelBackend(name, mutant.kernel(), returns_lse=False)
    assert not [fault for fault in faults(subject, found, inputs=INPUTS) if fault.startswith("precision-")]


@pytest.mark.parametrize(("budgets", "suggested"), [(4.0, ("precision-eager",)), (6.0, ())])
def test_a_profile_is_suggested_only_with_room(budgets, suggested):
    workload = Workload(128, heads=2)
    expected = compute_reference(draw_inputs(workload), precision_named("eager")).tensors["out"]

    def one_off(q, k, v):
        out, at = scaled(1)(q, k, v), (expected.value.abs() / expected.tau).argmin()  # where bfloat16 is fine
        out.view(-1)[at] = expected.value.view(-1)[at] + budgets * expected.tau.view(-1)[at]
        return out

    assert faults(one_off, workload, inputs=("structured",)) == suggested


def test_a_mistake_of_some_calls_only_is_not_what_the_kernel_computes():
    calls = []

    def forgetful(q, k, v):
        calls.append(1)
        return sdpa(q, k, v, is_causal=len(calls) == 1)

    assert faults(forgetful, CAUSAL) == ()
    assert faults(lambda q, k, v: sdpa(q, k, v), CAUSAL) == ("mask-ignored",)


def test_a_factor_of_a_gradient_is_named_only_if_all_distributions_have_it():
    def flipped(*calls):
        numbers = itertools.count()

        def gradients_of(gradients, dout):
            dq, dk, dv = gradients(dout)
            return (-dq if next(numbers) in calls else dq), dk, dv

        return judged(with_gradients(gradients_of), spec).faults

    spec = CheckSpec(
        CAUSAL.replace(mask=None, dtype="float32"), CPU, backward=True, declared=Declaration(precision="torch_cpu")
    )
    assert flipped(*range(9)) == ("gradient-sign-flipped",)
    assert "gradient-sign-flipped" not in flipped(0)


def test_a_flipped_sign_is_no_name_for_a_gradient_of_which_only_the_slope_is_so():
    def noisy(gradients, dout):
        dq, dk, dv = gradients(dout)
        noise = torch.randn(dq.shape, generator=torch.Generator().manual_seed(0))
        return -dq + 3 * dq.norm() / 143 * noise, dk, dv

    spec = CheckSpec(Workload(160, heads=2, dtype="float32"), CPU, backward=True, declared=Declaration(precision="torch_cpu"))
    assert judged(with_gradients(noisy), spec).faults == ()


def test_a_factor_near_1_is_not_printed_as_1():
    def scaled(gradients, dout):
        dq, dk, dv = gradients(dout)
        return dq, dk, 1.00002 * dv

    single = Workload(160, heads=2, dtype="float32")
    assert "out is 1.00002 times" in describe(judged(lambda q, k, v: 1.00002 * sdpa(q, k, v), CheckSpec(single, CPU)))
    assert "dv is 1.00002 times" in describe(judged(with_gradients(scaled), CheckSpec(single, CPU, backward=True)))


def test_what_was_wrong_is_described_although_the_kernel_writes_to_it_again():
    kept = torch.empty(CAUSAL.batch, CAUSAL.heads, CAUSAL.q_len, CAUSAL.head_dim, dtype=torch.bfloat16)

    def into_one_buffer(q, k, v):
        return kept.copy_(sdpa(q, k, v) * 2)

    comparison = judged(into_one_buffer, CheckSpec(CAUSAL, CPU))
    first = comparison.mismatch.row
    assert first.distribution == "structured"
    assert f"{first.found:.3g}"[:4] in describe(comparison)


def test_nan_in_one_row_does_not_hide_what_is_wrong_in_the_others():
    def scaled_with_nan(q, k, v):
        out = sdpa(q, k, v, is_causal=True, scale=0.2).clone()
        out[0, 0, 5, 0] = torch.nan
        return out

    comparison = judged(scaled_with_nan, CheckSpec(CAUSAL, CPU))
    assert comparison.faults == ("not-finite", "scale-wrong")
    text = describe(comparison)
    assert "rows 1 to 191 of 192; all 2 heads" in text
    assert "out holds 1 NaN and 0 infinite elements (rows: only 5 of 192)" in text
    assert "it equals attention with scale 0.2, not 0.125" in text


def test_nan_alone_is_where_it_is():
    def with_nan(q, k, v):
        out = sdpa(q, k, v, is_causal=True).clone()
        out[0, 1, 5, 0] = torch.nan
        return out

    comparison = judged(with_nan, CheckSpec(CAUSAL, CPU))
    assert "rows only 5 of 192; head 1 (of 2)" in describe(comparison)
    assert comparison.faults == ("not-finite",)


@pytest.mark.parametrize(
    ("hidden", "held", "meant"), [(-1e30, "the mean of v", 'empty_rows="finite"'), (-torch.inf, "NaN", 'empty_rows="any"')]
)
def test_what_rows_without_keys_hold_is_named(hidden, held, meant):
    """Many kernels return the mean of v there, as a softmax of equal scores does."""

    def softmax_of_nothing(q, k, v):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).masked_fill(~seen, hidden)
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    text = describe(judged(softmax_of_nothing, CheckSpec(Workload(128, 64, heads=2, mask="causal-bottom-right"), CPU)))
    assert f"each of these rows sees no key at all: out must be 0 there, and is {held}" in text
    assert meant in text


def test_dropout_that_was_left_on_is_told_from_a_wrong_kernel():
    assert faults(lambda q, k, v: sdpa(q, k, v, dropout_p=0.3), Workload(128, heads=2, head_dim=64)) == ("calls-differ",)
    assert "calls-differ" not in faults(lambda q, k, v: sdpa(q, k, v) * 2, Workload(128, heads=2, head_dim=64))


def test_a_kernel_without_a_softmax_is_told_that_it_may_be_out_of_scope():
    def of_relu(q, k, v):
        weights = (q.float() @ k.float().mT).relu()
        return (weights @ v.float() / (weights.sum(-1, keepdim=True) + 1e-6)).to(q.dtype)

    comparison = judged(of_relu, CheckSpec(Workload(96, heads=2), CPU))
    (hint,) = comparison.mismatch.hints
    assert (hint.fault, hint.label) == ("", "scope")
    assert "FAVOR+, linear or ReLU attention), it is out of scope" in hint.words


def test_pages_that_are_taken_in_pairs_are_told():
    w = Workload(4, 200, batch=2, heads=2, kv_lens=(100, 200), kv_pages=16)
    table = draw_inputs(w).page_table.long()
    table[:, 1::2] = (table[:, 0::2][:, : table.shape[1] // 2] + 1).clamp(max=int(table.max()))

    def in_pairs(q, k, v):
        k, v = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (k, v))
        return sdpa(q, k, v, attn_mask=torch.arange(k.shape[2]) < torch.tensor(w.kv_lens).view(-1, 1, 1, 1))

    assert faults(in_pairs, w) == ("some-pages-looked-up",)


@pytest.mark.parametrize(("every", "by"), [(1, 0.02), (2, 0.01), (2, 0.02)])
def test_a_disturbance_of_some_calls_is_no_rounding(every, by):
    calls, noise = itertools.count(1), torch.Generator().manual_seed(0)

    def disturbed(q, k, v):
        out = sdpa(q.float(), k.float(), v.float())
        factors = 1 + by * torch.rand(out[..., :1].shape, generator=noise)
        return (out if next(calls) % every else out * factors).to(q.dtype)

    assert faults(disturbed, Workload(128, heads=2)) == ("calls-differ",)


def test_what_takes_too_long_to_confirm_is_not_suggested(monkeypatch):
    def eager(q, k, v):
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    workload = Workload(128, heads=2, head_dim=64)
    assert faults(eager, workload) == ("precision-eager",)
    monkeypatch.setattr(diagnose, "_AGAIN_ELEMENTS", 128)
    assert faults(eager, workload) == ()
