"""Kernels that take little get enough cases by default, and faults of the kinds that were missed are found by these."""

import pytest

from pytest_attn.workloads.covering import ENOUGH, for_any_kernel

from .judging import Case, check, fails
from .judging import check_invariants as invariants
from .kernel import Attention
from .narrow import Narrow, asked, is_decoding, only
from .narrow_reports import NARROW

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


@pytest.mark.one_in(6)
@pytest.mark.parametrize("declares", [True, False], ids=["declared", "declining"])
@pytest.mark.parametrize("name", NARROW)
def test_a_fault_of_a_kernel_that_takes_little_is_found(name, declares):
    narrow = NARROW[name]
    if declares and name == "DropoutThatRowsShare":
        pytest.skip("a backend cannot say what it dropped; a callable can")
    kernel, cases = narrow.kernel(), asked(narrow, declares)
    assert len(cases) >= 5
    asks = [(ask, Case(w, narrow.backward)) for ask in (check, invariants) for w in cases]
    found = next((f"{ask.__name__} on {case.workload.id}" for ask, case in asks if fails(ask, kernel, case)), "")
    print(name, len(cases), found)
    assert found


@pytest.mark.slow("judges a kernel on all that is generated")
@pytest.mark.parametrize("backward", [False, True])
def test_a_kernel_without_a_fault_is_right_on_all_that_is_generated(backward):
    kernel = Attention()
    for w in for_any_kernel():
        if not (backward and w.has_no_gradient_because):
            check(kernel, Case(w, backward))
