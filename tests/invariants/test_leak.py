"""What a row may not see, of kernels whose bits change for reasons of their own."""

import pytest
import torch
from judging import asked

from pytest_attn import Workload
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.mutants.catalog import MUTANTS
from pytest_attn.mutants.honest.backend import KernelBackend
from pytest_attn.mutants.honest.kernel import Kernel

SPEC = CheckSpec(Workload(70, heads=2, head_dim=32, mask="causal"), torch.device("cpu"), backward=True)


class CompiledAnew(Kernel):
    """Takes keys in tiles of another size from its second call on, as what a compiler makes for other shapes may."""

    calls = 0

    def forward(self, call):
        self.calls += 1
        self.key_tile = 16 if self.calls == 1 else 64
        return super().forward(call)


class AddsInAnyOrder(Kernel):
    """Its dq is the next larger number in every third call, as if its parts were added up in another order."""

    calls = 0

    def backward(self, call, *gradients):
        self.calls += 1
        dq, dk, dv = super().backward(call, *gradients)
        return torch.nextafter(dq, torch.full_like(dq, torch.inf)) if self.calls % 3 == 1 else dq, dk, dv


@pytest.mark.parametrize("kernel", [CompiledAnew, AddsInAnyOrder])
def test_other_bits_of_the_same_call_are_no_leak(kernel):
    (finding,) = asked(KernelBackend("mine", kernel()), SPEC, only="leak").findings
    assert finding.outcome == "passed", finding.evidence


def test_a_mask_that_is_missing_in_the_backward_pass_leaks():
    (missing,) = (one for one in MUTANTS if one.name == "mask-missing-in-backward")
    (finding,) = asked(missing.backend(), SPEC, only="leak").findings
    assert finding.outcome == "broken"
    assert "which this row may not see: dq[0, 0, 0, 0] = nan" in finding.evidence
