"""Which workloads, dtypes and backends the options select, within what a marker names."""

from __future__ import annotations

from collections.abc import Callable

from pytest_attn.session.machines import Machines
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.registrations import Registrations
from pytest_attn.session.settings import Settings
from pytest_attn.workloads.workload import Workload

#: groups that a test without named workloads runs: on a CPU the small ones, on a GPU all but those on request
CPU_GROUPS = ("smoke", "edges", "features")


class Selection:
    """What the options of a run leave of what its markers name."""

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
        self._settings, self._registrations, self._machines = settings, registrations, machines

    def workloads(self, mark: AttentionMark) -> list[Workload]:
        """Return the workloads of a marker, or of the run where it names none, in each selected dtype."""
        catalog, selected = self._registrations.catalog, self._selected_workloads()
        if mark.workloads:
            workloads = [w for w in mark.workloads if selected is None or w.name in selected]
        elif selected is not None:
            workloads = [w for w in catalog.select("all") if w.name in selected]
        else:
            is_cpu = self._machines.device(mark.device).type == "cpu"
            workloads = [w for group in CPU_GROUPS for w in catalog.select(group)] if is_cpu else catalog.default
        wanted = self._settings.dtypes
        dtypes = [d for d in mark.dtypes if not wanted or d in wanted] if mark.dtypes else list(wanted)
        if mark.dtypes or wanted:
            workloads = [w.replace(dtype=dtype) for w in workloads for dtype in dtypes]
        return list(dict.fromkeys(workloads))

    def backends(self, device: str | None = None) -> list[str]:
        """Return the selected backends; asks the machine only where "available" is part of the selection."""
        registry = self._registrations.registry
        tokens = tuple(_signed(token, registry.canonical) for token in self._settings.backends)
        needs_machine = "available" in tokens or all(token.startswith("-") for token in tokens)
        available = self._available(device) if needs_machine else []
        chosen = choose(tuple(t for t in tokens if t != "available"), registry.names, available)
        if "available" in tokens:
            excluded = {t[1:] for t in tokens if t.startswith("-")}
            chosen = list(dict.fromkeys([*(n for n in available if n not in excluded), *chosen]))
        return chosen

    @property
    def names_backends(self) -> bool:
        """Whether the user chose backends, which markers then only narrow."""
        return "backends" in self._settings.given

    def _available(self, device: str | None) -> list[str]:
        registry, machine = self._registrations.registry, self._machines.machine(device)
        return [name for name in registry.names if registry[name].unavailable_because(machine) is None]

    def _selected_workloads(self) -> set[str] | None:
        """Return the names that --attn-workloads selects, None where it was not given."""
        tokens, catalog = self._settings.workloads, self._registrations.catalog
        if not tokens:
            return None
        everything = [w.name for w in catalog.select("all") if w.name]
        expanded = tuple(
            ("-" if token.startswith("-") else "") + str(w.name)
            for token in tokens
            for w in catalog.select(token.removeprefix("-"))
        )
        return set(choose(expanded, everything, [w.name for w in catalog.default if w.name]))


def choose(tokens: tuple[str, ...], everything: list[str], default: list[str]) -> list[str]:
    """Apply a selection to names: plain tokens choose, -NAME leaves out; only exclusions start from `default`."""
    positive = [token for token in tokens if not token.startswith("-")]
    excluded = {token[1:] for token in tokens if token.startswith("-")}
    chosen = list(dict.fromkeys(positive)) if positive else default
    chosen = [name for token in chosen for name in (everything if token == "all" else [token])]
    return [name for name in dict.fromkeys(chosen) if name not in excluded]


def _signed(token: str, change: Callable[[str], str]) -> str:
    """Change the name in a token that may begin with a minus sign."""
    return f"-{change(token[1:])}" if token.startswith("-") else change(token)
