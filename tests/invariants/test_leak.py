"""What a row may not see, of kernels whose bits change for reasons of their own."""

import pytest
import torch
from honest.variants import HONEST, VARIANTS, TunesItself
from judging import asked

from pytest_attn import Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.kernel import Kernel, KernelBackend
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.inputs import draw_inputs

SPEC = CheckSpec(Workload(70, heads=2, head_dim=32, mask="causal"), torch.device("cpu"), backward=True)


class AddsInAnyOrder(Kernel):
    """Its dq is the next larger number in every third call, as if its parts were added up in another order."""

    calls = 0

    def backward(self, call, *gradients):
        self.calls += 1
        dq, dk, dv = super().backward(call, *gradients)
        return torch.nextafter(dq, torch.full_like(dq, torch.inf)) if self.calls % 3 == 1 else dq, dk, dv


@pytest.mark.parametrize("kernel", [TunesItself, AddsInAnyOrder])
def test_other_bits_of_the_same_call_are_no_leak(kernel):
    (finding,) = asked(KernelBackend("mine", kernel()), SPEC, only="leak").findings
    assert finding.outcome == "passed", finding.evidence


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mask-missing-in-backward", "which this row may not see: dq[0, 0, 0, 0] = nan"),
        ("lse-in-base-2", "the logarithm of the number of keys"),
    ],
)
def test_what_leaks_in_the_backward_pass_or_is_off_in_lse_is_found(name, words):
    (mutant,) = (one for one in MUTANTS if one.name == name)
    (finding,) = asked(mutant.backend(), SPEC, only="leak").broken
    assert words in finding.evidence


@pytest.mark.parametrize("name", ["rounded-sinks", "rounded-rescaling"])
def test_what_a_kernel_says_that_it_rounds_is_no_leak(name):
    (variant,) = (one for one in VARIANTS if one.name == name)
    (workload,) = builtin_catalog().select("features-sinks-causal")
    spec = CheckSpec(workload, torch.device("cpu"), backward=True)
    (finding,) = asked(variant.backend(), spec, only="leak").findings
    assert finding.outcome == "passed", finding.evidence


def test_the_gradient_of_lse_of_interleaved_heads_arrives_at_their_keys():
    spec = CheckSpec(Workload(40, heads=6, kv_heads=2, head_dim=32, head_groups="interleaved"), torch.device("cpu"), True)
    (finding,) = asked(HONEST.backend(), spec, only="lse-gradient").findings
    assert finding.outcome == "passed", finding.evidence
    (wrong,) = (one for one in MUTANTS if one.name == "gradient-of-lse-ignored")
    (finding,) = asked(wrong.backend(), spec, only="lse-gradient").findings
    assert finding.outcome == "broken"


@pytest.mark.parametrize(("reaches_sinks", "outcome"), [(True, "passed"), (False, "broken")])
def test_a_gradient_of_lse_arrives_at_the_sinks(reaches_sinks, outcome):
    w = Workload(40, heads=4, kv_heads=2, head_dim=32, sinks=True)
    sinks = draw_inputs(w).sinks.requires_grad_()

    def attention(q, k, v):
        scores = q.float() @ k.float().repeat_interleave(2, 1).mT / 32**0.5
        lse = scores.logsumexp(-1).logaddexp(sinks.float()[:, None])
        p = (scores - lse.unsqueeze(-1)).exp()
        without = scores.logsumexp(-1).logaddexp(sinks.detach().float()[:, None])
        return (p @ v.float().repeat_interleave(2, 1)).to(q.dtype), lse if reaches_sinks else without

    declared = Declaration(returns=("out", "lse"))
    spec = CheckSpec(w, torch.device("cpu"), True, declared=declared, parameters={"sinks": sinks})
    (finding,) = asked(attention, spec, only="lse-gradient").findings
    assert finding.outcome == outcome
    assert reaches_sinks or "dsinks" in finding.evidence
