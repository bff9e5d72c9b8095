"""Kernels that tune themselves are no race, and a race is no tuning."""

import sys
from types import SimpleNamespace

import pytest
import torch
from judging import asked

from pytest_attn import Workload
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.invariants import rerun
from pytest_attn.mutants.kernel import Kernel, KernelBackend

SPEC = CheckSpec(Workload(70, 80, heads=2, head_dim=32), torch.device("cpu"), backward=True)


class Tuned(Kernel):
    """Takes keys in tiles of another size from its second call on."""

    def __init__(self, autotuner=None):
        super().__init__()
        self.calls, self.autotuner = 0, autotuner

    def forward(self, call):
        self.calls += 1
        self.key_tile = 16 if self.calls == 1 else 64
        if self.autotuner:
            self.autotuner.best_config = f"BLOCK_N: {self.key_tile}"
        return super().forward(call)


@pytest.fixture
def autotuner(monkeypatch):
    class Autotuner:
        base_fn = SimpleNamespace(__name__="_attn_fwd")

    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", SimpleNamespace(Autotuner=Autotuner))
    return Autotuner()


def finding_of(kernel, **options):
    (finding,) = asked(KernelBackend("tuned", kernel), SPEC, only="rerun", **options).findings
    return finding


def test_a_kernel_that_chooses_another_configuration_after_its_first_call_is_right(autotuner):
    finding = finding_of(Tuned(autotuner))
    assert finding.outcome == "passed"
    assert finding.evidence == (
        "the first call gave other bits than the 6 after it, as kernels do that tune themselves:"
        " _attn_fwd: BLOCK_N: 16, now BLOCK_N: 64"
    )


def test_where_no_configuration_changed_another_first_result_is_no_tuning(autotuner, monkeypatch):
    assert finding_of(Tuned()).outcome == "broken"
    monkeypatch.delitem(sys.modules, "triton.runtime.autotuner", raising=False)
    assert rerun.configurations() == {}
    assert finding_of(Tuned()).outcome == "broken"


def test_a_gradient_that_alternates_is_no_tuning_where_torch_promises_determinism(autotuner):
    class Alternates(Tuned):
        def dq(self, tile, ds, k):
            return super().dq(tile, ds, k) * (1 + 2**-7 * (self.calls % 2))

    torch.use_deterministic_algorithms(True)
    try:
        assert finding_of(Alternates(autotuner)).outcome == "broken"
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_others_are_held_against_the_configuration_that_stays(autotuner):
    report = asked(KernelBackend("tuned", Tuned(autotuner)), SPEC, only=("rerun", "state"))
    assert report.passed
    (note,) = report.notes
    assert note.startswith("rerun: the first call gave other bits")


class Alternating(Tuned):
    """Chooses anew in every third call."""

    def forward(self, call):
        self.calls = self.calls % 3
        return super().forward(call)


class WrongFirst(Tuned):
    """Returns what is wrong from its first call only."""

    def forward(self, call):
        out, lse = super().forward(call)
        return (1.1 * out if self.calls == 1 else out), lse


@pytest.mark.parametrize("kernel", [Alternating, WrongFirst])
def test_what_does_not_stay_or_is_wrong_is_no_tuning(kernel):
    finding = finding_of(kernel())
    assert finding.outcome == "broken"
    assert finding.evidence.startswith("rerun 1 of 2 on the same tensors: out[0, 0, ")
