"""The catalog: attention as real models call it, by name, each with the source of its shape.

A group name ("flux") stands for all its workloads ("flux-L128" ... "flux-L512"). "smoke" and "edges" are ours: small
problems at the places where kernels break. Tests may ask for "all".
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_attn.workloads.long import long_workloads
from pytest_attn.workloads.models import model_workloads
from pytest_attn.workloads.nearest import did_you_mean
from pytest_attn.workloads.small import small_workloads
from pytest_attn.workloads.workload import Workload


@dataclass(frozen=True)
class Entry:
    """A workload with its group and the place its shape comes from. on_request: run only where it is named."""

    workload: Workload
    group: str
    source: str
    on_request: bool = False


class Catalog:
    """Workloads by name, in the order in which they were added."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}

    def add(
        self,
        workload: Workload,
        group: str | None = None,
        source: str = "",
        alias: str | None = None,
        on_request: bool = False,
    ) -> None:
        """Add a named workload; raise ValueError where it has no name or another workload bears it already.

        on_request: leave it to those who name it, or say "all".
        """
        name = workload.name
        if name is None:
            raise ValueError(f"catalog: {workload.id} has no name; say Workload(..., name='...')")
        if name in self._entries and self._entries[name].workload != workload:
            raise ValueError(
                f"catalog: two different workloads are named {name!r}: {self._entries[name].workload.shape_id}"
                f" and {workload.shape_id}; rename one"
            )
        self._entries[name] = Entry(workload, group or name, source, on_request)
        if alias:
            self._aliases[alias] = name

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def default(self) -> list[Workload]:
        """The workloads that run where none is named, and the device is a GPU."""
        return [entry.workload for entry in self if not entry.on_request]

    def group_of(self, name: str | None) -> str:
        """Return the group of a workload's name, "" where it is not in the catalog."""
        entry = self._entries.get(name or "")
        return entry.group if entry else ""

    def aliases_of(self, name: str | None) -> list[str]:
        """Return the other names of a workload."""
        return [alias for alias, meant in self._aliases.items() if meant == name]

    @property
    def names(self) -> list[str]:
        """Every name that `select` takes: groups, workloads and aliases."""
        groups = {entry.group: None for entry in self}
        return [*groups, *(name for name in self._entries if name not in groups), *self._aliases]

    def select(self, name: str) -> list[Workload]:
        """Return the workloads of a name, id, group, alias, glob pattern or "all"; raise ValueError where there is none."""
        name = self._aliases.get(name, name)
        found = [
            entry.workload
            for entry in self
            if name in ("all", entry.group, entry.workload.name, entry.workload.id) or _matches(name, entry)
        ]
        if not found:
            groups = ", ".join(dict.fromkeys(entry.group for entry in self))
            meant = did_you_mean(name, self.names)
            raise ValueError(f"unknown workload {name!r};{meant} groups: {groups}; pytest --attn-list shows all workloads")
        return found


def _matches(pattern: str, entry: Entry) -> bool:
    return "*" in pattern and fnmatch.fnmatchcase(entry.workload.id, pattern)


def builtin_catalog() -> Catalog:
    """Return a new catalog with every built-in workload."""
    catalog = Catalog()
    for group in (*small_workloads(), *model_workloads(), *long_workloads()):
        for workload in group.workloads:
            catalog.add(workload, group.name, group.source, _alias(workload, group.name), group.on_request)
    return catalog


def _alias(workload: Workload, group: str) -> str | None:
    """Return the name that Flux's benchmark has for a workload."""
    if group != "flux" or workload.name is None:
        return None
    return f"cuda_attn_{workload.name.removeprefix('flux-')}_bfloat16"
