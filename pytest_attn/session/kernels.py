"""Whose kernels a run tests: those of the user's tests and the selected backends, unless an option says otherwise.

`AttentionSession.kernels` chooses; session/mutants.py (faulty kernels) and session/tuning.py (the configurations of one
backend) are the other answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.configured import split
from pytest_attn.backends.subject import Dequantizer, Subject
from pytest_attn.session.items import CaseParameter
from pytest_attn.session.machines import Machines
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.registrations import Registrations
from pytest_attn.session.selection import Selection

if TYPE_CHECKING:
    from pytest_attn.correctness.spec import CheckSpec
    from pytest_attn.session.progress import Progress
    from pytest_attn.session.settings import Settings

#: what `attn.check` takes
Target = Callable[..., Any] | Backend | str


class SelectedKernels:
    """The kernels that tests hand over, and the selected backends where a test takes one."""

    #: why nothing is timed, "" where it is
    untimed_because = ""
    #: whether the kernels are those that the tests name, whose failures are kept and whose launches are asserted
    are_tested = True

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
        self.registrations, self.machines = registrations, machines
        self.selection = Selection(settings, registrations, machines)

    def cases(self, mark: AttentionMark, takes_backend: bool) -> list[CaseParameter]:
        """Return the cases of one marker: workloads times dtypes, times backends where the test takes one.

        Raises ValueError for a marker whose layout is not that of its workloads.
        """
        workloads = self.selection.workloads(mark)
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
        selected = list(named) if named and not self.selection.names_backends else self.selection.backends(mark.device)
        if mark.backends is not None:
            narrowed = [name for name in selected if name in named or split(name)[0] in named]
            selected = list(dict.fromkeys([*narrowed, *(name for name in named if split(name)[0] in selected)]))
        over_ranks = self.registrations.registry.computes_over_ranks
        return [name for name in selected if over_ranks(name) == bool(mark.ranks)]

    def backend_named(self, name: str) -> Backend:
        """Return the backend of a case."""
        return self.registrations.registry[name]

    def subject(
        self,
        target: Target,
        name: str | None,
        spec: CheckSpec,
        own: Backend | None,
        within: str = "",
        dequantized: Dequantizer | None = None,
    ) -> Subject:
        """Return what a test handed over, or what is tested in its place.

        own: the backend of the case. within: the qualified name of the test. dequantized: what a callable that quantizes
        makes of q, k and v.
        """
        del own
        return spec.subject(self.registrations.registry, target, name, within, dequantized)

    def skipped_because(self, test: str, name: str) -> str:
        """Say why a case need not run any more, "" where it must."""
        del test, name
        return ""

    def settle(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Turn the report of a case into what it means in this run."""

    def open_terminal(self, config: pytest.Config, progress: Progress) -> None:
        """Show on a terminal how far the run is."""
