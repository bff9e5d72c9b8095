"""Whose kernels a run tests: those of the user's tests and the selected backends, unless an option says otherwise.

`AttentionSession.kernels` chooses one of three: SelectedKernels, Mutants, Configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.configured import joined, split
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current
from pytest_attn.backends.subject import Subject
from pytest_attn.session.devices import Machines
from pytest_attn.session.kinds import CaseParameter
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.options import Settings
from pytest_attn.session.progress import Progress
from pytest_attn.session.registrations import Registrations
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from pytest_attn.correctness.spec import CheckSpec

#: groups that a test without named workloads runs: on a CPU the small ones, on a GPU all but those on request
CPU_GROUPS = ("smoke", "edges", "features")


#: what `attn.check` takes
Target = Callable[..., Any] | Backend | str


class SelectedKernels:
    """The kernels that tests hand over, and the selected backends where a test takes one."""

    #: why nothing is timed, None where it is
    untimed_because: str | None = None
    #: whether the kernels are those that the tests name, whose failures are kept and whose launches are asserted
    are_tested = True

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
        self.settings, self.registrations, self.machines = settings, registrations, machines

    def cases(self, mark: AttentionMark, takes_backend: bool) -> list[CaseParameter]:
        """Return the cases of one marker: workloads times dtypes, times backends where the test takes one.

        Raises ValueError for a marker whose layout is not that of its workloads.
        """
        workloads = self._workloads(mark)
        for workload in workloads:
            if reason := mark.declared.unfit_for(workload):
                raise ValueError(reason)
        backends = self.backends(mark) if takes_backend else [None]
        return [CaseParameter(workload, backend) for workload in workloads for backend in backends]

    def backends(self, mark: AttentionMark) -> list[str] | list[None]:
        """Return the backends of a marker that are selected; where nobody selected any, all of them.

        A test with ranks takes those that compute over ranks, any other test takes the others. A configuration that the
        marker names is selected with its backend.
        """
        named = mark.backends or ()
        are_chosen = "backends" in self.settings.given  # then markers only narrow
        selected = list(named) if named and not are_chosen else self._selected_backends(mark.device)
        if mark.backends is not None:
            narrowed = [name for name in selected if name in named or split(name)[0] in named]
            selected = list(dict.fromkeys([*narrowed, *(name for name in named if split(name)[0] in selected)]))
        over_ranks = self.registrations.registry.computes_over_ranks
        return [name for name in selected if over_ranks(name) == bool(mark.ranks)]

    def backend_named(self, name: str) -> Backend:
        """Return the backend of a case."""
        return self.registrations.registry[name]

    def in_place_of(self, backend: Backend, spec: CheckSpec) -> Subject | None:
        """Return what is tested in place of what a test with a backend of its case hands over; None for that itself."""
        return None

    def skipped_because(self, test: str, name: str) -> str | None:
        """Say why a case need not run any more, None where it must."""
        return None

    def settle(self, item: pytest.Item, report: pytest.TestReport, progress: Progress) -> None:
        """Turn the report of a case into what it means in this run."""

    # -- what the options leave of what markers name -------------------------------------------------------------------

    def _workloads(self, mark: AttentionMark) -> list[Workload]:
        """Return the workloads of a marker, or of the run where it names none, in each selected dtype."""
        selected, wanted = self._selected_workloads(), self.settings.dtypes
        workloads = list(mark.workloads or self._default_workloads(mark, selected))
        if selected is not None:
            workloads = [w for w in workloads if w.name in selected]
        if mark.dtypes or wanted:
            dtypes = [d for d in mark.dtypes if not wanted or d in wanted] if mark.dtypes else list(wanted)
            workloads = [w.replace(dtype=dtype) for w in workloads for dtype in dtypes]
        return list(dict.fromkeys(workloads))

    def _default_workloads(self, mark: AttentionMark, selected: Collection[str] | None) -> list[Workload]:
        """Return the workloads of a marker that names none: all of which some are selected, else those of the device."""
        catalog = self.registrations.catalog
        if selected is not None:
            return catalog.select("all")
        is_cpu = self.machines.device(mark.device).type == "cpu"
        return [w for group in CPU_GROUPS for w in catalog.select(group)] if is_cpu else catalog.default

    def _selected_backends(self, device: str | None) -> list[str]:
        """Return the selected backends; asks the machine only where "available" is part of the selection."""
        registry = self.registrations.registry
        tokens = tuple(
            f"-{registry.canonical(token[1:])}" if token.startswith("-") else registry.canonical(token)
            for token in self.settings.backends
        )
        needs_machine = "available" in tokens or all(token.startswith("-") for token in tokens)
        available = self._available(device) if needs_machine else []
        chosen = _chosen(tuple(t for t in tokens if t != "available"), registry.names, available)
        if "available" in tokens:
            chosen = list(dict.fromkeys([*(n for n in available if f"-{n}" not in tokens), *chosen]))
        return chosen

    def _available(self, device: str | None) -> list[str]:
        registry, machine = self.registrations.registry, self.machines.machine(device)
        return [name for name in registry.names if registry[name].unavailable_because(machine) is None]

    def _selected_workloads(self) -> set[str] | None:
        """Return the names that --attn-workloads selects, None where it was not given."""
        tokens, catalog = self.settings.workloads, self.registrations.catalog
        if not tokens:
            return None
        everything = [w.name for w in catalog.select("all") if w.name]
        expanded = tuple(
            ("-" if token.startswith("-") else "") + str(w.name)
            for token in tokens
            for w in catalog.select(token.removeprefix("-"))
        )
        return set(_chosen(expanded, everything, [w.name for w in catalog.default if w.name]))


def _chosen(tokens: tuple[str, ...], everything: list[str], default: list[str]) -> list[str]:
    """Apply a selection to names: plain tokens choose, -NAME leaves out; only exclusions start from `default`."""
    positive = [token for token in tokens if not token.startswith("-")]
    excluded = {token[1:] for token in tokens if token.startswith("-")}
    chosen = list(dict.fromkeys(positive)) if positive else default
    chosen = [name for token in chosen for name in (everything if token == "all" else [token])]
    return [name for name in dict.fromkeys(chosen) if name not in excluded]


class Configurations(SelectedKernels):
    """The backend of --attn-tune, as it is and under each of its configurations."""

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
        super().__init__(settings, registrations, machines)
        self._name = registrations.registry.canonical(settings.tune or "")

    def cases(self, mark: AttentionMark, takes_backend: bool) -> list[CaseParameter]:
        plain = super().cases(mark, takes_backend=False)
        if not takes_backend:
            return plain
        found = [CaseParameter(one.workload, name) for one in plain for name in self._tuned(mark, one.workload)]
        return [case for case in found if mark.backends is None or split(case.backend or "")[0] in mark.backends]

    def _tuned(self, mark: AttentionMark, workload: Workload) -> list[str]:
        """Return the backend, then its configurations for a workload; it alone where it cannot take that.

        Raises ValueError, with its words, where the backend cannot say which configurations it has.
        """
        registry, name, machine = self.registrations.registry, self._name, self.machines.machine(mark.device)
        try:
            if registry[name].obstacle(workload, machine, mark.backward):
                return [name]  # the case is skipped with its reason
            with quiet(), current(machine.device):
                options = registry[name.partition("+")[0]].configurations(workload, machine, mark.backward)
            return list(dict.fromkeys([name, *(joined(name, one) for one in options)]))
        except Exception as error:
            raise ValueError(
                f"--attn-tune={name}: no configurations for {workload.id}: {type(error).__name__}: {error}"
            ) from error
