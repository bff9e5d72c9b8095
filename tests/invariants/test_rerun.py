"""Kernels that tune themselves are no race, a race is no tuning, and what other streams make is waited for."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes.streams import watched_streams
from honest.variants import TunesItself
from judging import asked, attention, needs_cuda

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.mutants.kernel import Kernel, KernelBackend
from pytest_attn.invariants import rerun
from pytest_attn.invariants.invariant import OwnDefectError, Probe, difference, first_difference
from pytest_attn.workloads.inputs import draw_inputs

SPEC = CheckSpec(Workload(70, 80, heads=2, head_dim=32), torch.device("cpu"), backward=True)


class Tuned(TunesItself):
    """Tells an autotuner of its tiles."""

    def __init__(self, autotuner=None):
        super().__init__()
        self.autotuner = autotuner

    def forward(self, call):
        results = super().forward(call)
        if self.autotuner:
            self.autotuner.best_config = f"BLOCK_N: {self.key_tile}"
        return results


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
    assert finding.evidence.startswith("rerun 1 of 1 on the same tensors: out[0, 0, ")


LAYOUTS = {"bhsd": attention, "bshd": lambda q, k, v: attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)}


def probe_of(layout):
    spec = CheckSpec(Workload(70, 80, heads=2, head_dim=32), torch.device("cpu"), True, declared=Declaration(layout=layout))
    return Probe(spec.subject(Registry(), LAYOUTS[layout]), spec, draw_inputs(spec.workload, "structured", 0, spec.device))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("called", [rerun._behind_late_inputs, rerun.beside_other_work])
def test_what_a_side_stream_made_is_read_when_it_has_been_waited_for(layout, called, monkeypatch):
    monkeypatch.setattr(rerun, "_WIDTH", 8)  # a CPU without bfloat16 takes minutes
    probe = probe_of(layout)
    tensors, base = probe.handed(), probe.base
    with watched_streams(monkeypatch) as races:
        assert first_difference(called(probe, tensors), base) == ""
    assert races == []


def test_what_is_read_too_early_is_seen(monkeypatch):
    with watched_streams(monkeypatch) as races:
        with torch.cuda.stream(torch.cuda.Stream()):
            made = torch.ones(3)
        made + 1
    assert races == ["aten.add.Tensor of what another stream made"]


def test_one_function_alone_goes_to_another_stream_and_back():
    files = Path(pytest_attn.__file__).parent.rglob("*.py")
    assert [path.name for path in files if ".wait_stream(here)" in (text := path.read_text()) or "cuda.stream(s" in text] == [
        "streams.py"
    ]


@needs_cuda
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_side_stream_that_is_late_is_no_fault_of_the_kernel(layout, monkeypatch):
    synchronize = torch.cuda.synchronize

    def and_then_sleep(device=None):
        synchronize(device)
        torch.cuda._sleep(200_000_000)  # about 0.1 s, before what is launched next on this stream

    monkeypatch.setattr(torch.cuda, "synchronize", and_then_sleep)
    spec = CheckSpec(Workload(512, heads=4), torch.device("cuda", 0), True, declared=Declaration(layout=layout))
    assert asked(LAYOUTS[layout], spec, only="rerun").passed


def test_two_equal_values_that_differ_are_a_defect_of_ours(monkeypatch):
    class Moving:
        """Whose elements are others each time."""

        def __init__(self, *values):
            self.values = list(values)

        def __ne__(self, other):
            return self.values.pop(0) != other

        def __getitem__(self, where):
            return self.values[0][where]

        def isnan(self):
            return self.values[0].isnan()

    now, was = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    with pytest.raises(OwnDefectError, match=r"out while it still changed .1 of 2 elements differ.* please report it"):
        difference("out", Moving(now, was), was)
    monkeypatch.setattr(rerun, "first_difference", lambda *_: difference("out", Moving(now, was), was))
    with pytest.raises(OwnDefectError):
        finding_of(Kernel())


@pytest.mark.parametrize(
    ("dtype", "one", "other", "text"),
    [
        ("float32", 1.0, 1 + 2**-23, "out[0] = 1.00000012, was 1 "),
        ("float64", 1.0, 1 + 2**-52, "out[0] = 1.0000000000000002, was 1 "),
        ("bfloat16", 1.0, 1 + 2**-7, "out[0] = 1.00781, was 1 "),
        ("float32", 1e30, 1.0000001e30, "out[0] = 1.00000009e+30, was 1.00000002e+30 "),
        ("float32", 1.0, float("nan"), "out[0] = nan, was 1 "),
        ("float32", 0.0, -0.0, ""),
        ("float32", float("nan"), float("nan"), ""),
    ],
)
def test_values_that_differ_are_printed_so(dtype, one, other, text):
    was, now = (torch.tensor([x], dtype=getattr(torch, dtype)) for x in (one, other))
    assert difference("out", now, was) == text + "(1 of 1 elements differ)" * bool(text)


@pytest.mark.parametrize(
    ("buffers", "words"), [(1, "in its one buffer"), (2, "in a ring of 2"), (12, "in a ring of 12 buffers")]
)
def test_a_ring_of_output_buffers_is_told_as_that(buffers, words):
    rings = {}

    def kernel(q, k, v):
        ring = rings.setdefault(q.shape, [])
        ring.append(torch.empty_like(q) if len(ring) < buffers else ring.pop(0))
        return ring[-1].copy_(attention(q, k, v))

    with pytest.raises(AssertionError, match=f"an earlier result has changed .* writes each out {words}"):
        pytest_attn.check_invariants(kernel, Workload(64, heads=2, head_dim=32, dtype="float32"), device="cpu")
