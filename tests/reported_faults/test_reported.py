"""Faults from reports of other projects are found by the default groups, and the kernel without them is right.

benchmarks/mutation.py runs all of them, and prints the share.
"""

import re

import pytest

from pytest_attn import check_invariants
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.workloads.catalog import builtin_catalog

from .judging import CHECK, INVARIANTS, Case, cases_of, check, find
from .kernel import KernelBackend
from .table import FAULTS

DEFAULT = [w for group in ("smoke", "edges", "features") for w in builtin_catalog().select(group)]
#: what no default run finds
MISSED_FOR = {"dsinks-rounded-before-the-sum": "moves the sum by less than the rounding of out does"}

LATE = ("group-of-first-call", "maximum-not-below-minus-200")


def test_faults_say_what_they_are():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 60
    assert not {mutant.name for mutant in MUTANTS} & set(names)
    for fault in FAULTS:
        assert re.match(r"[\w.-]+/[\w.-]+(#\d+$| \S)", fault.report), fault.report
        assert fault.what.endswith(".")


@pytest.mark.one_in(48)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(one, id=one.name, marks=[pytest.mark.slow("is shown by the last of all workloads")] * (one.name in LATE))
        for one in FAULTS
    ],
)
def test_a_fault_is_found_by_the_default_groups(fault):
    found = find(fault, list(cases_of(fault, DEFAULT)))
    assert found.by in (CHECK, INVARIANTS) or fault.name in MISSED_FOR, found


@pytest.mark.slow("makes many calls")
@pytest.mark.parametrize("twin", dict.fromkeys(fault.twin for fault in FAULTS), ids=lambda twin: twin.__name__)
def test_a_kernel_without_a_fault_is_right(twin):
    for w in builtin_catalog().select("smoke"):
        for backward in (False, True)[: 1 if w.has_no_gradient_because else 2]:
            check(twin(), Case(w, backward))
    check_invariants(KernelBackend(twin.__name__, twin()), "smoke-causal-gqa", backward=True, device="cpu")
