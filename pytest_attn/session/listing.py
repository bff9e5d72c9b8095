"""--attn-list: backends and workloads, how many cases would run, and why the others would not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from pytest_attn.backends.listing import tables
from pytest_attn.backends.over_ranks import RankBackend
from pytest_attn.backends.subject import obstacle_of_any
from pytest_attn.reports.columns import room
from pytest_attn.reports.terminal import listing
from pytest_attn.session.items import CaseParameter, ModelParameter, parameter_of
from pytest_attn.session.machines import NoTorchError
from pytest_attn.session.requirements import too_few_gpus_because, unmet_because
from pytest_attn.session.session import AttentionSession
from pytest_attn.session.summary import print_section
from pytest_attn.workloads.sharding import Sharding


def count_runnable(session: AttentionSession, items: list[pytest.Item]) -> None:
    """Count the collected cases that no backend, device or workload stands in the way of, and the others by their reasons."""
    for item in items:
        parameter, marker = parameter_of(item), item.get_closest_marker("attention")
        if isinstance(parameter, ModelParameter):
            _count_model(session, item, parameter.backend)
        if parameter is None or marker is None or isinstance(parameter, ModelParameter):
            continue
        with contextlib.suppress(Exception):  # one whose checks fail will fail when it runs, and say so then
            reason = unmet_because(item, session) or _obstacle(session, parameter, marker)
            session.collected.count(reason, parameter.backend or "any kernel")


def _obstacle(session: AttentionSession, parameter: CaseParameter, marker: pytest.Mark) -> str | None:
    """Say what stands in the way of a case."""
    workload, name = parameter.workload, parameter.backend
    machine, backward = session.machines.machine(marker.kwargs.get("device")), bool(marker.kwargs.get("backward"))
    backend = session.registrations.registry[name] if name else None
    if not parameter.ranks:
        return (backend.obstacle if backend else obstacle_of_any)(workload, machine, backward)
    sharding = Sharding(workload, marker.kwargs.get("shard", "contiguous"), parameter.ranks)
    reason = too_few_gpus_because(parameter.ranks, machine) or sharding.refused_because()
    if reason or not isinstance(backend, RankBackend):
        return reason or obstacle_of_any(workload, machine, backward)
    return backend.obstacle_over(sharding, machine, backward)


def _count_model(session: AttentionSession, item: pytest.Item, name: str | None) -> None:
    """Count a test of a model, of which only its backend's absence is known before it runs."""
    marker = item.get_closest_marker("attention_model")
    machine = session.machines.machine(marker.kwargs.get("device") if marker else None)
    absent = session.registrations.registry[name].unavailable_because(machine) if name else None
    with contextlib.suppress(Exception):  # one whose checks fail will fail when it runs, and say so then
        session.collected.count(unmet_because(item, session) or absent, name or "any kernel")


def print_listing(session: AttentionSession, reporter: Any) -> None:
    """Print the tables, and how many cases would run."""
    try:
        machine = session.machines.machine()
    except (ValueError, NoTorchError) as error:
        print_section(reporter, [(str(error), {"red": True})])
        return
    collected, registrations = session.collected, session.registrations
    closing = (
        f"{collected.runnable:,} of {collected.listed:,} cases would run on {machine.name}"
        f" ({machine.device}, torch {machine.torch_version}); leave out --attn-list to run them"
    )
    shown = tables(registrations.registry, registrations.catalog, machine)
    print_section(reporter, listing(shown, closing, room(reporter.isatty), collected.obstacles))
