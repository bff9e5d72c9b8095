"""--attn-list: backends and workloads, how many cases would run, and why the others would not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from pytest_attn.backends.registry import tables
from pytest_attn.reports.columns import room
from pytest_attn.reports.terminal import listing
from pytest_attn.session.collection import unmet_because
from pytest_attn.session.items import parameter_of
from pytest_attn.session.kinds import kind_of, marker_of
from pytest_attn.session.machines import NoTorchError
from pytest_attn.session.session import AttentionSession
from pytest_attn.session.summary import print_section


def count_runnable(session: AttentionSession, items: list[pytest.Item]) -> None:
    """Count the collected cases that no backend, device or workload stands in the way of, and the others by their reasons."""
    for item in items:
        parameter, marker = parameter_of(item), marker_of(item)
        if parameter is None or marker is None:
            continue
        with contextlib.suppress(Exception):  # one whose checks fail will fail when it runs, and say so then
            reason = unmet_because(item, session) or kind_of(item).made_items().obstacle(parameter, marker, session)
            session.collected.count(reason, parameter.backend or "any kernel")


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
