"""The kinds of tests: the marker of each, the fixture with which it judges, and who makes its items and its case.

A new kind is one file and one line, `register(Kind(...))`, in a plugin or in the conftest of rootdir. Loads nothing, as every
run of pytest reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_attn.seam import Kind, added, guests

if TYPE_CHECKING:
    from pytest_attn.workloads.workload import Workload

#: the fixture through which an item gets its `CaseParameter`
PARAMETER = "_attn_parameter"


@dataclass(frozen=True)
class CaseParameter:
    """One case of a test."""

    workload: Workload
    backend: str | None  # its name, where the test takes one
    maker: str = ""  # what makes the case, where that is not what its kind says
    shown: str = ""  # its backend in the id, where that is not its name
    caller: str = ""  # what calls its test, a function of the item, where pytest does not

    @property
    def label(self) -> str:
        """The case in its id, without the backend."""
        return self.workload.id


class SelectedCase(NamedTuple):
    """One case that a run selected. test: the id of its item. backend, device: None where none is named."""

    test: str
    workload: Workload
    backend: str | None
    backward: bool
    device: str | None


#: the kind of a test that asks for no other
ATTENTION = Kind(
    marker="attention",
    maker="pytest_attn.cases.case:make_case",
    must_call="attn.check, check_invariants, measure or assert_close",
    fixture="attn",
    takes=("attn", "attn_backend", "attn_workload", "attn_device", "qkv", "attn_reference", "assert_attention_close"),
    items="pytest_attn.session.collection:KernelItems",
    example='for example @pytest.mark.attention(Workload(200, heads=2, mask="causal"))',
)
#: by their markers
KINDS = {ATTENTION.marker: ATTENTION}


def register(kind: Kind) -> None:
    """Add a kind. Raises ValueError for a marker or a fixture that another one has."""
    if kind.marker in KINDS or kind.fixture in fixtures():
        raise ValueError(f"{kind.marker} or {kind.fixture} is registered already")
    KINDS[kind.marker] = kind


def fixtures() -> frozenset[str]:
    """Return the names of the plugin's fixtures: a test that takes one of them is a test of attention kernels."""
    return frozenset(name for kind in KINDS.values() for name in kind.takes)


def taker_of_fixtures(item: pytest.Item) -> str | None:
    """Return the name of a fixture that is none of the plugin's, and asks for one of these; None where there is none."""
    own = {*fixtures(), PARAMETER}
    definitions: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for name, found in definitions.items():
        if name not in own and any(own.intersection(one.argnames) for one in found):
            return name
    return None


def register_kinds_of_guests() -> None:
    """Register the kinds that guests add."""
    for kind in (one for guest in guests() for one in guest.kinds):
        if KINDS.get(kind.marker) is not kind:
            register(kind)


def kind_of(item: pytest.Item) -> Kind:
    """Return the kind of a test: its marker's, or that of the fixture that it takes."""
    for kind in KINDS.values():
        if kind is ATTENTION:
            continue
        if item.get_closest_marker(kind.marker) or kind.fixture in getattr(item, "fixturenames", ()):
            return kind
    return ATTENTION


def is_marked(item: pytest.Item) -> bool:
    """Return whether a test has the marker of a kind."""
    return any(mark.name in KINDS for mark in item.iter_markers())


def marker_of(item: pytest.Item) -> pytest.Mark | None:
    """Return the marker of a test's kind, None where it has none."""
    return item.get_closest_marker(kind_of(item).marker)


def made_items(item: pytest.Item) -> Any:
    """Return what makes the items of a test: what its kind says, or a guest of an argument that its marker gives."""
    kind, marker = kind_of(item), marker_of(item)
    given = marker.kwargs if marker and kind is ATTENTION else ()
    name = next((items for argument, items in added("items").items() if argument in given), kind.items)
    return resolve_name(name)(kind)


def device_of(item: pytest.Item) -> str | None:
    """Return the device that the marker of a test names, None where it names none."""
    marker = marker_of(item)
    return marker.kwargs.get("device") if marker else None


def asks_gradients(item: pytest.Item) -> bool:
    """Return whether the marker of a test says backward=True, or names gradients."""
    marker = marker_of(item)
    return marker is not None and bool(marker.kwargs.get("backward"))


# -- from an item to its case --------------------------------------------------------------------------------------------


def is_case(item: object) -> bool:
    """Return whether an item is one of a marked test, be it that nothing of that was selected."""
    return PARAMETER in getattr(getattr(item, "callspec", None), "params", ())


def has_test_of_attention(items: Iterable[pytest.Item]) -> bool:
    """Return whether one of the items is a case, or has one of the plugin's markers."""
    own, seen = {*KINDS, "attention_requires"}, {node for item in items for node in item.listchain()}
    return any(map(is_case, seen)) or any(mark.name in own for node in seen for mark in node.own_markers)


def parameter_of(item: pytest.Item) -> CaseParameter | None:
    """Return the case of an item; None where it has none, or only stands for a test without selected cases."""
    found: CaseParameter | None = item.callspec.params[PARAMETER] if is_case(item) else None  # type: ignore[attr-defined]
    return found


def selected_cases(items: Iterable[pytest.Item]) -> list[SelectedCase]:
    """Return the cases among items, in their order."""
    found = ((item, case) for item in items if (case := parameter_of(item)))
    return [
        SelectedCase(item.nodeid, case.workload, case.backend, asks_gradients(item), device_of(item)) for item, case in found
    ]


# -- names ---------------------------------------------------------------------------------------------------------------


def case_id(case: CaseParameter) -> str:
    """Return the id of a case: workload, then what a guest adds, then backend."""
    return case.label if case.backend is None else f"{case.label}-{case.shown or case.backend}"


def test_of(item: pytest.Item) -> str:
    """Return the test that an item is a case of."""
    return item.nodeid.partition("[")[0]


def id_from_root(item: pytest.Item) -> str:
    """Return the item's id from rootdir in one printable line, without the group that xdist may have added."""
    from pytest_attn.workloads.functions import printable  # not at each start of pytest

    return printable(_id_under(item.nodeid.partition("::")[0], item), 0)


def typed_name(item: pytest.Item) -> str:
    """Return a node id that can be typed from the invocation directory, or with --pyargs for an installed suite."""
    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    typed = _id_under(str(item.path) if path.startswith("..") else str(Path(path).as_posix()), item)
    return without_repetition(typed, item)


def without_repetition(name: str, item: pytest.Item) -> str:
    """Return the id of an item as it is without pytest-repeat's --count, which adds the number of the repetition."""
    is_by_option = item.get_closest_marker("repeat") is None
    is_repeated = is_case(item) and "__pytest_repeat_step_number" in item.callspec.params  # type: ignore[attr-defined]
    return re.sub(r"-\d+-\d+\]$", "]", name) if is_repeated and is_by_option else name


def name_for_processes(item: pytest.Item) -> str:
    """Return what names a test on the command line of a new process, from whatever folder that runs in."""
    module = item.getparent(pytest.Module)
    is_elsewhere = item.config.invocation_params.dir not in item.path.parents
    is_installed = bool(item.config.getoption("pyargs")) and is_elsewhere and module is not None
    return _id_under(module.obj.__name__ if is_installed and module else str(item.path), item)


def _id_under(path: str, item: pytest.Item) -> str:
    return "::".join([path, *(node.name for node in item.listchain() if isinstance(node, pytest.Class | pytest.Function))])
