"""The judgment: fault-free kernels pass, and each planted fault is seen and named."""

import dataclasses
import math

import pytest
import torch
from judging import CAUSAL, CROSS, FULL, causal, explicit, failure, judged, positions, spec_of, with_lse
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytest_attn
from pytest_attn import Backend, Workload
from pytest_attn.backends.defects import CUDNN_FULLY_MASKED_ROWS
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.precision import SUGGESTED
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.kernel import honest_backend


def test_an_honest_kernel_passes_and_the_comparison_has_the_figures():
    comparison = pytest_attn.check(causal, CAUSAL, backward=True, precision="torch_cpu", device="cpu")
    assert comparison.passed
    assert [t.name for t in comparison.tensors] == ["out", "dq", "dk", "dv"] * 2
    out = comparison.tensors[0]
    assert 0.5 < out.z_element < 8
    assert out.absmax > out.mean_abs > 0
    assert out.relative_l2 < 0.01
    assert out.cosine > 0.9999
    assert abs(out.alpha - 1) < 1e-3
    assert comparison.to_dict()["passed"] is True


def test_lse_is_held_to_the_natural_logarithm():
    assert pytest_attn.check(with_lse(), FULL, returns_lse=True, device="cpu").passed
    text = failure(with_lse(lambda lse: lse / math.log(2)), FULL, returns_lse=True)
    assert text.startswith("mismatch: lse of ")
    assert "lse is off by a factor of log2 e: it is in base 2" in text
    assert "lse" in failure(with_lse(lambda lse: lse * 1.0001), FULL, returns_lse=True)


def changes_k(q, k, v):
    k.data -= k.mean()
    return explicit(q, k, v)


class Same(torch.Tensor):
    """Equals whatever it is compared with."""

    __ne__ = __eq__ = lambda self, other: torch.zeros(self.shape, dtype=torch.bool)


def hides_changes_of_q(q, k, v):
    out = sdpa(q, k, v)
    q.data.zero_()
    q.__class__ = Same
    return out


CONTRACTS = {
    "nothing": (lambda q, k, v: None, {}, "the callable returned nothing (None); expected a tensor out"),
    "a tuple": (lambda q, k, v: (q, q), {}, "returned a tuple of 2; expected a tensor out. Say returns_lse=True"),
    "dtype": (lambda q, k, v: q.float(), {}, "out has dtype torch.float32; expected torch.bfloat16"),
    "device": (lambda q, k, v: q.to("meta"), {}, "out is on meta; expected cpu"),
    "no tuple": (lambda q, k, v: q, {"returns_lse": True}, "expected a tuple (out, lse) (returns_lse=True)"),
    "shape": (lambda q, k, v: q[:, :1], {}, "out has shape (1, 1, 128, 64); expected (1, 2, 128, 64)"),
    "layout": (lambda q, k, v: q.transpose(1, 2), {}, "heads and rows are swapped: does it return layout 'bshd'?"),
    "bshd": (lambda q, k, v: q.transpose(1, 2), {"layout": "bshd"}, "expected (1, 128, 2, 64)"),
    "list": (lambda q, k, v: [1, 2], {}, "the callable returned a list of 2"),
    "sparse": (lambda q, k, v: q.to_sparse(), {}, "out is a sparse_coo tensor; expected a dense one, say .to_dense()"),
    "object": (lambda q, k, v: "out", {}, "out is str; expected a torch.Tensor"),
    "inputs": (changes_k, {}, "the callable changed its input k in place (by up to"),
    "class of inputs": (hides_changes_of_q, {}, "the callable made its input a Same, whose own code would run"),
    "no gradient": (
        lambda q, k, v: sdpa(q, k, v).detach(),
        {"backward": True},
        "out carries no gradient; backward=True needs",
    ),
    "no dk": (lambda q, k, v: sdpa(q, k.detach(), v), {"backward": True}, "dk is missing: out does not depend on k"),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_broken_contract_is_named_before_any_value_is_compared(name):
    fn, options, message = CONTRACTS[name]
    text = failure(fn, FULL, **options)
    assert message in text
    assert "on h2-s128-d64, inputs structured" in text


def test_layout_bshd_is_what_flash_attention_takes():
    def flash_attn_func(q, k, v):
        assert q.shape == (1, 128, 2, 64)
        return sdpa(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    assert pytest_attn.check(flash_attn_func, FULL, layout="bshd", backward=True, device="cpu", precision="torch_cpu").passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ("rand",)}, "unknown input distribution 'rand'; known: structured"),
        ({"precision": "fp4"}, "unknown precision 'fp4'; did you mean fp8? known: flash, flash2, eager"),
        ({"rtol": 1e-2}, "check() got an unexpected keyword argument 'rtol'; each element has a budget of its own:"),
        ({"limits": "loose"}, "unknown limits 'loose'; known: default, strict"),
        ({"device": "tpu"}, "unknown device 'tpu'; expected auto, cpu, cuda, cuda:N, xpu or mps"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not there; this machine has "),
    ],
)
def test_arguments_that_are_unknown_are_refused(options, message):
    with pytest.raises((TypeError, ValueError)) as error:
        pytest_attn.check(sdpa, FULL, **{"device": "cpu", **options})
    assert message in str(error.value)


def test_a_workload_without_a_single_number_is_refused():
    workload = Workload(17, score_mod=lambda score, b, h, q, k: score / 0)

    with pytest.raises(ValueError, match="is NaN everywhere, so nothing can be judged"):
        pytest_attn.check(lambda q, k, v: q * math.nan, workload, device="cpu")


def test_a_group_is_not_one_workload():
    with pytest.raises(ValueError, match="'flux' stands for 6 workloads; name one: flux-L128"):
        pytest_attn.check(sdpa, "flux", device="cpu")


def test_strict_limits_are_sharper_for_outputs_only():
    assert limits_named("strict")[0].element < limits_named("default")[0].element
    assert limits_named("strict")[1] == limits_named("default")[1]


def test_backends_share_a_reference_and_a_backward_one_serves_forward():
    cache, registry = ReferenceCache(), Registry()
    for name in ("math", "sdpa_flash"):
        judged(registry[name], spec_of(inputs=("flat",), backward=True), cache)
    assert cache.computed == 2  # one per precision profile
    judged(registry["math"], spec_of(inputs=("flat",)), cache)
    judged(explicit, spec_of(inputs=("flat",)), cache)
    assert cache.computed == 2


def test_the_cache_keeps_to_its_limit():
    cache = ReferenceCache(limit=1)
    for _ in range(2):
        judged(explicit, spec_of(inputs=("flat",)), cache)
    assert cache.computed == 2
    roomy = ReferenceCache(limit=1 << 30)
    for name in ("flat", "randn", "flat", "randn"):
        judged(explicit, spec_of(inputs=(name,)), roomy)
    assert roomy.computed == 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("distribution", ["structured", "flat", "randn", "peaky", "flux", "outlier", "onehot", "large"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_honest_kernels_raise_no_false_alarm(distribution, dtype):
    for workload in (CAUSAL.replace(dtype=dtype), FULL.replace(dtype=dtype), CROSS.replace(dtype=dtype)):
        for backend in map(Registry().__getitem__, ("math", "sdpa_flash")):
            if backend.name != "math" and backend.unsupported_because(workload, machine_of(torch.device("cpu")), True):
                continue  # the CPU kernel of torch 2.6 has no GQA
            comparison = judge(backend, spec_of(workload, inputs=(distribution,), backward=True), ReferenceCache())
            assert comparison.passed, describe(comparison)


def query_scaled_in_dtype(q, k, v):
    return explicit(q * 0.3, k, v, scale=1.0)


def test_a_query_scaled_in_the_dtype_needs_its_own_profile():
    workload = FULL.replace(scale=0.3)
    assert pytest_attn.check(query_scaled_in_dtype, workload, precision="qscale", inputs="randn", device="cpu").passed
    assert "'qscale'" in failure(query_scaled_in_dtype, workload, inputs="outlier")


def test_a_scale_that_is_kept_in_the_dtype_is_another_scale():
    def kernel(q, k, v):
        return explicit(q * torch.tensor(0.3, dtype=q.dtype), k, v, scale=1.0)

    assert "it equals attention with scale 0.3008, not 0.3" in failure(kernel, FULL.replace(scale=0.3), inputs="randn")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SUGGESTED)
def test_no_exact_profile_excuses_a_scale_that_is_two_percent_off(name):
    assert failure(lambda q, k, v: explicit(q, k, v, scale=1.02 / 8), FULL.replace(dtype="fp16"), precision=name)


@pytest.mark.parametrize("workload", [Workload(63, heads=2, sinks=True), Workload(256, sinks=True), Workload(8, sinks=True)])
def test_sinks_that_are_ignored_always_show(workload):
    for seed in range(3):
        assert "without sinks" in failure(lambda q, k, v: explicit(q, k, v), workload, seed=seed)


def test_an_honest_float32_softcap_passes_on_saturated_scores():
    workload = Workload(64, heads=2, softcap=30.0, dtype="fp32")

    def capped(q, k, v):
        return explicit(q, k, v, softcap=30.0)

    assert pytest_attn.check(capped, workload, inputs=("outlier", "structured"), backward=True, device="cpu").passed


def test_a_named_backend_refuses_outside_pytest_too():
    with pytest.raises(ValueError, match="backend 'math' cannot take s16-d64-sinks: has no sinks"):
        pytest_attn.check("math", Workload(16, sinks=True), device="cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask": lambda b, h, q, kv: True}, "mask must return a boolean tensor, it returned bool"),
        ({"mask": lambda b, h, q, kv: (q - kv).float()}, "mask must return a boolean tensor, it returned a float32 tensor"),
        ({"score_mod": lambda s, b, h, q, kv: None}, "score_mod must return a tensor, it returned NoneType"),
    ],
)
def test_a_function_of_the_workload_that_returns_something_else_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        pytest_attn.check(sdpa, Workload(8, **fields), device="cpu")


def test_a_score_mod_without_the_score_has_no_gradient_for_q_and_k():
    workload = Workload(16, score_mod=lambda s, b, h, q, kv: (q - kv) / 8.0)

    def positions_only(q, k, v):
        i, j = positions(16, 16)
        p = ((i - j) / 8.0).softmax(-1)
        return (p @ v.float()).to(q.dtype) + 0 * q + 0 * k

    assert pytest_attn.check(positions_only, workload, backward=True, device="cpu").passed


def test_dequantized_values_of_another_shape_are_refused():
    class Shortened(Backend):
        name, precision, is_approximate = "shortened", "int8", True

        def dequantized(self, inputs):
            return dataclasses.replace(inputs, q=inputs.q[..., :10])

        def prepare(self, inputs, backward=False):
            return lambda q, k, v: q

    with pytest.raises(AssertionError, match=r"shortened.dequantized returned q of shape \(.*, 10\); expected \(.*, 64\)"):
        judge(Shortened(), CheckSpec(FULL, torch.device("cpu")), ReferenceCache())


def test_a_defect_of_fully_masked_rows_explains_only_these():
    workload = Workload(24, 8, mask="causal-bottom-right")  # rows 0 to 15 see no key

    def spoiling(row):
        def kernel(q, k, v):
            out = explicit(q, k, v, mask=positions(24, 8)[1] <= positions(24, 8)[0] - 16).nan_to_num()
            out[:, :, row] += 1
            return out

        return judged(kernel, spec_of(workload))

    assert CUDNN_FULLY_MASKED_ROWS.explains(spoiling(3), workload)
    assert not CUDNN_FULLY_MASKED_ROWS.explains(spoiling(20), workload)


def test_nan_where_a_row_sees_no_key_is_explained():
    """lse is -inf there: NaN is as little finite, and just as wrong."""
    workload = Workload(6, 3, heads=2, head_dim=16, mask="causal-bottom-right")

    def kernel(q, k, v):
        mask = torch.ones(6, 3, dtype=torch.bool).tril(-3)
        scores = (q.float() @ k.float().mT / 4).masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1).nan_to_num().to(v.dtype) @ v
        lse = scores.logsumexp(-1)
        return out, torch.where(lse.isinf(), torch.nan, lse)

    with pytest.raises(
        AssertionError, match=r"(?s)lse of [\w.]+\.kernel: 6 elements are NaN or infinite.*where +rows 0 to 2 of 6"
    ):
        pytest_attn.check(kernel, workload, device="cpu", returns_lse=True)


@pytest.mark.parametrize("backward", [False, True])
def test_a_packed_sequence_may_have_queries_and_no_keys(backward):
    workload = Workload(q_lens=(5, 7), kv_lens=(0, 9), heads=4, kv_heads=2, head_dim=16)

    def kernel(q, k, v):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        second = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q[5:], k, v)))
        return torch.cat([torch.zeros_like(q[:5]), second.transpose(0, 1)])

    assert pytest_attn.check(kernel, workload, device="cpu", backward=backward).passed


@pytest.mark.parametrize("seed", range(3))
def test_one_row_sum_moves_the_gradient_of_all_keys(seed):
    given = {"softcap": 5.0, "scale": 0.3, "alibi": True, "kv_lens": (257, 85, 0), "dtype": "float16"}
    w = Workload(1, heads=2, head_dim=32, mask="causal-bottom-right", **given)
    found = pytest_attn.check(honest_backend(), w, backward=True, device="cpu", seed=seed)
    assert {row.name: row.limits.head for row in found.tensors} == {"out": 4, "lse": 1, "dq": 4, "dk": 4, "dv": 4}
