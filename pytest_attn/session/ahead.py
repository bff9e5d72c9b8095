"""Compilation ahead: beside each worker of xdist, a process that compiles for cases of the run, from the longest on.

Workers run what is compiled by then, next what needs no compiler, and last what compiles least (scheduling.py). Such a process
compiles what nobody has begun: all cases of a backend on a workload and, when none are left, the last cases of what workers
run. What is compiled lies in the compilers' caches, where another process finds it. Nothing depends on that: what is not
there the case itself compiles, or says why it cannot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pytest_attn.backends.compilers import BEGUN, Compiler, seconds_to_compile
from pytest_attn.backends.library import note_in_a_run
from pytest_attn.backends.machine import usable_cores
from pytest_attn.session.cover import asked_once, is_called_as_in_training
from pytest_attn.session.devices import untimed_because
from pytest_attn.session.durations import Durations
from pytest_attn.session.kinds import ATTENTION, asks_gradients, device_of, kind_of, parameter_of
from pytest_attn.workloads.catalog import builtin_catalog

if TYPE_CHECKING:
    from pytest_attn.session.session import AttentionSession
    from pytest_attn.workloads.workload import Workload

#: bytes of the largest workload, and of a GPU's memory for each worker: the process takes less than one of them
_LARGEST, _MEMORY = 1 << 22, 8 << 30
#: seconds that one kernel takes a backend, roughly, as on an H100's host whose 16 cores are busy, and that of flash-attn 4
_SECONDS, _FLASH4 = {"flex": 2.5, "flex_flash": 4.0, "flex_decode": 6.0, "te_flash": 0.5}, 3.0  # te_flash finds flash4's
#: how many times as long that of flex_decode takes in float32, without tensor cores
_DECODING_FLOAT32 = 4.0
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
    """What a case compiles: a backend's kernel for a bundled workload, or its kernels of invariants that compile more.

    group: the cases that one worker runs, of which it is one. seconds: how long it compiles, roughly.
    """

    group: str
    backend: str
    workload: str
    backward: bool
    invariants: tuple[str, ...]
    seconds: float = 0.0

    @property
    def case(self) -> tuple[str, str, bool, tuple[str, ...]]:
        """What the process gets of it."""
        return self.backend, self.workload, self.backward, self.invariants


class Begun:
    """A plugin of a worker: what it has begun, no process compiles for any more."""

    def __init__(self, by_item: Mapping[pytest.Item, Compiled]) -> None:
        self._by_item = by_item

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Be the first there, or come after a process."""
        if one := self._by_item.get(item):
            note_in_a_run(f"{json.dumps(one.case)}{BEGUN}")


def compile_ahead(config: pytest.Config, session: AttentionSession, items: Sequence[pytest.Item]) -> dict[str, float]:
    """Start the process of this worker of xdist, which ends with the run; return how long it compiles for which group.

    Not where something is timed, or where each worker's has no core, or no memory, to itself.
    """
    place: tuple[int, int] | None = config.workerinput.get("attn_place")  # type: ignore[attr-defined]  # xdist's
    machine, settings = session.machines.known_default, session.settings
    if place is None or machine is None or machine.kind != "cuda" or settings.isolated is not None:
        return {}
    _, workers = place
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
    config.pluginmanager.register(Begun(by_item), "attn-begun")
    groups: dict[str, list[Compiled]] = {}
    for one in dict.fromkeys(by_item.values()):
        groups.setdefault(one.group, []).append(one)
    seconds = {group: sum(one.seconds for one in cases) for group, cases in groups.items()}
    from_the_longest = sorted(groups, key=seconds.__getitem__)[::-1]  # against the order of workers
    told = [(group, [one.case for one in groups[group]]) for group in from_the_longest]
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps({"parent": os.getpid(), "device": machine.device, "groups": told}))
    return seconds


def _compiled_by(item: pytest.Item, session: AttentionSession) -> Compiled:
    parameter = parameter_of(item)
    assert parameter is not None
    backward = asks_gradients(item) or is_called_as_in_training(item, session)
    group, invariants = kind_of(item).made_items().group(item, parameter), asked_once(item, session)
    name, workload = str(parameter.backend), parameter.workload
    seconds = _SECONDS.get(name, _FLASH4) * (1 + backward) * (1 + len(invariants))
    if name == "flex_decode" and workload.dtype == "float32":
        seconds *= _DECODING_FLOAT32
    return Compiled(group or "", name, str(workload.name), backward, invariants, seconds)


def _is_compiled_here(item: pytest.Item, session: AttentionSession, bundled: Container[Workload]) -> bool:
    """Whether a backend of this package declares that it takes one of these workloads, and compiles it within seconds."""
    parameter, registry = parameter_of(item), session.registrations.registry
    if parameter is None or not registry.is_known(name := parameter.backend or ""):
        return False
    backend, workload = registry[name], parameter.workload
    if not (backend.compiles and seconds_to_compile(name, True) <= Compiler.seconds and backend.is_contained):
        return False
    is_plain = kind_of(item) is ATTENTION and not parameter.ranks and device_of(item) is None
    is_small = workload in bundled and workload.bytes() <= _LARGEST
    return is_plain and is_small and backend.claims(workload, asks_gradients(item))


def _started(config: pytest.Config) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, text=True)

    def end() -> None:
        process.kill()
        process.wait()

    config.add_cleanup(end)
    return process
