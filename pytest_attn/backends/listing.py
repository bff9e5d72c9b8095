"""What there is to choose from: backends with their status on a machine, what each can do, and the workloads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pytest_attn.backends.backend import Backend, LibraryBackend
from pytest_attn.backends.capabilities import COLUMNS
from pytest_attn.backends.library import try_imports
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.workloads.catalog import Catalog

Row = tuple[str, ...]
Table = tuple[Row, list[Row]]


def tables(registry: Registry, catalog: Catalog, machine: Machine) -> tuple[Table, ...]:
    """Return three tables, each a header and its rows: status of backends, what they can do, workloads."""
    return status_table(registry, machine), capability_table(registry), workload_table(catalog)


def status_table(registry: Registry, machine: Machine) -> Table:
    """Return which backend is available on the machine, and why the others are not; tries the libraries out at once."""
    backends = [registry[name] for name in registry.names]
    libraries = [backend for backend in backends if isinstance(backend, LibraryBackend)]
    try_imports([one.source for one in libraries if _answer_of(partial(one.unavailable_because, machine)) is None])
    rows: list[Row] = []
    for backend in backends:
        reason, version = status_of(backend, machine)
        variants = " ".join(f"+{variant}" for variant in backend.variants)
        rows.append((backend.name, version, variants or "-", reason or "available"))
    rows += [(family, "-", "-", f"{about}; by name only, no part of all") for family, about in registry.families]
    return ("backend", "version", "variants", "status"), rows


def capability_table(registry: Registry) -> Table:
    """Return what each backend can do, wherever it runs; docs/reference/backends.md shows the built-in ones."""
    rows = []
    for name in registry.names:
        backend = registry[name]
        if backend.capabilities is not None:
            kind = "approximate" if backend.is_approximate else precision_named(backend.precision).name
            rows.append((name, backend.needs, kind, *backend.capabilities.row()))
    return ("backend", "needs", "precision", *COLUMNS), rows


def workload_table(catalog: Catalog) -> Table:
    """Return the workloads, with their shapes and where these come from."""
    rows: list[Row] = [(e.workload.id, e.group, e.workload.shape_id, e.source) for e in catalog]
    return ("workload", "group", "shape", "source"), rows


def status_of(backend: Backend, machine: Machine) -> tuple[str | None, str]:
    """Return why a backend is not available, or None, and its version."""
    reason = _answer_of(lambda: backend.unavailable_because(machine) or backend.broken_because())
    return reason, "-" if reason else _answer_of(backend.version) or "-"


def _answer_of(question: Callable[[], str | None]) -> str | None:
    """Ask a backend something; a fault of its own code is an answer as well, and harms no other."""
    try:
        return question()
    except Exception as error:
        return f"cannot be queried: {type(error).__name__}: {error}"
