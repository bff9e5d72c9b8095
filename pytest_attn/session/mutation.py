"""--attn-mutants: a user's own tests with faulty kernels in place of theirs, to see which of them the tests find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.mutants.catalog import MUTANTS
from pytest_attn.mutants.variants import HONEST
from pytest_attn.session.parametrize import MUTANT

if TYPE_CHECKING:
    from pytest_attn.backends.backend import Backend
    from pytest_attn.workloads.workload import Workload

_HONEST = HONEST[0].name


class Mutation:
    """The faulty kernels of one run, and what became of them. Each keeps its state from case to case, as a real one does."""

    def __init__(self) -> None:
        self._mutants = {mutant.name: mutant for mutant in MUTANTS}
        self._backends: dict[str, Backend] = {}
        self._killed: set[tuple[str, str]] = set()

    def names_for(self, workload: Workload, backward: bool) -> list[str]:
        """Return the honest kernel, which a test must let pass, and the mutants whose faulty step the workload reaches."""
        if backward and workload.kv_pages:
            return []
        reached = [name for name, mutant in self._mutants.items() if mutant.applies(workload, backward)]
        return [f"{MUTANT}{name}" for name in (_HONEST, *reached)] if reached else []

    def backend(self, name: str) -> Backend:
        """Return the backend of a name that `names_for` returned."""
        name = name.removeprefix(MUTANT)
        if name not in self._backends:
            made = HONEST[0] if name == _HONEST else self._mutants[name]
            self._backends[name] = made.backend()
        return self._backends[name]

    def skip_if_killed(self, test: str, name: str) -> None:
        """Skip a case whose mutant the same test has killed on another workload."""
        if (test, name) in self._killed:
            pytest.skip(f"{name.removeprefix(MUTANT)} was killed already")

    def settle(self, test: str, name: str, report: pytest.TestReport) -> dict[str, Any] | None:
        """Make a killed mutant a passed test, and return what is to be recorded; the honest kernel must pass by itself.

        A mutant that survives is no failed test either: another workload, or another test, may kill it. A test that ends
        itself with a skip, as attn.measure does here after its check, has let it survive.
        """
        if name == MUTANT + _HONEST or report.when != "call":
            return None
        killed = bool(report.failed)
        if killed:
            self._killed.add((test, name))
            report.outcome, report.longrepr, report.sections = "passed", None, []
        mutant = self._mutants[name.removeprefix(MUTANT)]
        facts = {"name": mutant.name, "kind": mutant.kind, "summary": mutant.summary, "condition": mutant.condition}
        return {**facts, "test": test, "killed": killed}
