"""Kernels that take little get enough cases by default, and faults of the kinds that were missed are found by these."""

from types import SimpleNamespace

import pytest
from planted_faults import judgment_of

from pytest_attn.correctness.comparison import Hint
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.diagnosis.faults import is_known
from pytest_attn.workloads.covering import ENOUGH, for_any_kernel

from .judging import CPU, Case, check, fails
from .judging import check_invariants as invariants
from .kernel import Attention
from .narrow import Narrow, NarrowBackend, asked, is_decoding, only
from .narrow_reports import NARROW
from .table import FAULTS

#: what no single result shows
OF_INVARIANTS = ("poison", "magnitude")

LITTLE = {
    "a bias": only("bias", where=lambda w: w.bias is not None),
    "decoding over pages": only("padded", "paged", where=lambda w: is_decoding(w) and bool(w.kv_pages)),
    "head_dim 512": only("causal", where=lambda w: w.head_dim == w.v_head_dim == 512),
    "causal prefill": only("causal", where=lambda w: w.mask is not None and w.q_len == w.kv_len),
    "sinks with a window": only("sinks", "window", where=lambda w: bool(w.sinks) and w.mask is not None),
}


@pytest.mark.parametrize("declares", [True, False], ids=["declared", "declining"])
@pytest.mark.parametrize("little", LITTLE)
def test_a_kernel_that_takes_little_has_enough_cases(little, declares):
    found = asked(Narrow(LITTLE[little], Attention), declares)
    assert len(found) >= 5
    assert not declares or len(found) <= ENOUGH
    assert all(map(LITTLE[little], found))


def test_no_report_is_behind_another_fault():
    reports = {narrow.report for narrow in NARROW.values()} - {""}
    assert len(reports) >= 60
    assert not reports & {fault.report for fault in FAULTS}
    assert all(map(is_known, {cause for narrow in NARROW.values() for cause in narrow.causes} - set(OF_INVARIANTS)))


@pytest.mark.one_in(48)
@pytest.mark.parametrize("declares", [True, False], ids=["declared", "declining"])
@pytest.mark.parametrize("name", NARROW)
def test_a_fault_of_a_kernel_that_takes_little_is_found(name, declares):
    narrow = NARROW[name]
    if declares and name == "DropoutThatRowsShare":
        pytest.skip("a backend cannot say what it dropped; a callable can")
    kernel, cases = narrow.kernel(), asked(narrow, declares)
    assert len(cases) >= 5 or not declares
    asks = [(ask, Case(w, narrow.backward)) for ask in (check, invariants) for w in cases]
    assert any(fails(ask, kernel, case) for ask, case in asks)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", [name for name, one in NARROW.items() if set(one.causes) - set(OF_INVARIANTS)])
def test_the_cause_of_a_fault_is_named(name):
    narrow = NARROW[name]
    backend, cases = NarrowBackend(name, narrow), asked(narrow, declares=True)
    mismatches = (mismatch_of(backend, CheckSpec(w, CPU, narrow.backward)) for w in cases)
    first = next(mismatch for mismatch in mismatches if mismatch)
    assert judgment_of(first.hints, narrow.causes) == "named"


def mismatch_of(backend, spec):
    try:
        return diagnose(judge(backend, spec, ReferenceCache())).mismatch
    except ContractError as error:
        return SimpleNamespace(hints=[Hint(error.fault, str(error))])


@pytest.mark.slow("judges a kernel on all that is generated")
@pytest.mark.parametrize("backward", [False, True])
def test_a_kernel_without_a_fault_is_right_on_all_that_is_generated(backward):
    kernel = Attention()
    for w in for_any_kernel():
        if not (backward and w.has_no_gradient_because):
            check(kernel, Case(w, backward))
