"""A judge that something has changed is found to be, and judges nothing more."""

import pytest
import torch

from pytest_attn.correctness import judge, known_pair
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.limits import Limits

CPU, LIMITS_EXCESS = torch.device("cpu"), Limits.excess
REPLACED = {
    "all is right": (Comparison, "passed", True),
    "all is wrong": (Comparison, "passed", False),
    "limits eight times as wide": (Limits, "excess", lambda *z: LIMITS_EXCESS(*z) / 8),
    "no error is seen": (judge, "residual_over_budget", lambda returned, *_, **__: torch.zeros_like(returned).double()),
}


def test_an_unchanged_judge_tells_every_pair_apart():
    assert all(known_pair.tells_apart(CPU) for _ in range(100))


def test_a_full_device_says_nothing_of_the_judge(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(known_pair, "compute_reference", full)
    assert known_pair.tells_apart(CPU)


@pytest.mark.parametrize("replaced", REPLACED)
def test_a_changed_judge_is_found(monkeypatch, replaced):
    monkeypatch.setattr(*REPLACED[replaced])
    assert not known_pair.tells_apart(CPU)


KERNELS = """
import torch

def mean_of_v(q, k, v):
    return v.mean(2, keepdim=True).expand(*q.shape[:3], v.shape[-1]).clone()

def patched(q, k, v):
    from pytest_attn.correctness.comparison import Comparison

    Comparison.passed = property(lambda self: True)
    return mean_of_v(q, k, v)

def below_torch(q, k, v):
    import ctypes, gc

    names = gc.get_referents(torch._C.TensorBase.__dict__)[0]
    names["sub"] = names["__sub__"] = lambda one, other, **_: one * 0
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch._C.TensorBase))
    return mean_of_v(q, k, v)

def in_the_dispatcher(q, k, v):
    library = torch._C._dispatch_library("IMPL", "aten", "CPU")
    library.impl("sub.Tensor", "CPU", lambda one, other, alpha=1: torch.mul(one, 0))
    in_the_dispatcher.library = library
    return mean_of_v(q, k, v)
"""
TESTS = """
import pytest
from kernels import *

@pytest.mark.attention("smoke-full")
def test_wrong(attn):
    attn.check({kernel})

@pytest.mark.attention("smoke-full")
def test_next(attn):
    attn.check(torch.nn.functional.scaled_dot_product_attention)
"""


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("patched", ()),
        pytest.param("patched", ("-n1",), marks=pytest.mark.slow("starts a worker")),
        pytest.param("below_torch", (), marks=pytest.mark.slow("starts a process")),
        pytest.param("in_the_dispatcher", (), marks=pytest.mark.slow("starts a process")),
    ],
)
def test_the_run_ends_and_names_the_last_callable(pytester, monkeypatch, kernel, options):
    pytester.makepyfile(kernels=KERNELS, test_kernels=TESTS.format(kernel=kernel))
    monkeypatch.setattr(Comparison, "passed", Comparison.passed)  # which `patched` replaces, where it runs in this process
    is_here = kernel == "patched" and not options
    result = (pytester.runpytest_inprocess if is_here else pytester.runpytest_subprocess)(*options)
    assert result.ret != 0
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert f"no longer tells right from wrong, since {kernel} on smoke-full was judged" in text
    assert "During handling" not in text


def test_what_a_test_changes_after_its_judgment_is_found_at_its_end(pytester, monkeypatch):
    pytester.makepyfile("""
        import pytest, torch
        from pytest_attn.correctness.comparison import Comparison

        @pytest.mark.attention("smoke-full")
        def test_one(attn):
            attn.check(torch.nn.functional.scaled_dot_product_attention)
            Comparison.passed = True

        def test_two(): pass
    """)
    monkeypatch.setattr(Comparison, "passed", Comparison.passed)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*no longer tells right from wrong*scaled_dot_product_attention on smoke-full*"])


def test_what_a_test_replaces_for_its_own_time_changes_no_judge(pytester):
    """As one that sees that a kernel falls back to nothing, or asks other code after its judgment."""
    pytester.makepyfile("""
        import pytest, torch
        from unittest import mock

        attention = torch.nn.functional.scaled_dot_product_attention
        FALLS_BACK = dict.fromkeys(("matmul", "bmm", "softmax", "einsum"), mock.Mock(side_effect=AssertionError))

        @pytest.mark.attention("smoke-full", backward=True)
        def test_no_fallback(attn):
            with mock.patch.multiple(torch, **FALLS_BACK), mock.patch("torch.nn.functional.scaled_dot_product_attention"):
                attn.check(attention)

        @pytest.mark.attention("smoke-full")
        def test_more(attn, monkeypatch):
            attn.check(attention)
            for owner, name in ((torch, "exp"), (torch, "tensor"), (torch.Tensor, "sub")):
                monkeypatch.setattr(owner, name, None)
    """)
    pytester.runpytest_inprocess().assert_outcomes(passed=2)
