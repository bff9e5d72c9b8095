import pytest
import torch
from fakes import planted
from fakes.judged import B200, H200, judged

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.guests.libraries import sage
from pytest_attn.workloads.inputs import draw_inputs

W = Workload(130, 192, batch=2, heads=4, kv_heads=2)
SQUARE = Workload(200, heads=4, kv_heads=2, mask="causal")
PADDED = Workload(130, 200, heads=2)


def judged_on_all(backend, workload):
    return judged(backend, workload, inputs=("structured", "flat", "outlier", "peaky", "large"))


def values_pass(comparison):
    return all(tensor.passed for tensor in comparison.tensors)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "workload",
    [
        W,
        W.replace(dtype="fp16", scale=0.3),
        W.replace(dtype="fp32", head_dim=128),
        W.replace(head_dim=96),
        W.replace(q_len=1, kv_len=640),
        SQUARE,
        SQUARE.replace(head_dim=128, dtype="fp16", mask="causal-bottom-right"),
    ],
    ids=lambda w: w.id,
)
def test_version_1_computes_exact_attention_on_its_int8_values_and_changes_k(installed, workload):
    backend = installed("sage", ["sage1"])
    assert backend.unavailable_because(H200) is None
    assert backend.unsupported_because(workload, H200) == []
    comparison = judged_on_all(backend, workload)
    assert values_pass(comparison), describe(comparison)
    assert comparison.changed == ("k",)
    in_place, padding = backend.known_defects
    assert in_place.applies(workload, H200)
    assert in_place.explains(comparison, workload)
    assert not padding.applies(workload, H200)


def test_keys_of_padding_that_version_1_counts_are_a_defect_of_their_own(installed):
    backend = installed("sage", ["sage1"])
    comparison = judged(backend, PADDED)
    assert not values_pass(comparison)
    in_place, padding = backend.known_defects
    assert not in_place.explains(comparison, PADDED)
    assert padding.applies(PADDED, H200)
    assert padding.explains(comparison, PADDED)


def test_a_version_1_that_leaves_k_alone_passes(installed):
    source = planted("sage1.py", "k -= k.mean", "k = k - k.mean")
    assert judged(installed("sage", ["sage1"], **source), W).passed


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("text", "replacement"),
    [
        ("rows[:, None] >=", "rows[:, None] >"),
        ("* k_scale[:, :, start, None]", "* k_scale.roll(BLOCK_N, 2)[:, :, start, None]"),
        ("q_scale * k_scale", "q_scale.roll(BLOCK_M, 2) * k_scale"),
        ("x_int8 = x_int8 + 0.5 * torch.where(x_int8 >= 0, 1, -1)", ""),
        ("sm_scale * 1.44269504", "sm_scale * 1.457"),
        ("return acc / total", "return 1.01 * acc / total"),
        ("p.to(torch.float16)", "p.to(torch.float8_e4m3fn).half()"),
        ("v.to(torch.float16)", "v.to(torch.float8_e4m3fn).half()"),
        ("t.repeat_interleave(group, 1)", "t.repeat(1, group, 1, 1)"),
        ("top = torch.maximum", "qk[..., -1] -= 1e6 * (start == 128); top = torch.maximum"),
        (".to(torch.float16).float()\n    return acc", ".to(torch.bfloat16).float()\n    return acc"),
    ],
)
def test_a_fault_in_version_1_is_found_beside_its_defects(installed, text, replacement):
    comparison = judged(
        installed("sage", ["sage1"], **planted("sage1.py", text, replacement)), SQUARE if "rows" in text else W
    )
    assert not values_pass(comparison)


def test_what_version_1_makes_of_q_and_k_is_known_but_for_ties(installed):
    library = installed("sage", ["sage1"]).source.load()
    for x, rows in ((draw_inputs(W, "structured").q.float(), 128), (draw_inputs(W, "outlier").k.float(), 64)):
        steps, scale = library.per_block_int8(x, rows, 1.0)
        theirs = (steps.float() * scale)[:, :, : x.shape[2]]
        off = (sage._in_int8_steps(x, rows) - theirs).abs() / scale[:, :, : x.shape[2]]
        assert off.max() < 0.501
        assert (off > 1e-3).float().mean() < 0.05


def test_a_block_of_zeros_stays_zero():
    assert not sage._in_int8_steps(torch.zeros(1, 1, 3, 64), 64).any()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["sage", "sage_fp16", "sage_fp8"])
@pytest.mark.parametrize(
    "workload",
    [W, W.replace(dtype="fp16", scale=0.3, head_dim=96), PADDED, SQUARE, SQUARE.replace(head_dim=128)],
    ids=lambda w: w.id,
)
def test_version_2_stays_within_the_error_of_its_steps(installed, name, workload):
    backend = installed(name)
    assert backend.unavailable_because(H200) is None
    assert backend.unsupported_because(workload, H200) == []
    comparison = judged_on_all(backend, workload)
    assert comparison.passed, describe(comparison)
    assert comparison.is_approximate
    assert not any(defect.applies(workload, H200) for defect in backend.known_defects)


@pytest.mark.parametrize("name", ["sage_fp16", "sage_fp8"])
@pytest.mark.parametrize(
    ("text", "replacement"),
    [
        ("x.shape[2]]\n", "x.shape[2]] * 1.2\n"),
        ("triu(1)", "triu(0)"),
        ("k = in_int8(k, 64).repeat_interleave(q.shape[1] // k.shape[1], 1)", "k = in_int8(k, 64).repeat(1, 2, 1, 1)"),
    ],
)
def test_a_gross_fault_in_version_2_is_found(installed, name, text, replacement):
    assert not judged(installed(name, **planted("sage2.py", text, replacement)), SQUARE).passed


def test_hopper_gets_its_own_fp8_kernel(installed, monkeypatch):
    backend = installed("sage_fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert backend.function(torch.device("cuda:0")) == "sageattn_qk_int8_pv_fp8_cuda_sm90"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert backend.function(torch.device("cuda:0")) == "sageattn_qk_int8_pv_fp8_cuda"


def test_versions_are_told_apart(installed):
    installed("sage", ["sage1"])
    registry = Registry()
    assert registry["sage"].precision_on("cuda") == "sage"
    assert registry["sage"].unavailable_because(B200) is None
    for name in ("sage_fp16", "sage_fp8"):
        assert registry[name].unavailable_because(H200) == "needs sageattention >= 2.0, 1.0.6 is installed"


def test_version_2_takes_two_dtypes(installed):
    backend = installed("sage")
    assert backend.precision_on("cuda") == "sage_fp8"
    assert backend.unsupported_because(W.replace(dtype="fp32"), H200) == ["takes float16 and bfloat16 only, not float32"]
