"""--attn-mutants: a user's own tests with faulty kernels in place of theirs, to see which of them the tests find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.subject import Dequantizer, Subject
from pytest_attn.mutants import MUTANTS
from pytest_attn.mutants.kernel import HONEST_NAME, honest_backend
from pytest_attn.session.items import MUTANT, CaseParameter, parameter_of, test_of
from pytest_attn.session.kernels import SelectedKernels, Target
from pytest_attn.session.machines import Machines
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.registrations import Registrations
from pytest_attn.session.settings import Settings
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from pytest_attn.correctness.spec import CheckSpec


class Mutants(SelectedKernels):
    """The faulty kernels of one run, and what happened to them. Each keeps its state from case to case, as a real one does."""

    untimed_because = "--attn-mutants"
    are_tested = False

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
        super().__init__(settings, registrations, machines)
        self._mutants = {mutant.name: mutant for mutant in MUTANTS}
        self._made: dict[str, Backend] = {}
        self._killed: set[tuple[str, str]] = set()

    def cases(self, mark: AttentionMark, takes_backend: bool) -> list[CaseParameter]:
        """Return a case for each kernel whose faulty step a workload of the marker reaches."""
        workloads = dict.fromkeys(case.workload for case in super().cases(mark, takes_backend=False))
        return [CaseParameter(workload, name) for workload in workloads for name in self._reached(workload, mark.backward)]

    def _reached(self, workload: Workload, backward: bool) -> list[str]:
        """Return the fault-free kernel, which a test must let pass, and the mutants whose faulty step the workload reaches."""
        no_mutant = workload.dropout or workload.is_quantized or workload.v_in_k  # none drops, dequantizes or reads v from k
        if no_mutant or (backward and workload.kv_pages):
            return []
        reached = [name for name, mutant in self._mutants.items() if mutant.applies(workload, backward)]
        return [f"{MUTANT}{name}" for name in (HONEST_NAME, *reached)] if reached else []

    def backend_named(self, name: str) -> Backend:
        """Return the kernel of a case, as a backend."""
        name = name.removeprefix(MUTANT)
        if name not in self._made:
            self._made[name] = honest_backend() if name == HONEST_NAME else self._mutants[name].backend()
        return self._made[name]

    def subject(
        self,
        target: Target,
        name: str | None,
        spec: CheckSpec,
        own: Backend | None,
        within: str = "",
        dequantized: Dequantizer | None = None,
    ) -> Subject:
        """Return the faulty kernel, whatever the test handed over."""
        return own or super().subject(target, name, spec, own, within, dequantized)

    def skipped_because(self, test: str, name: str) -> str:
        """Say that the same test has killed a mutant on another workload."""
        return f"{name.removeprefix(MUTANT)} was killed already" if (test, name) in self._killed else ""

    def settle(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Make a killed mutant a passed test, and note its fate on the report; the fault-free kernel must pass by itself.

        A mutant that survives does not fail its test either: another workload, or another test, may kill it. A test that ends
        itself with a skip, as attn.measure does here after its check, has let it survive.
        """
        parameter = parameter_of(item)
        name = parameter.backend if parameter else None
        if name is None or name == MUTANT + HONEST_NAME or report.when != "call":
            return
        test, killed = test_of(item), bool(report.failed)
        if killed:
            self._killed.add((test, name))
            report.outcome, report.longrepr, report.sections = "passed", None, []
        mutant = self._mutants[name.removeprefix(MUTANT)]
        facts = {"name": mutant.name, "kind": mutant.kind, "summary": mutant.summary, "condition": mutant.condition}
        report.attn_mutant = {**facts, "test": test, "killed": killed}  # type: ignore[attr-defined]
