"""The judgement: honest kernels pass, and each planted fault is seen and named."""

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytest_attn
from pytest_attn import Backend, Window, Workload
from pytest_attn.backends.defects import CUDNN_BLIND_ROWS
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.compare import LIMITS
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.precision import EXACT_PRECISIONS
from pytest_attn.correctness.question import Question, ReferenceCache

FULL = Workload(128, heads=2)
CAUSAL = Workload(257, heads=4, kv_heads=2, mask="causal")
CROSS = Workload(65, 129, heads=2, mask="causal-bottom-right")


def causal(q, k, v, **options):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True, **options)


def explicit(q, k, v, *, scale=None, mask=None, softcap=None, sinks=None, bias=None):
    """An honest kernel in float32 with options, to leave out or get wrong."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    score = q.float() @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    score = score if softcap is None else softcap * torch.tanh(score / softcap)
    score = score if bias is None else score + bias.float()
    score = score if mask is None else score.masked_fill(~mask, -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.float().view(1, -1, 1, 1).expand(*score.shape[:3], 1)], -1)
    p = score.softmax(-1)[..., : v.shape[2]]
    return (p @ v).to(q.dtype)


def positions(q_len, kv_len):
    return torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]


def failure(fn, workload, **options):
    with pytest.raises(AssertionError) as error:
        pytest_attn.check(fn, workload, device="cpu", **options)
    return str(error.value)


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


def test_a_backend_and_a_workload_can_be_named():
    assert pytest_attn.check("math", "smoke-full", device="cpu").passed


FAULTS = {
    "no mask": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), CAUSAL, "it equals attention without the mask"),
    "causal mask not asked for": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        FULL,
        "it equals attention with a causal mask that nobody asked for",
    ),
    "scale a little off": (lambda q, k, v: explicit(q, k, v, scale=0.126), FULL, "with scale 0.126, not 0.125"),
    "scale far off": (lambda q, k, v: explicit(q, k, v, scale=0.08), FULL, "with scale 0.08, not 0.125"),
    "scale missing": (lambda q, k, v: explicit(q, k, v, scale=1.0), FULL, "with scale 1: the softmax scale is missing"),
    "scale twice": (lambda q, k, v: explicit(q, k, v, scale=1 / 64), FULL, "with the softmax scale applied twice"),
    "base 2": (lambda q, k, v: explicit(q, k, v, scale=math.log(2) / 8), FULL, "exp2 without its factor log2 e"),
    "last key": (lambda q, k, v: sdpa(q, k[:, :, :-1], v[:, :, :-1]), FULL, "it equals attention without the last key"),
    "first key": (lambda q, k, v: sdpa(q, k[:, :, 1:], v[:, :, 1:]), FULL, "it equals attention without the first key"),
    "tail tile": (
        lambda q, k, v: sdpa(q, k[:, :, :64], v[:, :, :64]),
        FULL.replace(kv_len=97),
        "without the keys of the last part-filled tile (from 64)",
    ),
    "alignment": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        CROSS,
        "with the other causal alignment (causal)",
    ),
    "one key too many": (
        lambda q, k, v: explicit(q, k, v, mask=positions(257, 257)[1] <= positions(257, 257)[0] + 1),
        CAUSAL,
        "with a causal mask that shows one key too many",
    ),
    "window": (
        lambda q, k, v: explicit(q, k, v, mask=(d := positions(96, 96)[0] - positions(96, 96)[1]).ge(0) & (d <= 16)),
        Workload(96, mask=Window(15, 0)),
        "whose window is one key too long on the left",
    ),
    "softcap": (lambda q, k, v: explicit(q, k, v), FULL.replace(softcap=2.0), "it equals attention without softcap"),
    "scale option": (lambda q, k, v: explicit(q, k, v), FULL.replace(scale=0.3), "the option scale is ignored"),
    "sinks": (lambda q, k, v: explicit(q, k, v), FULL.replace(sinks=True), "it equals attention without sinks"),
    "bias": (lambda q, k, v: explicit(q, k, v), FULL.replace(bias="hqk"), "it equals attention without the bias"),
    "alibi": (lambda q, k, v: explicit(q, k, v), FULL.replace(alibi=True), "it equals attention without ALiBi"),
    "score_mod": (
        lambda q, k, v: explicit(q, k, v),
        FULL.replace(score_mod=lambda s, b, h, q, kv: s - (q - kv) / 9),
        "it equals attention without score_mod",
    ),
    "padding": (
        lambda q, k, v: explicit(q, k, v),
        Workload(64, heads=2, kv_lens=(64, 20)),
        "it equals attention that ignores kv_lens and sees padding",
    ),
    "head map": (
        lambda q, k, v: causal(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        CAUSAL,
        "in which query head h uses key head h % kv_heads (interleaved groups)",
    ),
    "uniform": (lambda q, k, v: sdpa(q * 0, k, v), FULL, "with uniform probabilities: the scores have no effect"),
    "k for v": (lambda q, k, v: sdpa(q, k, k), FULL, "with k in place of v"),
    "zeros": (lambda q, k, v: q * 0, FULL, "out is all zeros"),
    "other head": (lambda q, k, v: sdpa(q, k, v).roll(1, 1), FULL, "heads are swapped"),
    "eager": (
        lambda q, k, v: ((q @ k.transpose(-1, -2)) * 0.125).softmax(-1) @ v,
        FULL,
        "it fits the precision profile 'eager' (z ",
    ),
    "NaN": (lambda q, k, v: sdpa(q, k, v) / (q[..., :1] != q[0, 0, 5, 0]), FULL, "out holds"),
    "one element": (lambda q, k, v: sdpa(q, k, v).index_put_((torch.tensor(0),) * 4, torch.tensor(9.0).bfloat16()), FULL, ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_and_named(name):
    fn, workload, suggestion = FAULTS[name]
    text = failure(fn, workload)
    assert text.startswith("mismatch: out of ")
    assert suggestion in text


def test_the_failure_names_worst_element_levels_place_and_figures():
    def last_row_wrong(q, k, v):
        out = causal(q, k, v).clone()
        out[:, 1:3, 256:] = 0
        return out

    text = failure(last_row_wrong, CAUSAL)
    lines = text.splitlines()
    assert lines[0].startswith("mismatch: out of last_row_wrong: z ")
    assert lines[0].endswith(" over an element, limit 8 (h4-kv2-s257-d64-causal, inputs structured)")
    assert lines[1].startswith("  worst      out[0, ")
    assert ", 256, " in lines[1]
    assert "exact" in lines[1]
    assert "budget" in lines[1]
    assert "128 of 65,792 elements over" in lines[2]
    assert lines[3] == "  where      rows only 256 of 257 (the last); heads 1, 2 (of 4)"
    assert lines[4].startswith("  figures    absmax ")
    assert "cosine" in lines[4]
    assert "slope" in lines[4]


@pytest.mark.parametrize(
    ("spoil", "place"),
    [
        (lambda out: out[:, :, 128:], "rows 128 to 199 of 200, the tail after the last full tile of 128"),
        (lambda out: out[:, :, 63::64], "rows 3 of 200, every one at 63 modulo 64"),
        (lambda out: out[:, :, 10:20], "rows 10 to 19 of 200"),
    ],
)
def test_the_place_of_a_fault_is_described(spoil, place):
    def faulty(q, k, v):
        out = sdpa(q, k, v).clone()
        spoil(out).mul_(1.5)
        return out

    assert place in failure(faulty, Workload(200, heads=2))


class Faulty(torch.autograd.Function):
    """Exact forward, and a backward pass whose gradients `spoil` changes."""

    spoil = staticmethod(lambda dq, dk, dv: (dq, dk, dv))

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return explicit(q, k, v)

    @staticmethod
    def backward(ctx, dout):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            grads = torch.autograd.grad(explicit(*leaves), leaves, dout)
        return Faulty.spoil(*grads)


@pytest.mark.parametrize(
    ("spoil", "workload", "expected"),
    [
        (lambda dq, dk, dv: (dq * 8, dk, dv), FULL, "the factor softmax_scale is missing"),
        (lambda dq, dk, dv: (dq, dk / 8, dv), FULL, "the factor softmax_scale was applied twice"),
        (lambda dq, dk, dv: (dq, dk, dv / 3), FULL.replace(heads=3, kv_heads=1), "the mean over the 3 query heads"),
        (lambda dq, dk, dv: (dq, dk, -dv), FULL, "its sign is flipped"),
        (lambda dq, dk, dv: (dq, dk * 1.01, dv), FULL, "mismatch: dk of Faulty.apply"),
        (lambda dq, dk, dv: (dq * float("nan"), dk, dv), FULL, "dq holds 16,384 NaN and 0 infinite elements"),
    ],
)
def test_a_wrong_gradient_is_seen_and_named(monkeypatch, spoil, workload, expected):
    def honest(*grads):
        return grads

    monkeypatch.setattr(Faulty, "spoil", honest)
    precision = {"precision": "flash2", "backward": True}
    assert pytest_attn.check(Faulty.apply, workload, device="cpu", **precision).passed
    monkeypatch.setattr(Faulty, "spoil", spoil)
    assert expected in failure(Faulty.apply, workload, **precision)


def with_lse(q, k, v, factor=1.0):
    score = q.float() @ k.float().transpose(-1, -2) / 8
    return explicit(q, k, v), score.logsumexp(-1) * factor


def test_lse_is_held_to_the_natural_logarithm():
    assert pytest_attn.check(with_lse, FULL, returns_lse=True, device="cpu").passed
    text = failure(lambda q, k, v: with_lse(q, k, v, 1 / math.log(2)), FULL, returns_lse=True)
    assert text.startswith("mismatch: lse of ")
    assert "lse is off by a factor of log2 e: it is in base 2; natural logarithm expected" in text
    assert "lse" in failure(lambda q, k, v: with_lse(q, k, v, 1.0001), FULL, returns_lse=True)


def changes_k(q, k, v):
    k.data -= k.mean()
    return explicit(q, k, v)


CONTRACTS = {
    "none": (lambda q, k, v: None, {}, "the callable returned nothing (None); expected a tensor out"),
    "tuple": (lambda q, k, v: (q, 1), {}, "the callable returned a tuple of 2; expected a tensor out. Say returns_lse=True"),
    "no tuple": (lambda q, k, v: q, {"returns_lse": True}, "expected a tuple (out, lse) (returns_lse=True)"),
    "shape": (lambda q, k, v: q[:, :1], {}, "out has shape (1, 1, 128, 64); expected (1, 2, 128, 64)"),
    "layout": (lambda q, k, v: q.transpose(1, 2), {}, "heads and rows are swapped: does it return layout 'bshd'?"),
    "bshd": (lambda q, k, v: q.transpose(1, 2), {"layout": "bshd"}, "expected (1, 128, 2, 64)"),
    "dtype": (lambda q, k, v: q.float(), {}, "out has dtype torch.float32; expected torch.bfloat16"),
    "device": (lambda q, k, v: q.to("meta"), {}, "out is on meta; expected cpu"),
    "list": (lambda q, k, v: [1, 2], {}, "the callable returned a list of 2"),
    "sparse": (lambda q, k, v: q.to_sparse(), {}, "out is a sparse_coo tensor; expected a dense one, say .to_dense()"),
    "object": (lambda q, k, v: "out", {}, "out is str; expected a tensor"),
    "inputs": (changes_k, {}, "the callable changed its input k in place (by up to"),
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


def test_strides_do_not_matter():
    def strided(q, k, v):
        out = sdpa(q, k, v)
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    assert pytest_attn.check(strided, FULL, device="cpu").passed


def test_layout_bshd_is_what_flash_attention_takes():
    def flash_attn_func(q, k, v):
        assert q.shape == (1, 128, 2, 64)
        return sdpa(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    assert pytest_attn.check(flash_attn_func, FULL, layout="bshd", backward=True, device="cpu", precision="torch_cpu").passed


def test_an_exception_of_the_callable_passes_through():
    def broken(q, k, v):
        raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        pytest_attn.check(broken, FULL, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ("rand",)}, "unknown input distribution 'rand'; known: structured"),
        ({"precision": "fp4"}, "unknown precision 'fp4'; known: flash, flash2, eager"),
        ({"layout": "sbhd"}, "unknown layout 'sbhd'; known: bhsd, bshd, thd"),
        ({"layout": "thd"}, "layout 'thd' needs a packed workload (q_lens), h2-s128-d64 is not one"),
        ({"limits": "loose"}, "unknown limits 'loose'; known: default, strict"),
        ({"device": "tpu"}, "unknown device 'tpu'; expected auto, cpu, cuda, cuda:N, xpu or mps"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not there; this machine has "),
    ],
)
def test_arguments_that_are_unknown_are_refused(options, message):
    with pytest.raises(ValueError, match=r".*") as error:
        pytest_attn.check(sdpa, FULL, **{"device": "cpu", **options})
    assert message in str(error.value)


def test_a_group_is_not_one_workload():
    with pytest.raises(ValueError, match="'flux' stands for 6 workloads; name one: flux-L128"):
        pytest_attn.check(sdpa, "flux", device="cpu")


def test_strict_limits_are_sharper_for_outputs_only():
    assert LIMITS["strict"][0].element < LIMITS["default"][0].element
    assert LIMITS["strict"][1] == LIMITS["default"][1]


def question(workload=FULL, **options):
    return Question(workload, torch.device("cpu"), **options)


def test_backends_share_a_reference_and_a_backward_one_serves_forward():
    cache, registry = ReferenceCache(), Registry()
    for name in ("math", "sdpa_flash"):
        judge(registry[name], question(inputs=("flat",), backward=True), cache)
    assert cache.computed == 2  # one per precision profile
    judge(registry["math"], question(inputs=("flat",)), cache)
    judge(explicit, question(inputs=("flat",)), cache)
    assert cache.computed == 2


def test_the_cache_keeps_to_its_limit():
    cache = ReferenceCache(limit=1)
    for _ in range(2):
        judge(explicit, question(inputs=("flat",)), cache)
    assert cache.computed == 2
    roomy = ReferenceCache(limit=1 << 30)
    for name in ("flat", "randn", "flat", "randn"):
        judge(explicit, question(inputs=(name,)), roomy)
    assert roomy.computed == 2


@pytest.mark.parametrize("distribution", ["structured", "flat", "randn", "peaky", "flux", "outlier", "onehot", "large"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_honest_kernels_raise_no_false_alarm(distribution, dtype):
    for workload in (CAUSAL.replace(dtype=dtype), FULL.replace(dtype=dtype), CROSS.replace(dtype=dtype)):
        for name in ("math", "sdpa_flash"):
            comparison = judge(Registry()[name], question(workload, inputs=(distribution,), backward=True), ReferenceCache())
            assert comparison.passed, comparison.message


def query_scaled_in_dtype(q, k, v):
    return explicit(q * torch.tensor(0.3, dtype=q.dtype), k, v, scale=1.0)


def test_a_query_scaled_in_the_dtype_needs_its_own_profile():
    workload = FULL.replace(scale=0.3)
    assert pytest_attn.check(query_scaled_in_dtype, workload, precision="qscale", inputs="randn", device="cpu").passed
    assert "'qscale'" in failure(query_scaled_in_dtype, workload, inputs="randn")


@pytest.mark.parametrize("name", EXACT_PRECISIONS)
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


def test_dequantised_values_of_another_shape_are_refused():
    class Shortened(Backend):
        name, precision, is_approximate = "shortened", "int8", True

        def dequantised(self, inputs):
            return dataclasses.replace(inputs, q=inputs.q[..., :10])

        def prepare(self, inputs, backward=False):
            return lambda q, k, v: q

    with pytest.raises(AssertionError, match=r"shortened.dequantised returned q of shape \(.*, 10\); expected \(.*, 64\)"):
        judge(Shortened(), Question(FULL, torch.device("cpu")), ReferenceCache())


def test_a_defect_of_blind_rows_explains_only_these():
    workload = Workload(24, 8, mask="causal-bottom-right")  # rows 0 to 15 see no key

    def spoiling(row):
        def kernel(q, k, v):
            out = explicit(q, k, v, mask=positions(24, 8)[1] <= positions(24, 8)[0] - 16).nan_to_num()
            out[:, :, row] += 1
            return out

        return judge(kernel, question(workload), ReferenceCache())

    assert CUDNN_BLIND_ROWS.explains(spoiling(3), workload)
    assert not CUDNN_BLIND_ROWS.explains(spoiling(20), workload)


def test_nan_where_a_row_sees_no_key_is_explained():
    """lse is -inf there: NaN is as little finite, and just as wrong."""
    workload = Workload(6, 3, heads=2, head_dim=16, mask="causal-bottom-right")

    def kernel(q, k, v):
        mask = torch.ones(6, 3, dtype=torch.bool).tril(-3)
        scores = (q.float() @ k.float().mT / 4).masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1).nan_to_num().to(v.dtype) @ v
        lse = scores.logsumexp(-1)
        return out, torch.where(lse.isinf(), torch.nan, lse)

    with pytest.raises(AssertionError, match=r"(?s)lse of kernel: 6 elements are NaN or infinite.*where +rows 0 to 2 of 6"):
        pytest_attn.check(kernel, workload, device="cpu", returns_lse=True)


@pytest.mark.parametrize("backward", [False, True])
def test_a_packed_sequence_may_have_queries_and_no_keys(backward):
    workload = Workload(q_lens=(5, 7), kv_lens=(0, 9), heads=4, kv_heads=2, head_dim=16)

    def kernel(q, k, v):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        second = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q[5:], k, v)))
        return torch.cat([torch.zeros_like(q[:5]), second.transpose(0, 1)])

    assert pytest_attn.check(kernel, workload, device="cpu", backward=backward).passed


def of_contiguous_memory(q, k, v):
    """Reads k as if it were contiguous, whatever its strides."""
    return causal(q, k.as_strided(k.shape, torch.empty(k.shape).stride()), v)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_check_hands_over_strides_that_models_have(layout):
    strides = []

    def kernel(q, k, v):
        strides.append(k.stride())
        return causal(q, k, v) if layout == "bhsd" else causal(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    assert pytest_attn.check(kernel, FULL.replace(mask="causal"), layout=layout, device="cpu").passed
    of_models = {"bhsd": (16384, 64, 128, 1), "bshd": (49152, 384, 192, 1)}[layout]
    assert of_models in strides
    assert strides[0] == strides[-1] != of_models  # the first distribution, and the same again with k written anew


def test_a_kernel_that_ignores_strides_is_wrong_and_told_so():
    message = failure(of_contiguous_memory, FULL.replace(mask="causal"))
    assert "inputs flat" in message
    assert "strides    q, k and v are transposed views of (batch, row, head, dim) tensors; contiguous" in message


def test_k_and_v_do_not_share_strides():
    def takes_the_strides_of_k(q, k, v):
        return causal(q, k, v.as_strided(v.shape, k.stride()))

    message = failure(takes_the_strides_of_k, FULL.replace(mask="causal"))
    assert "strides    q and v are transposed views of (batch, row, head, dim) tensors, k is contiguous; contiguous" in message


def test_a_gradient_of_out_has_strides():
    class Doubtful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, dout):
            return dout.as_strided(dout.shape, torch.empty(dout.shape).stride())

    message = failure(lambda q, k, v: Doubtful.apply(causal(q, k, v)), FULL.replace(mask="causal"), backward=True)
    assert "strides" in message


def test_a_kernel_that_refuses_strides_is_right():
    def needs_contiguous(q, k, v):
        assert k.is_contiguous(), "k must be contiguous"
        return causal(q, k, v)

    assert pytest_attn.check(needs_contiguous, FULL.replace(mask="causal"), device="cpu").passed


def test_a_kernel_that_remembers_is_wrong_and_told_so():
    seen = []

    def scales_by_the_largest_value_so_far(q, k, v):
        seen.append(float(v.abs().max()))
        return causal(q, k, v) * (max(seen) / seen[-1])

    message = failure(scales_by_the_largest_value_so_far, FULL.replace(mask="causal"), inputs=("flat", "structured"))
    assert "state      the same call was right before others came between" in message
    assert "inputs flat" in message


def test_a_result_that_a_later_call_overwrites_is_wrong_and_told_so():
    workspace = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16)
    message = failure(lambda q, k, v: workspace.copy_(causal(q, k, v)), FULL.replace(mask="causal"))
    assert "state      its result was right, and has changed while others were computed" in message
