"""The items that stand for all draws of a test: one, or one for each of its backends."""

from collections.abc import Collection, Iterator, Sequence

from pytest_attn.session.kinds import CaseParameter
from pytest_attn.workloads.workload import Workload

#: stands in the id of an item, and for its workload until one is drawn
_PLACEHOLDER = Workload(1, name="fuzz")
_CASE = "pytest_attn.guests.fuzz.fuzz_case"


def fuzz_cases(cases: Sequence[CaseParameter], names: Collection[str]) -> Iterator[CaseParameter]:
    """Yield them for the cases of a test, whose fixtures have these names."""
    for backend in dict.fromkeys(case.backend for case in cases) if "attn" in names else ():
        yield CaseParameter(_PLACEHOLDER, backend, maker=f"{_CASE}:make_fuzz_case", caller=f"{_CASE}:run_fuzz")
