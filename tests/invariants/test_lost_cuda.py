"""A kernel that ends the process's CUDA context: the first cause is named, and what was not asked is not broken."""

import pytest
import torch
from judging import asked

from pytest_attn import Backend, Workload
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.call import refusals
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.libraries.flash_attention import Flash3
from pytest_attn.guests.mutants.kernel import HONEST_NAME, Kernel, KernelBackend
from pytest_attn.invariants import all_invariants
from pytest_attn.invariants.all_invariants import INVARIANTS
from pytest_attn.invariants.report import describe_invariants as describe

PLAIN = Workload(70, 80, heads=2, head_dim=32)
SPEC = CheckSpec(PLAIN, torch.device("cpu"), backward=True)
SAID = "CUDA error: an illegal instruction was encountered"
ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call.\nFor debugging consider ..."


class Ends(Kernel):
    """Ends a made-up context at the first tensor whose rows are no multiple of its heads; nothing works any more then."""

    is_lost = False

    def receive(self, q, k, v):
        if Ends.is_lost or not v.is_contiguous():
            Ends.is_lost = True
            raise RuntimeError(SAID + ADVICE)
        return q, k, v


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(Ends, "is_lost", False)
    monkeypatch.setattr(all_invariants, "lost_because", lambda device: SAID if Ends.is_lost else None)
    return KernelBackend(HONEST_NAME, Ends())


def test_only_the_invariant_that_lost_it_is_broken_and_names_the_arrangement(ends):
    report = asked(ends, SPEC)
    (broken,) = report.broken
    assert broken.invariant == "layout"
    said = f"the kernel raised RuntimeError: {SAID}"
    assert broken.evidence == f"k a slice of a wider tensor, q, v and dout with heads and rows swapped in memory: {said}"
    names = [finding.invariant for finding in report.findings]
    after = report.findings[names.index("layout") + 1 :]
    assert len(after) > 5
    for finding in after:
        assert (finding.outcome, finding.calls) == ("not applicable", 0)
        assert finding.evidence == f"not run: CUDA has failed in this process since layout was ({SAID})"
    assert len(describe(report).splitlines()) == 2


def test_an_exception_of_a_kernel_that_leaves_cuda_there_ends_nothing(monkeypatch):
    class Raises(Kernel):
        def receive(self, q, k, v):
            if not v.is_contiguous():
                raise ZeroDivisionError("of strides")
            return q, k, v

    report = asked(KernelBackend(HONEST_NAME, Raises()), SPEC)
    assert [(f.invariant, f.evidence.split(": ", 1)[1]) for f in report.broken if f.invariant == "layout"] == [
        ("layout", "the kernel raised ZeroDivisionError: of strides")
    ]
    assert [f for f in report.findings if f.evidence.startswith("not run")] == []


def test_a_device_without_cuda_cannot_lose_it():
    assert all_invariants.lost_because(torch.device("cpu")) is None


def test_cuda_says_why_it_is_lost(monkeypatch):
    def synchronize(device):
        raise RuntimeError(SAID + ADVICE)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert all_invariants.lost_because(torch.device("cuda", 0)) == SAID


def test_what_is_known_to_end_cuda_is_not_asked(ends):
    ends.known_defects = (
        KnownDefect("someone#1", "strides end it", lambda *_: True, (), invariants=("layout",), ends_cuda=True),
    )
    report = asked(ends, SPEC, only="layout")
    (finding,) = report.findings
    assert (finding.outcome, finding.evidence, finding.calls) == ("not applicable", "someone#1: strides end it", 0)


def test_layouts_that_no_model_passes_are_asked_last_and_only_thoroughly():
    assert INVARIANTS[-1].name == "alignment"
    assert INVARIANTS[-1].thorough
    (defect,) = Flash3.known_defects
    assert (defect.invariants, defect.ends_cuda) == (("alignment",), True)
    assert issubclass(Flash3, Backend)


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("CUDA error: an illegal instruction was encountered", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("HIP error: an illegal memory access was encountered", True),
        ("CUDA error: invalid argument", False),
        ("CUDA error: invalid configuration argument", False),
        ("k must be contiguous", False),
    ],
)
def test_what_a_launch_refuses_is_a_refusal_and_what_ends_a_context_is_none(said, ends):
    with pytest.raises(RuntimeError if ends else RefusedError), refusals():
        raise RuntimeError(said)
