"""A function declines a case by a NotImplementedError with a text: a skip that says so, and never a pass."""

import pytest
import torch

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.raised import declined_because

DECLINES = """
def declines(q, k, v):
    raise NotImplementedError("no softcap")

def stub(q, k, v):
    raise NotImplementedError

def lacks_a_kernel(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.to("meta"), k, v)[0].to("cpu")

def declines_flat_inputs(q, k, v):
    if q.std() < 0.3 or k.std() < 0.3:
        raise NotImplementedError("no flat inputs")
    return sdpa(q, k, v, scale=1.0)

def declines_large_values(q, k, v):
    if q.abs().max() > 30:
        raise NotImplementedError("no large values")
    return sdpa(q, k, v)
"""


@pytest.mark.parametrize("judgment", ["check", "check_invariants", "measure"])
def test_what_a_function_declines_is_a_skip_with_its_text(run, kernel_test, judgment):
    kernel_test(f"attn.{judgment}(declines)", before=DECLINES)
    result = run("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * declines: no softcap"])


def test_a_stub_without_a_text_fails(run, kernel_test):
    kernel_test("attn.check(stub)", before=DECLINES)
    run().assert_outcomes(failed=1)


def test_a_later_refusal_hides_no_mismatch(run, kernel_test):
    body = "calls = []\ndef late(q, k, v):\n    calls.append(1)\n    if len(calls) > 6:\n        "
    kernel_test(f"{body}raise NotImplementedError('tired')\n    return sdpa(q, k, v, scale=1.0)\nattn.check(late)")
    run().assert_outcomes(failed=1)


def test_an_invariant_whose_variant_is_declined_does_not_apply(run, kernel_test):
    kernel_test(
        "report = attn.check_invariants(declines_large_values)\n"
        "(declined,) = [f for f in report.findings if f.evidence == 'no large values']\n"
        "assert (declined.invariant, declined.outcome) == ('magnitude', 'not applicable') and report.applied",
        before=DECLINES,
    )
    run().assert_outcomes(passed=1)


def test_a_function_that_is_registered_declines_as_well(run, kernel_test, pytester):
    pytester.makeconftest(
        """
def mine(q, k, v, workload):
    raise NotImplementedError("no window")

def pytest_attn_backends(registry):
    registry.add_function("mine", mine)
"""
    )
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend")
    result = run("--attn-backends=mine", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * mine: no window"])


def test_without_pytest_it_is_a_not_implemented_error():
    def declines(q, k, v):
        raise NotImplementedError("no softcap")

    with pytest.raises(NotImplementedError, match="declines h2-s32-d32: no softcap"):
        pytest_attn.check(declines, Workload(32, heads=2, head_dim=32), device="cpu", name="mine")


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


@pytest.mark.parametrize(
    "fault",
    [
        lambda: torch.empty(2, device="meta").tolist(),
        lambda: NoBackward.apply(torch.ones(1, requires_grad=True)).sum().backward(),
        lambda: torch.ops.aten._fused_sdp_choice(*(torch.empty(1, 1, 1, 1).to_sparse() for _ in range(3))),
        lambda: (_ for _ in ()).throw(NotImplementedError("thrown, not raised by its author")),
    ],
)
def test_what_torch_raises_is_a_fault(fault):
    with pytest.raises(NotImplementedError) as raised:
        fault()
    assert declined_because(raised.value) is None


def test_a_group_that_has_dropout_skips_callables_that_say_not_what_they_dropped(pytester):
    pytester.makepyfile(
        """
        import pytest
        import torch
        from pytest_attn import Workload

        def attention(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        @pytest.mark.attention("features-dropout", "features-batch", device="cpu")
        def test_of_a_group(attn):
            attn.check(attention)

        @pytest.mark.attention(Workload(64, heads=2, dropout=0.2), device="cpu")
        def test_of_its_own(attn):
            attn.check(attention)
        """
    )
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=1, failed=1)
    result.stdout.fnmatch_lines(["*drops probabilities: for callables that return which they kept*"])
    result.stdout.fnmatch_lines(["*ValueError*drops probabilities: let the callable return which it kept*"])
