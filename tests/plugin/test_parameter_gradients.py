"""`backward=("q", "k", "v", "sinks")`: gradients of what a kernel closes over."""

import pytest
from judging import explicit

import pytest_attn
from pytest_attn import Workload, draw_inputs

KERNEL = """
import math, pytest, torch
from pytest_attn import Workload

def attention(q, k, v, sinks):
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v.float()).to(q.dtype)

@pytest.mark.attention(Workload(64, heads=2, head_dim=32, sinks=True), backward=("q", "k", "v", "sinks"), device="cpu")
def test_kernel(attn{fixture}):
    attn.check({what})
"""


@pytest.fixture
def judged(pytester):
    def run(what, *args, fixture=""):
        pytester.makepyfile(test_it=KERNEL.format(what=what, fixture=fixture))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs", *args)

    return run


RIGHT = "lambda q, k, v: attention(q, k, v, attn.sinks)"
SEEING = "lambda q, k, v: seen.append([t.requires_grad for t in (q, k, v)]) or attention(q, k, v, attn.sinks)"


def test_what_a_kernel_closes_over_is_the_tests_own_and_only_what_is_asked_for_needs_a_gradient(pytester):
    tests = {"right": KERNEL.format(what=RIGHT, fixture=""), "copy": KERNEL.format(what=f"{RIGHT[:-1]}.detach())", fixture="")}
    before = "(lambda sinks: lambda q, k, v: attention(q, k, v, sinks))(attn.sinks.float() * 1.0)"
    tests["before"] = KERNEL.format(what=before, fixture="")
    for number, asked in enumerate(('("sinks",)', '("q", "sinks")', '("k",)')):
        text = KERNEL.replace('("q", "k", "v", "sinks")', asked).format(what=SEEING, fixture="")
        needed = str([f'"{name}"' in asked for name in "qkv"])
        tests[f"asked_{number}"] = f"{text}    assert {needed} in seen and len(set(map(str, seen))) == 1\nseen = []\n"
    pytester.makepyfile(**{f"test_{name}": text for name, text in tests.items()})
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rf")
    result.assert_outcomes(passed=4, failed=2)
    missing = [line for line in result.outlines if line.startswith("E") and "dsinks is missing: " in line]
    assert [line.endswith("; the callable must use attn.sinks itself") for line in missing] == [True], "of the copy alone"


def test_a_gradient_that_is_lost_is_named_saved_and_judged_again(judged, pytester):
    lost = "lambda q, k, v: attention(q, k, v, attn.sinks.detach() + 0 * attn.sinks)"
    result = judged(lost, "--attn-save-failures=out")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*mismatch: dsinks of *", "E*worst      dsinks[[]?] = *", "E*suggests   dsinks is all zeros"]
    )
    (folder,) = (pytester.path / "out").iterdir()
    failure, found = pytest_attn.load_failure(folder), {}
    exec(KERNEL.split("@pytest")[0], found)
    sinks = failure.tensors["sinks"]
    assert failure.check(lambda q, k, v: found["attention"](q, k, v, sinks)).passed
    with pytest.raises(AssertionError, match="mismatch: dsinks of"):
        failure.check(lambda q, k, v: found["attention"](q, k, v, sinks.detach() + 0 * sinks))


SINKS = Workload(64, heads=2, head_dim=32, sinks=True)


@pytest.mark.parametrize("asked", [("q", "sinks"), ("sinks",), ("q", "k", "v", "sinks")])
def test_check_takes_names_as_the_marker_does(asked):
    sinks = draw_inputs(SINKS).sinks.requires_grad_()
    found = pytest_attn.check(lambda q, k, v: explicit(q, k, v, sinks=sinks), SINKS, backward=asked, device="cpu")
    assert {row.name for row in found.tensors} == {"out", *(f"d{name}" for name in asked)}


def test_check_finds_a_wrong_gradient_of_the_bias_alone():
    workload = Workload(64, heads=2, head_dim=32, bias="hqk")
    bias = draw_inputs(workload).bias.requires_grad_()
    options = {"backward": ("bias",), "device": "cpu"}
    assert pytest_attn.check(lambda q, k, v: explicit(q, k, v, bias=bias), workload, **options).passed
    with pytest.raises(AssertionError, match="mismatch: dbias of"):
        pytest_attn.check(
            lambda q, k, v: explicit(q, k, v, bias=bias.detach() + 2 * (bias - bias.detach())), workload, **options
        )
    for names in (("q", "bias"), ("bias",)):
        with pytest.raises(AssertionError, match=r"dbias is missing: .* draw_inputs\(...\).bias.requires_grad_\(\)"):
            pytest_attn.check(lambda q, k, v: explicit(q, k, v, bias=bias.detach()), workload, backward=names, device="cpu")


FROZEN = """
import pytest, torch
from pytest_attn import Workload

ATTENTION = torch.nn.functional.scaled_dot_product_attention
WORKLOAD = Workload(40, heads=2, head_dim=32, dtype="float32", bias="hqk")

@pytest.mark.attention(WORKLOAD, backward={asked}, device="cpu")
def test_frozen(attn):
    attn.check_invariants(lambda q, k, v: ATTENTION({given}, attn.bias))

@pytest.mark.attention(WORKLOAD, backward={asked}, device="cpu")
def test_found(attn):
    attn.check_invariants(lambda q, k, v: ATTENTION({given}, attn.bias) * (1 - 0.1 * {needing}.requires_grad))
"""


@pytest.mark.parametrize(
    ("asked", "given", "needing"),
    [
        ('("bias",)', "q.detach(), k.detach(), v.detach()", "attn.bias"),
        ('("k", "bias")', "q.detach(), k, v.detach()", "k"),
        ('("q",)', "q, k.detach(), v.detach()", "v"),
    ],
)
def test_invariants_hold_of_the_gradients_that_are_asked_for(pytester, asked, given, needing):
    pytester.makepyfile(test_it=FROZEN.format(asked=asked, given=given, needing=needing))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2 if needing == "v" else 1, failed=0 if needing == "v" else 1)


def test_invariants_without_pytest_take_names_of_q_k_and_v():
    def with_frozen_keys(q, k, v):
        return explicit(q, k.detach(), v)

    options = {"only": ("gradients", "alone", "magnitude"), "device": "cpu"}
    assert pytest_attn.check_invariants(with_frozen_keys, Workload(64, heads=2), backward=("q", "v"), **options).passed
    with pytest.raises(AssertionError, match="out carries no gradient where nothing but k needs one"):
        pytest_attn.check_invariants(with_frozen_keys, Workload(64, heads=2), backward=True, **options)
    with pytest.raises(ValueError, match="those of sinks need a test with a marker"):
        pytest_attn.check_invariants(explicit, SINKS, backward=("q", "sinks"), **options)


def test_check_refuses_a_gradient_of_what_a_workload_has_not():
    with pytest.raises(ValueError, match="backward asks for a gradient of bias, and no workload has bias"):
        pytest_attn.check(explicit, SINKS, backward=("bias",), device="cpu")


UNNAMED = """
import math, pytest, torch
from pytest_attn import Workload

W = Workload(64, heads=2, head_dim=32, sinks=True)

class Sinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, sinks, factor):
        whole = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1).softmax(-1)
        ctx.save_for_backward(whole)
        ctx.factor = factor
        return whole[..., :-1]

    @staticmethod
    def backward(ctx, dp):
        (p,) = ctx.saved_tensors
        dp = torch.cat([dp, torch.zeros_like(dp[..., :1])], -1)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dsinks = ds[..., -1].sum((0, 2)).to(torch.bfloat16)
        return ds[..., :-1], None if ctx.factor is None else ctx.factor * dsinks, None

def attention(q, k, v, sinks, factor):
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    return (Sinks.apply(scores, sinks, factor) @ v.float()).to(q.dtype)

@pytest.mark.attention(W, backward=True, device="cpu")
@pytest.mark.parametrize("factor", [1, 279, None])
def test_closes_over(attn, factor):
    attn.check(lambda q, k, v: attention(q, k, v, attn.sinks, factor))
    assert not attn.sinks.requires_grad

@pytest.mark.attention(W, backward=True, device="cpu")
def test_refuses(attn):
    def refuses(q, k, v):
        if attn.sinks.requires_grad:
            raise RuntimeError("sinks have no gradient")
        return attention(q, k, v, attn.sinks, 1)
    attn.check(refuses)

@pytest.mark.attention(W, backward=("q", "k", "v", "sinks"), device="cpu")
def test_named(attn, attn_backend):
    attn.check(attn_backend)
    attn.check_invariants(attn_backend, only="alone")
"""
OWN = """
from pytest_attn import Backend, Capabilities
from test_it import attention

class Own(Backend):
    library, capabilities = "torch", Capabilities(masks=frozenset(), features=frozenset({"backward", "sinks"}))

    def __init__(self, name, factor):
        self.name, self.factor = name, factor

    def prepare(self, inputs, backward=False):
        return lambda q, k, v: attention(q, k, v, inputs.sinks, self.factor)

def pytest_attn_backends(registry):
    for name, factor in {"right": 1, "wrong": 279, "without": None}.items():
        registry.add(Own(name, factor))
"""


def test_gradients_that_nobody_names_are_judged_where_autograd_reaches_them(pytester):
    pytester.makepyfile(test_it=UNNAMED)
    pytester.makeconftest(f"import sys; sys.path.insert(0, {str(pytester.path)!r})\n{OWN}")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rsf", "--attn-backends=right,wrong,without", "-v")
    result.assert_outcomes(passed=4, failed=2, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            "*test_closes_over?*279* FAILED*",
            "*test_named?*wrong* FAILED*",
            "E*mismatch: dsinks of *",
            "*without: has no gradient of sinks that can be compared: autograd does not reach it from out",
            "untested      dsinks of *: not judged, autograd does not reach it from out",
            "untested      dsinks of *: not judged, where they need a gradient the kernel raises RuntimeError: sinks have no*",
        ]
    )


def test_without_pytest_it_says_what_was_not_judged():
    sinks = draw_inputs(SINKS).sinks
    frozen = pytest_attn.check(lambda q, k, v: explicit(q, k, v, sinks=sinks), SINKS, backward=True, device="cpu")
    assert frozen.unjudged == ("dsinks: autograd does not reach it from out",)
    sinks.requires_grad_()
    judged = pytest_attn.check(lambda q, k, v: explicit(q, k, v, sinks=sinks), SINKS, backward=True, device="cpu")
    assert not judged.unjudged
    assert "dsinks" in {row.name for row in judged.tensors}
    assert pytest_attn.check("eager", SINKS, backward=("q", "sinks"), device="cpu").passed
