"""--attn-mutants: the tests of a run with faulty kernels in place of theirs, and which of these they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.kernel import HONEST_NAME, honest_backend
from pytest_attn.guests.mutants.mutation_score import mutation_summary
from pytest_attn.guests.mutants.survivors import Search
from pytest_attn.reports.records import Record, changed, new_record
from pytest_attn.reports.terminal import Line
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.devices import Machines
from pytest_attn.session.kinds import CaseParameter, id_from_root, parameter_of, test_of
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.options import Settings
from pytest_attn.session.progress import Progress
from pytest_attn.session.registrations import Registrations
from pytest_attn.session.selection import SelectedKernels
from pytest_attn.workloads.workload import Workload

#: what names of faulty kernels begin with, where a backend's is expected
MUTANT = "mutant:"


class Mutants(SelectedKernels):
    """The faulty kernels of one run, and what happened to them. Each keeps its state from case to case, as a real one does."""

    untimed_because = "--attn-mutants"
    are_tested = False
    section = "attention mutants"

    @classmethod
    def summary(cls, records: Sequence[Record], verbose: bool) -> Iterator[Line]:
        return mutation_summary(records, verbose)

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
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
        workloads = dict.fromkeys(case.workload for case in self.plain_cases(mark, takes_backend=False))
        reached = [(workload, name) for workload in workloads for name in self._reached(workload, mark.backward)]
        return [CaseParameter(workload, name, shown=name.removeprefix(MUTANT)) for workload, name in reached]

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
        spec, mutant = self._asked.get(name), self._mutants[name]
        if spec is None:
            return "It did not run: call attn.check, check_invariants or measure"
        with progress.during(f"looking for what finds {mutant.name}", spec.workload.id):
            return self._search.found_with(mutant, spec)
