"""Compilation ahead: beside each worker of xdist, a process that compiles what the run's last cases need, from the end on.

Workers begin with what needs no compiler, then with the first of these cases. What is compiled lies in the compilers' caches,
where another process finds it. Nothing depends on that: what is not there the case itself compiles, or says why it cannot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pytest_attn.backends.compilers import Compiler, seconds_to_compile
from pytest_attn.backends.machine import usable_cores
from pytest_attn.session.cover import asked_once
from pytest_attn.session.devices import untimed_because
from pytest_attn.session.durations import Durations
from pytest_attn.session.kinds import ATTENTION, device_of, kind_of, marker_of, parameter_of
from pytest_attn.workloads.catalog import builtin_catalog

if TYPE_CHECKING:
    from pytest_attn.session.session import AttentionSession
    from pytest_attn.workloads.workload import Workload

#: bytes of the largest workload, and of a GPU's memory for each worker: the process takes less than one of them
_LARGEST, _MEMORY = 1 << 22, 8 << 30
#: the process, which gets this one's sys.path, and what is left of the cores; of a compiler's time a tenth went into gc
_PROGRAM = """
import gc, json, os, sys
os.nice(10)
gc.disable()
sys.path[:] = json.loads(sys.argv[1])
from pytest_attn.invariants.ahead import main
main()
"""


class Compiled(NamedTuple):
    """What a case compiles: a backend's kernel for a bundled workload, and those of invariants that compile more."""

    backend: str
    workload: str
    backward: bool
    invariants: tuple[str, ...]

    @property
    def kernels(self) -> int:
        """How many it compiles, roughly."""
        return 1 + len(self.invariants)


def compile_ahead(config: pytest.Config, session: AttentionSession, items: Sequence[pytest.Item]) -> dict[str, int]:
    """Start the process of this worker of xdist, which ends with the run; return how many kernels a case has, by its id.

    Not where something is timed, or where each worker's has no core, or no memory, to itself.
    """
    place: tuple[int, int] | None = config.workerinput.get("attn_place")  # type: ignore[attr-defined]  # xdist's
    machine, settings = session.machines.known_default, session.settings
    if place is None or machine is None or machine.kind != "cuda" or settings.isolated is not None:
        return {}
    number, workers = place
    is_timed = untimed_because(settings.gpu_per_worker, session.machines.device()) is None
    if is_timed or usable_cores() < 2 * workers or machine.memory < _MEMORY * workers:
        return {}
    known, bundled = Durations(config).earlier, frozenset(builtin_catalog().select("all"))
    new = (item for item in items if item.nodeid not in known)  # what a run before had is in the caches
    candidates = [item for item in new if _is_compiled_here(item, session, bundled)]
    if not candidates:
        return {}
    process = _started(config)  # which imports torch while this one asks libraries
    by_item = {item: _compiled_by(item, session) for item in candidates}
    mine = _from_the_end(by_item.values())[number::workers]
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps({"parent": os.getpid(), "device": machine.device, "cases": list(chain(*mine))}))
    return {item.nodeid: one.kernels for item, one in by_item.items()}


def _compiled_by(item: pytest.Item, session: AttentionSession) -> Compiled:
    parameter, marker = parameter_of(item), marker_of(item)
    assert parameter is not None
    assert marker is not None
    backward = bool(marker.kwargs.get("backward"))
    return Compiled(str(parameter.backend), str(parameter.workload.name), backward, asked_once(item, session))


def _from_the_end(cases: Iterable[Compiled]) -> list[list[Compiled]]:
    """Return them by backend and workload, those last that workers begin with: they have the most kernels, or come first."""
    groups: dict[tuple[str, str], list[Compiled]] = {}
    for case in dict.fromkeys(cases):
        groups.setdefault((case.backend, case.workload), []).append(case)
    first = sorted(groups.values(), key=lambda group: -max(case.kernels for case in group))
    return first[::-1]


def _is_compiled_here(item: pytest.Item, session: AttentionSession, bundled: Container[Workload]) -> bool:
    """Whether a backend of this package compiles one of these workloads for an item, within seconds."""
    parameter, registry = parameter_of(item), session.registrations.registry
    if kind_of(item) is not ATTENTION or parameter is None or not registry.is_known(name := parameter.backend or ""):
        return False
    backend, workload = registry[name], parameter.workload
    is_quick = backend.compiles and seconds_to_compile(name, True) <= Compiler.seconds
    is_plain = not parameter.ranks and device_of(item) is None and workload in bundled and workload.bytes() <= _LARGEST
    return is_plain and is_quick and backend.is_contained


def _started(config: pytest.Config) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, text=True)

    def end() -> None:
        process.kill()
        process.wait()

    config.add_cleanup(end)
    return process
