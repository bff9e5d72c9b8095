"""--attn-tune: one backend under each of its configurations, in the tests that take attn_backend, and how far that is."""

from __future__ import annotations

import time

import pytest

from pytest_attn.backends.configured import joined, split
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current
from pytest_attn.session.items import CaseParameter, is_case
from pytest_attn.session.kernels import SelectedKernels
from pytest_attn.session.machines import Machines
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.progress import Progress, clock
from pytest_attn.session.registrations import Registrations
from pytest_attn.session.settings import Settings
from pytest_attn.workloads.workload import Workload

#: seconds for which a run says nothing of its progress
SILENT_SECONDS = 10.0


class Configurations(SelectedKernels):
    """The backend of --attn-tune, as it is and under each of its configurations."""

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
        super().__init__(settings, registrations, machines)
        self._name = registrations.registry.canonical(settings.tune or "")

    def cases(self, mark: AttentionMark, takes_backend: bool) -> list[CaseParameter]:
        """Return a case for each configuration that the backend tries on a workload of the marker."""
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

    def open_terminal(self, config: pytest.Config, progress: Progress) -> None:
        """Say between tests how many cases are done."""
        if progress.line.is_watched:
            config.pluginmanager.register(TuneProgress(progress), "attn-tune-progress")


class TuneProgress:
    """Says on a terminal, between tests, how many cases are done and how long the rest will take.

    Nothing in the first ten seconds. Under xdist pytest's own figures say as much.
    """

    def __init__(self, progress: Progress) -> None:
        self._line = progress.line
        self._begun, self._done, self._total = time.monotonic(), 0, 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Start the clock."""
        self._begun, self._total = time.monotonic(), sum(map(is_case, session.items))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Make room for pytest's own words."""
        self._line.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self) -> None:
        """Make room for a failure's letter."""
        self._line.clear()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Say how far the run is."""
        self._done += 1
        elapsed, total = time.monotonic() - self._begun, self._total
        if elapsed < SILENT_SECONDS or not self._done < total:
            return
        left = clock(round(elapsed / self._done * (total - self._done)))
        text = f"tune: {self._done} of {total} cases, about {left} left"
        self._line.show(text, is_line_done=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Leave nothing behind."""
        self._line.clear()
