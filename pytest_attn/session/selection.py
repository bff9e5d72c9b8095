"""Whose kernels a run tests: those of the user's tests and the selected backends, unless an option says otherwise.

`AttentionSession.kernels` chooses one of three: SelectedKernels, Mutants, Configurations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.configured import joined, split
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current
from pytest_attn.backends.subject import Subject
from pytest_attn.reports.records import changed, new_record
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.devices import Machines
from pytest_attn.session.kinds import MUTANT, CaseParameter, id_from_root, parameter_of, test_of
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


class Mutants(SelectedKernels):
    """The faulty kernels of one run, and what happened to them. Each keeps its state from case to case, as a real one does."""

    untimed_because = "--attn-mutants"
    are_tested = False

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
        from pytest_attn.guests.mutants import MUTANTS  # few runs ask for them, and they import torch
        from pytest_attn.guests.mutants.kernel import HONEST_NAME, honest_backend
        from pytest_attn.session.survivors import Search

        super().__init__(settings, registrations, machines)
        self._mutants = {MUTANT + mutant.name: mutant for mutant in MUTANTS}
        self._honest_name = MUTANT + HONEST_NAME
        self._made: dict[str, Backend] = {self._honest_name: honest_backend()}
        self._search = Search(settings.diagnosis_timeout, registrations.catalog, settings.memory)
        self._killed: dict[str, set[str]] = {}  # by name, the tests that have found it
        self._asked: dict[str, CheckSpec] = {}  # by name, the spec of its last judgment
        self._left: Counter[str] = Counter()  # by name, how many cases are still to come

    def cases(self, mark: AttentionMark, takes_backend: bool) -> list[CaseParameter]:
        """Return a case for each kernel whose faulty step a workload of the marker reaches."""
        workloads = dict.fromkeys(case.workload for case in super().cases(mark, takes_backend=False))
        return [CaseParameter(workload, name) for workload in workloads for name in self._reached(workload, mark.backward)]

    def _reached(self, workload: Workload, backward: bool) -> list[str]:
        """Return the fault-free kernel, which a test must let pass, and the mutants whose faulty step the workload reaches."""
        reached = [name for name, mutant in self._mutants.items() if mutant.is_reached_by(workload, backward)]
        return [self._honest_name, *reached] if reached else []

    def backend_named(self, name: str) -> Backend:
        if name not in self._made:
            self._made[name] = self._mutants[name].backend()
        return self._made[name]

    def in_place_of(self, backend: Backend, spec: CheckSpec) -> Subject | None:
        self._asked[MUTANT + backend.name] = spec
        return backend

    def skipped_because(self, test: str, name: str) -> str | None:
        """Say that the same test has killed a mutant on another workload."""
        return f"{name.removeprefix(MUTANT)} was found already" if test in self._killed.get(name, ()) else None

    def settle(self, item: pytest.Item, report: pytest.TestReport, progress: Progress) -> None:
        """Make a killed mutant a passed test, and note its fate in a record; the fault-free kernel must pass by itself.

        A mutant that survives does not fail its test either: another workload, or another test, may kill it. A test that ends
        itself with a skip, as attn.measure does here after its check, has let it survive. After its last case it is found out
        what would have found it.
        """
        parameter = parameter_of(item)
        name = parameter.backend if parameter else None
        is_over = report.when == "call" or (report.when == "setup" and not report.passed)
        if name is None or name == self._honest_name or not is_over:
            return
        if killed := report.when == "call" and report.failed:
            self._killed.setdefault(name, set()).add(test_of(item))
            report.outcome, report.longrepr, report.sections = "passed", None, []
        is_last = self._is_last(item, name)
        found_with = self._found_with(name, progress) if is_last and name not in self._killed else ""
        if report.when == "call" or found_with:
            self._note_fate(item, report, name, killed, found_with)

    def _is_last(self, item: pytest.Item, name: str) -> bool:
        """Count a case of a mutant; return whether it was the last. Where xdist spreads its cases, no worker comes to that."""
        if not self._left:
            cases = map(parameter_of, item.session.items)
            self._left.update(case.backend for case in cases if case and case.backend)
        self._left[name] -= 1
        return not self._left[name]

    def _note_fate(self, item: pytest.Item, report: pytest.TestReport, name: str, killed: bool, found_with: str) -> None:
        mutant, records = self._mutants[name], getattr(report, "attn", [])
        facts = {field: getattr(mutant, field) for field in ("name", "kind", "summary", "condition")}
        fate = {**facts, "killed": killed, "found_with": found_with}
        last = records[-1] if records else new_record(test=id_from_root(item), subject=mutant.name)
        verdict = Verdict.EXPECTED if killed else last["verdict"] or Verdict.PASSED
        report.attn = [*records[:-1], changed(last, verdict=str(verdict), mutant=fate)]  # type: ignore[attr-defined]

    def _found_with(self, name: str, progress: Progress) -> str:
        """Say what would have found a mutant."""
        spec, mutant = self._asked.get(name), self._mutants[name]
        if spec is None:
            return "It did not run: call attn.check, check_invariants or measure"
        with progress.during(f"looking for what finds {mutant.name}", spec.workload.id):
            return self._search.found_with(mutant, spec)


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
