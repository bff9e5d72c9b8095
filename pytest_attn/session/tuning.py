"""--attn-tune: one backend under each of its configurations, in the tests that take attn_backend, and how far that is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from pytest_attn.backends.backend import Backend, obstacle
from pytest_attn.backends.configured import joined, split
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current
from pytest_attn.session.progress import clock

if TYPE_CHECKING:
    from pytest_attn.backends.registry import Registry
    from pytest_attn.session.marker import AttentionMark
    from pytest_attn.session.store import AttentionSession
    from pytest_attn.workloads.workload import Workload

#: seconds for which a run says nothing of its progress
SILENT_SECONDS = 10.0


def require_tunable(registry: Registry, name: str) -> None:
    """Raise ValueError for a backend that is not registered, names a configuration already, or declares none."""
    registry.require(name)
    plain, label = split(registry.canonical(name))
    if label:
        raise ValueError(f"{name!r} is one configuration; name the backend alone: {plain}")
    if not _declares(registry[plain.partition("+")[0]]):
        known = [one for one in registry.names if _declares(registry[one])]
        raise ValueError(
            f"backend {name!r} declares no configurations; those that do: {', '.join(known) or 'none'}."
            " One of yours does with registry.add_function(name, fn, configurations=...)"
        )


def _declares(backend: Backend) -> bool:
    return backend.tunable is None or bool(backend.tunable)


def tuned_names(session: AttentionSession, mark: AttentionMark, workload: Workload) -> list[str]:
    """Return the backend of --attn-tune, then its configurations for a workload; it alone where it cannot take that.

    Raises ValueError, with its words, where the backend cannot say which configurations it has.
    """
    name = session.registry.canonical(session.settings.tune or "")
    machine = session.machine(mark.device)
    try:
        if obstacle(session.registry[name], workload, machine, mark.backward):
            return [name]  # the case is skipped with its reason
        with quiet(), current(machine.device):
            options = session.registry[name.partition("+")[0]].configurations(workload, machine, mark.backward)
        return list(dict.fromkeys([name, *(joined(name, one) for one in options)]))
    except Exception as error:
        raise ValueError(
            f"--attn-tune={name}: no configurations for {workload.id}: {type(error).__name__}: {error}"
        ) from error


class TuneProgress:
    """Says on a terminal, between tests, how many cases are done and how long the rest will take.

    Nothing in the first ten seconds. Under xdist pytest's own figures say as much.
    """

    def __init__(self, session: AttentionSession) -> None:
        self._session = session
        self._begun, self._done = time.monotonic(), 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        """Start the clock."""
        self._begun = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Make room for pytest's own words."""
        self._session.progress.line.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self) -> None:
        """Likewise."""
        self._session.progress.line.clear()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Say how far the run is."""
        self._done += 1
        elapsed, total = time.monotonic() - self._begun, self._session.selected
        if elapsed < SILENT_SECONDS or not self._done < total:
            return
        left = clock(round(elapsed / self._done * (total - self._done)))
        text = f"tune: {self._done} of {total} cases, about {left} left"
        self._session.progress.line.show(text, is_line_done=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Leave nothing behind."""
        self._session.progress.line.clear()
