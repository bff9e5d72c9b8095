"""Which cases of a test with `covering` run where nobody names workloads: a covering set of what each backend takes.

The set is of pairs of values or of values alone, as the marker says, and of one less where each case compiles: of values alone
or one case. Such a backend runs nothing forward alone that it reaches with gradients in the same file. One that compiles for
minutes runs what one of its kernels reaches. A backend of one's own that does not compile runs all small workloads, and of the
larger ones as few as reach the values that are left.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.compilers import seconds_to_compile
from pytest_attn.backends.library import once_in_a_run
from pytest_attn.backends.registry import try_libraries
from pytest_attn.reports.records import gathered
from pytest_attn.session.collection import absent_because, kernel_of, missing_because
from pytest_attn.session.devices import count_workers
from pytest_attn.session.kinds import (
    ATTENTION,
    PARAMETER,
    CaseParameter,
    asks_gradients,
    device_of,
    kind_of,
    made_items,
    marker_of,
    parameter_of,
    test_of,
)
from pytest_attn.session.manifest import left_in
from pytest_attn.session.options import Settings
from pytest_attn.session.selection import CPU_GROUPS
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.covering import ENOUGH, GROUP, Targets, covering, targets_of, values_of

#: seconds from which on a backend compiles one kernel for each test, and no more
_MINUTES = 60.0


@dataclass(eq=False)
class _Case:
    """A case that may be left out."""

    item: pytest.Item
    parameter: CaseParameter
    session: AttentionSession

    def __str__(self) -> str:
        others = [f"{name}={value}" for name, value in self._others.items()]
        return " ".join([self.parameter.workload.id, *others] if kind_of(self.item).has_workloads else others)

    @property
    def backend(self) -> Backend:
        """Whose case it is."""
        return self.session.kernels.backend_named(str(self.parameter.backend))

    @cached_property
    def values(self) -> frozenset[str]:
        """What it reaches: options and kernels, and the values of other parameters of its test."""
        return values_of(self.parameter.workload) | {f"{name}={value!r}" for name, value in self._others.items()}

    @property
    def _others(self) -> dict[str, object]:
        params: dict[str, object] = self.item.callspec.params  # type: ignore[attr-defined]
        return {name: value for name, value in params.items() if name != PARAMETER}

    @property
    def is_claimed(self) -> bool:
        """True where its backend declares that it takes the workload; what others ask for is known once they run."""
        gradients = asks_gradients(self.item)
        return not kind_of(self.item).has_workloads or self.backend.claims(self.parameter.workload, gradients)

    @cached_property
    def runs(self) -> bool:
        """True where nothing that is known stands in its way, as libraries say, which may take them a while."""
        marker = marker_of(self.item)
        with contextlib.suppress(Exception):  # what raises will raise when it runs, and the test says so then
            return made_items(self.item).obstacle(self.parameter, marker, self.session) is None
        return True


Cases = list[_Case]


def choose(config: pytest.Config, session: AttentionSession, items: list[pytest.Item]) -> None:
    """Take away what need not run, and count it.

    Who names workloads, tests by -k or -m, or one case, is understood: the choice is made of what these leave. Who names
    workloads gets no tests without any, and who names backends only those with these in their place.
    """
    settings = session.settings
    is_of_others = not session.kernels.are_tested or session.kernels.are_configurations or session.worker is not None
    if is_of_others or config.option.collectonly or "all" in settings.workloads:
        return
    wanted = left_in(config, items)
    unwanted = _not_meant(wanted, session.settings)
    session.collected.unchosen += len(unwanted)
    tests = _by_backend([item for item in wanted if item not in unwanted], session)
    unwanted |= _not_chosen(tests, session)
    items[:] = [item for item in items if item not in unwanted]
    if tests:
        from pytest_attn.backends.streams import leave_memory  # imports torch

        leave_memory(session.machines.device())  # in which libraries were asked


def _not_chosen(tests: Mapping[str, Sequence[Cases]], session: AttentionSession) -> set[pytest.Item]:
    """Return the cases outside of the covering sets, and count them. tests: by backend."""
    unwanted: set[pytest.Item] = set()
    try_libraries(list(map(session.kernels.backend_named, tests)))
    for name in _in_own_order(tests):
        question = f"covering set of {name} in {[case.item.nodeid for cases in tests[name] for case in cases]}"
        for cases, places in zip(tests[name], once_in_a_run(question, partial(_places, tests[name])), strict=True):
            unwanted.update(case.item for place, case in enumerate(cases) if place not in places)
            chosen, declared = [cases[place] for place in places], sum(case.is_claimed for case in cases)
            session.collected.chosen += (number := sum(case.is_claimed for case in chosen))
            session.collected.unchosen += declared - number
            session.collected.covering += (
                [f"{test_of(cases[0].item)}, {name}: {', '.join(map(str, chosen))}"] if number else []
            )
    return unwanted


def _by_backend(items: Iterable[pytest.Item], session: AttentionSession) -> dict[str, list[Cases]]:
    """Return the cases that may be left out, by backend and test; those of a backend that is missing are skipped otherwise."""
    unnamed = (item for item in items if not (session.settings.workloads and kind_of(item).has_workloads))
    asked = ((item, parameter) for item in unnamed if (parameter := parameter_of(item)) and parameter.backend)
    groups = gathered(
        ((test_of(item), str(parameter.backend)), _Case(item, parameter, session))
        for item, parameter in asked
        if _may_be_left_out(item, session)
    )
    return gathered((name, cases) for (_, name), cases in groups.items() if missing_because(session, cases[0].item) is None)


def _may_be_left_out(item: pytest.Item, session: AttentionSession) -> bool:
    if _strength_of(item) is None or absent_because(item, device_of(item), session):
        return False  # and on a CPU the suite leaves out most of what has no workloads by itself
    return kind_of(item).has_workloads or session.machines.device(device_of(item)).type != "cpu"


def _strength_of(item: pytest.Item) -> int | None:
    """Return what the marker of a test says of `covering`, None where it says nothing."""
    marker = marker_of(item)
    return marker.kwargs.get("covering") if marker else None


def _not_meant(items: Sequence[pytest.Item], settings: Settings) -> set[pytest.Item]:
    """Return items without workloads that say nothing of what is named, where other cases run.

    Of workloads that is any, of backends an item without one. Those that do not say `covering` are the user's own, and run.
    """
    others = [item for item in items if not kind_of(item).has_workloads and _strength_of(item) is not None]
    backends = {item: parameter.backend for item in items if (parameter := parameter_of(item))}
    if _is_any_named(settings.workloads) and any(kind_of(item) is ATTENTION for item in backends):
        return {*others}
    if _is_any_named(settings.backends) and any(backends.values()):
        return {item for item in others if backends.get(item, "") is None}
    return set()


def _is_any_named(tokens: Sequence[str]) -> bool:
    """Return whether an option names some: -NAME leaves one out of all, and all and available name none."""
    return any(not token.startswith("-") for token in tokens) and not {"all", "available"}.intersection(tokens)


def _in_own_order(names: Iterable[str]) -> list[str]:
    """Return the names of backends as one worker of xdist takes them, so that not all of them wait for the same library."""
    ordered = sorted(names)
    random.Random(os.environ.get("PYTEST_XDIST_WORKER", "")).shuffle(ordered)
    return ordered


def _places(tests: Sequence[Cases]) -> list[list[int]]:
    """Return which cases of each test of one backend are chosen."""
    found: list[list[int]] = [[] for _ in tests]
    with_gradients: dict[Path, Targets] = {}  # that a backend reaches which compiles, by file
    for number, cases in sorted(enumerate(tests), key=lambda test: not asks_gradients(test[1][0].item)):
        chosen, file = _chosen(cases, with_gradients.get(cases[0].item.path, frozenset())), cases[0].item.path
        if asks_gradients(cases[0].item) and cases[0].backend.is_slow:
            with_gradients[file] = frozenset().union(*(targets_of(case.values, 1) for case in chosen))
        found[number] = [cases.index(case) for case in chosen]
    return found


def _chosen(cases: Cases, with_gradients: Targets) -> Cases:
    """Return the covering set of one backend in one test; one case where all is reached, or nothing runs, which says why."""
    backend, strength = cases[0].backend, _strength_of(cases[0].item) or 0
    kept: Cases = []
    able = cases
    if backend.is_slow:
        strength, able = strength - 1, _of_one_kernel(cases, backend)
    elif not backend.is_contained:
        # of the groups that a CPU runs, or no one's but the test's
        small, catalog = (*CPU_GROUPS, GROUP, ""), cases[0].session.registrations.catalog
        strength, kept = 1, [case for case in cases if catalog.group_of(case.parameter.workload.name) in small]
    reached = with_gradients.union(*(targets_of(case.values, strength) for case in kept))
    values = {case: case.values for case in able if case not in kept}
    runs: Callable[[_Case], bool] = lambda case: case.runs  # noqa: E731
    kept += covering(values, strength, runs, lambda case: case.parameter.workload.flops(), reached)
    return kept or [next((case for case in able if case.runs), cases[0])]


def _of_one_kernel(cases: Cases, backend: Backend) -> Cases:
    """Return the cases of the kernel that reaches most, where one compiles for minutes; else all of them."""
    if seconds_to_compile(backend.name, backend.compiles) < _MINUTES:
        return cases
    kernels = gathered((kernel_of(backend, case.parameter.workload), case) for case in cases if case.is_claimed)
    return max(kernels.values(), key=lambda some: len(frozenset().union(*(case.values for case in some))), default=[])


# -- what a kernel is generated that declares nothing ------------------------------------------------------------------------


def enough_because(item: pytest.Item, parameter: CaseParameter, session: AttentionSession) -> str | None:
    """Say that a kernel which declares nothing has taken enough of one test, None where a case is to run.

    Each worker of xdist counts what it has run itself.
    """
    marker = marker_of(item)
    is_left = session.settings.workloads or (marker and marker.args)
    if is_left or session.registrations.catalog.group_of(parameter.workload.name) != GROUP:
        return None
    backend = session.kernels.backend_named(parameter.backend) if parameter.backend else None
    if backend is not None and backend.says_what_it_takes:
        return None
    taken = len(session.results.taken.get((test_of(item), parameter.backend or ""), ()))
    if taken < ENOUGH // count_workers():
        return None
    return f"{taken} workloads were taken already; --attn-workloads={GROUP} runs all that are generated"
