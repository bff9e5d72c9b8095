"""Which cases of a large suite run where nobody names workloads: as few as reach every option and kernel of each backend.

That is for tests with the marker `attention_chosen`. A backend that is slow, as where it compiles for each workload, gets a
cover of its options and kernels, or as much of it as the marker's `compiled` cases reach, or what is compiled in three
minutes; any other all small workloads, and the larger ones that reach a kernel which those do not, or where the marker says
`compiled` a cover as well. Libraries, which may take seconds to answer, are asked about the cases of a cover alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.compilers import seconds_to_compile
from pytest_attn.backends.registry import try_libraries
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
#: seconds that a backend may compile for the cases of one test: on an H200, nvcc takes them for two modules of FlashInfer
_COMPILING = 180.0


@dataclass(eq=False)
class _Case:
    """A case that may be left out."""

    item: pytest.Item
    parameter: CaseParameter
    session: AttentionSession

    @cached_property
    def runs(self) -> bool:
        """Whether nothing that is known stands in its way, as libraries say, which may take them a while."""
        marker, made = marker_of(self.item), kind_of(self.item).made_items()
        assert isinstance(made, Items)
        assert marker is not None
        with contextlib.suppress(Exception):  # what raises will raise when it runs, and the test says so then
            return made.obstacle(self.parameter, marker, self.session) is None
        return True

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

    def compiled_for(self, backend: Backend) -> Hashable:
        """Return for what its backend compiles a kernel."""
        return backend.compiled_for(self.parameter.workload)


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
    # of a backend that is missing one case is skipped, and says so
    there = {key: group for key, group in groups.items() if missing_because(session, group[0]) is None}
    try_libraries([session.kernels.backend_named(name) for _, name in there])
    unwanted: set[pytest.Item] = set()
    for group in there.values():
        cases = [_Case(item, parameter, session) for item in group if (parameter := parameter_of(item))]
        chosen = _chosen(cases, session)
        left_out = [case for case in cases if case not in chosen]
        session.collected.chosen += len(_claimed(chosen, session))
        session.collected.unchosen += len(_claimed(left_out, session)) + _uncollected(cases, session)
        unwanted.update(case.item for case in left_out)
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


def _chosen(cases: Sequence[_Case], session: AttentionSession) -> list[_Case]:
    """Choose of the cases that one backend has in one test."""
    if cases[0].mark.timed:
        return [_untimed(cases, session)]
    backend = _backend(cases[0], session)
    is_few = backend.is_slow or cases[0].mark.compiled is not None
    kept = [] if is_few else [case for case in cases if _is_small(case, session)]
    left = [case for case in cases if case not in kept]
    seconds, compiled = seconds_to_compile(backend.name, backend.compiles), set[Hashable]()
    while not (backend.is_slow and len(kept) == cases[0].mark.compiled):
        best = _reaching_most(left, kept, backend)
        if best is None:
            break
        left.remove(best)
        if not best.runs:
            continue
        if (kernel := best.compiled_for(backend)) not in compiled and seconds * (len(compiled) + 1) > _COMPILING:
            session.collected.cut_short = sorted({*session.collected.cut_short, backend.name})
            left = [case for case in left if case.compiled_for(backend) in compiled]
            continue
        kept.append(best)
        compiled.add(kernel)
    return kept or list(cases[:1])  # a backend that takes nothing says why


def _reaching_most(cases: Sequence[_Case], kept: Sequence[_Case], backend: Backend) -> _Case | None:
    """Return the case that reaches most of what others do not, of the compiled kernel whose cases do; None where none does."""
    reached = frozenset().union(*(case.reached for case in kept))
    by_kernel: dict[Hashable, set[str]] = {}
    for case in cases:
        by_kernel.setdefault(case.compiled_for(backend), set()).update(case.reached - reached)

    def reaches(case: _Case) -> tuple[int, int, float]:
        of_kernel = by_kernel[case.compiled_for(backend)]
        return len(of_kernel), len(case.reached - reached), -case.parameter.workload.flops()

    best = max(cases, key=reaches, default=None)
    return best if best and best.reached - reached else None


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
    known = {case.parameter.workload.name for case in cases}
    others: list[Workload] = [w for w in session.registrations.catalog.select("all") if w.name not in known]
    return sum(_is_claimed(workload, cases[0], session) for workload in others)


def _claimed(cases: Sequence[_Case], session: AttentionSession) -> list[_Case]:
    """Return those of which their backend declares that it takes them."""
    return [case for case in cases if _is_claimed(case.parameter.workload, case, session)]


def _is_claimed(workload: Workload, case: _Case, session: AttentionSession) -> bool:
    marker, declared = marker_of(case.item), _backend(case, session).capabilities
    backward = marker is not None and bool(marker.kwargs.get("backward"))
    return not (declared and kind_of(case.item) is not MODEL and declared.refusals(workload, backward))
