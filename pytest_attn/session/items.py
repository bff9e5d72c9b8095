"""The items of marked tests: what distinguishes the cases of one test, and what each is called."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_attn.session.kinds import PARAMETER
from pytest_attn.workloads.workload import Workload

#: what names of faulty kernels begin with, where a backend's is expected
MUTANT = "mutant:"
#: stands in the id of a fuzz item, and for its workload until one is drawn
PLACEHOLDER = Workload(1, name="fuzz")


#: what makes the case of an item of --attn-fuzz
_FUZZ_MAKER = "pytest_attn.cases.fuzz:make_fuzz_case"


@dataclass(frozen=True)
class CaseParameter:
    """What distinguishes the cases of one test: the workload, and the backend's name where the test takes one.

    ranks: how many processes compute it together; 0 in a test without ranks=. maker: what makes the case, where that is not
    what its kind says.
    """

    workload: Workload
    backend: str | None
    ranks: int = 0
    maker: str = ""


def fuzz_parameters(cases: Iterable[CaseParameter]) -> list[CaseParameter]:
    """Return the items that stand for all draws of a test with these cases: one, or one per backend."""
    backends = dict.fromkeys(case.backend for case in cases)
    return [CaseParameter(PLACEHOLDER, backend, maker=_FUZZ_MAKER) for backend in backends]


# -- from an item to its case --------------------------------------------------------------------------------------------


def is_case(item: pytest.Item) -> bool:
    """Whether an item is one of a marked test, be it that nothing of that was selected."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and PARAMETER in callspec.params


def parameter_of(item: pytest.Item) -> CaseParameter | None:
    """Return the case of an item; None where it has none, or only stands for a test without selected cases."""
    found: CaseParameter | None = item.callspec.params[PARAMETER] if is_case(item) else None  # type: ignore[attr-defined]
    return found


def is_unselected(item: pytest.Item) -> bool:
    """Whether the item only stands for a test without selected cases."""
    return is_case(item) and parameter_of(item) is None


# -- names ---------------------------------------------------------------------------------------------------------------


def case_id(case: CaseParameter) -> str:
    """Return the id of a case: workload, then ranks, then backend."""
    named = f"{case.workload.id}-ranks{case.ranks}" if case.ranks else case.workload.id
    return named if case.backend is None else f"{named}-{case.backend.removeprefix(MUTANT)}"


def workload_group(item: pytest.Item, parameter: CaseParameter) -> str:
    """Return the name of the group that the cases of one workload and test are in."""
    return f"{item.name.partition('[')[0]}-{parameter.workload.id}"  # "]" would end the group's name


def test_of(item: pytest.Item) -> str:
    """Return the test that an item is a case of."""
    return item.nodeid.partition("[")[0]


def id_from_root(item: pytest.Item) -> str:
    """Return the item's id from rootdir, without the group that xdist may have added."""
    return _id_under(item.nodeid.partition("::")[0], item)


def typed_name(item: pytest.Item) -> str:
    """Return a node id that can be typed from the invocation directory, or with --pyargs for an installed suite."""
    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    return _id_under(str(item.path) if path.startswith("..") else str(Path(path).as_posix()), item)


def name_for_processes(item: pytest.Item) -> str:
    """Return what names a test on the command line of a new process, from whatever folder that runs in."""
    module = item.getparent(pytest.Module)
    is_elsewhere = item.config.invocation_params.dir not in item.path.parents
    is_installed = bool(item.config.getoption("pyargs")) and is_elsewhere and module is not None
    return _id_under(module.obj.__name__ if is_installed and module else str(item.path), item)


def _id_under(path: str, item: pytest.Item) -> str:
    return "::".join([path, *(node.name for node in item.listchain() if isinstance(node, pytest.Class | pytest.Function))])
