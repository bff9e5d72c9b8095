"""Which cases of a large suite run where nobody names workloads: as few as reach every option and kernel of each backend.

That is for tests with the marker `attention_chosen`. A backend that is slow, as where it compiles for each workload, gets a
cover of its options and kernels, or as much of it as the marker's `compiled` cases reach; any other all small workloads, and
the larger ones that reach a kernel which those do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.session.collection import Items, missing_because
from pytest_attn.session.devices import untimed_because
from pytest_attn.session.kinds import MODEL, PARAMETER, CaseParameter, device_of, kind_of, marker_of, parameter_of, test_of
from pytest_attn.session.manifest import left_in
from pytest_attn.session.marks import ChosenMark
from pytest_attn.session.selection import CPU_GROUPS
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.traits import kernels_of, options_of
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

MARKER = "attention_chosen"


@dataclass(eq=False)
class _Case:
    """A case that may be left out. runs: whether nothing that is known stands in its way."""

    item: pytest.Item
    parameter: CaseParameter
    runs: bool

    @cached_property
    def mark(self) -> ChosenMark:
        """What its test says of how few cases are enough."""
        marker = self.item.get_closest_marker(MARKER)
        assert marker is not None
        return ChosenMark.from_marker(marker)

    @cached_property
    def reached(self) -> frozenset[str]:
        """What it reaches: options and kernels, and the values of other parameters of its test."""
        others = {f"{name}={value!r}" for name, value in self.item.callspec.params.items() if name != PARAMETER}  # type: ignore[attr-defined]
        return options_of(self.parameter.workload) | kernels_of(self.parameter.workload) | others


def choose(config: pytest.Config, session: AttentionSession, items: list[pytest.Item]) -> None:
    """Take away what need not run; note how many cases are chosen, and how many --attn-workloads=all adds.

    Who names workloads, tests by -k or -m, or one case, is understood: the choice is made of what these leave.
    """
    settings = session.settings
    if settings.workloads or settings.mutants or settings.tune or session.worker or config.option.collectonly:
        return
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in left_in(config, items):
        parameter = parameter_of(item)
        if parameter and parameter.backend and _may_be_left_out(item, session):
            groups.setdefault((test_of(item), parameter.backend), []).append(item)
    unwanted: set[pytest.Item] = set()
    for group in groups.values():
        if missing_because(session, group[0]):
            continue  # one of them is skipped, and says so
        known = [(item, parameter) for item in group if (parameter := parameter_of(item))]
        cases = [_Case(item, parameter, _runs(item, parameter, session)) for item, parameter in known]
        chosen = _chosen(cases, session)
        session.collected.chosen += sum(case.runs for case in chosen)
        session.collected.unchosen += sum(case.runs for case in cases) - sum(case.runs for case in chosen)
        session.collected.unchosen += _uncollected(cases, session)
        unwanted.update(case.item for case in cases if case not in chosen)
    items[:] = [item for item in items if item not in unwanted]
    if groups:
        _leave_memory(session.machines.device())


def _leave_memory(device: torch.device) -> None:
    """Leave to other workers the memory in which libraries were asked."""
    from pytest_attn.backends.streams import leave_memory  # imports torch

    leave_memory(device)


def _may_be_left_out(item: pytest.Item, session: AttentionSession) -> bool:
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return False
    device = session.machines.device(device_of(item))
    if kind_of(item) is MODEL and device.type == "cpu":
        return False  # the suite leaves out most of them there by itself
    return not ChosenMark.from_marker(marker).timed or untimed_because(session.settings.gpu_per_worker, device) is not None


def _runs(item: pytest.Item, parameter: CaseParameter, session: AttentionSession) -> bool:
    """Whether nothing that is known stands in the way of a case."""
    marker, made = marker_of(item), kind_of(item).made_items()
    assert isinstance(made, Items)
    assert marker is not None
    with contextlib.suppress(Exception):  # what raises will raise when it runs, and the test says so then
        return made.obstacle(parameter, marker, session) is None
    return True


def _chosen(cases: Sequence[_Case], session: AttentionSession) -> list[_Case]:
    """Choose of the cases that one backend has in one test."""
    if cases[0].mark.timed:
        return [_untimed(cases, session)]
    backend = _backend(cases[0], session)
    kept = [] if backend.is_slow else [case for case in cases if _is_small(case, session)]
    left = [case for case in cases if case.runs and case not in kept]
    missing = frozenset().union(*(case.reached for case in left)).difference(*(case.reached for case in kept))
    while missing:
        best = max(left, key=lambda case: (len(case.reached & missing), -case.parameter.workload.flops()))
        kept.append(best)
        missing -= best.reached
        if backend.is_slow and len(kept) == cases[0].mark.compiled:
            break
    return kept or list(cases[:1])  # a backend that takes nothing says why


def _untimed(cases: Sequence[_Case], session: AttentionSession) -> _Case:
    """Return one of cases whose times cannot be taken, which says so, before anything is compiled for its check.

    Other tests check what it would check.
    """
    case = next((case for case in cases if case.runs), cases[0])
    reason = untimed_because(session.settings.gpu_per_worker, session.machines.device(device_of(case.item)))
    if session.settings.latency != "require":
        case.item.add_marker(pytest.mark.skip(reason=f"not timed: {reason}"))
    return case


def _backend(case: _Case, session: AttentionSession) -> Backend:
    return session.kernels.backend_named(str(case.parameter.backend))


def _is_small(case: _Case, session: AttentionSession) -> bool:
    """Whether a workload is of the groups that a CPU runs, or no one's but the test's."""
    return session.registrations.catalog.group_of(case.parameter.workload.name) in (*CPU_GROUPS, "")


def _uncollected(cases: Sequence[_Case], session: AttentionSession) -> int:
    """Count the cases that `all` adds to those that were collected: the large ones on a CPU, long contexts on a GPU.

    By what their backend declares, as asking a library about a workload may take memory for all of its tensors.
    """
    marker = marker_of(cases[0].item)
    if marker is None or marker.args or kind_of(cases[0].item) is MODEL:
        return 0
    declared, backward = _backend(cases[0], session).capabilities, bool(marker.kwargs.get("backward"))
    known = {case.parameter.workload.name for case in cases}
    others: list[Workload] = [w for w in session.registrations.catalog.select("all") if w.name not in known]
    return sum(not (declared and declared.refusals(workload, backward)) for workload in others)
