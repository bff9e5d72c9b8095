"""Backends that this machine lacks: one skipped item each says so, in place of one for each of their cases."""

from __future__ import annotations

import pytest

from pytest_attn.backends.configured import split
from pytest_attn.session.items import parameter_of
from pytest_attn.session.kinds import device_of
from pytest_attn.session.session import AttentionSession


def keep_one_of_each_missing(config: pytest.Config, session: AttentionSession, items: list[pytest.Item]) -> list[pytest.Item]:
    """Deselect, and return, the items of backends that cannot run here at all, but the first of each backend and reason.

    What is left is skipped with that reason when it runs. Nothing is deselected where no test runs: under --attn-list and
    --collect-only, which count and show every case.
    """
    if session.settings.list_only or config.option.collectonly or not session.kernels.are_tested:
        return []
    told: set[tuple[str, str]] = set()
    surplus: list[pytest.Item] = []
    for item in items:
        reason = _missing_because(session, item)
        if reason in told:
            surplus.append(item)
        elif reason:
            told.add(reason)
    if surplus:
        left_out = set(surplus)
        config.hook.pytest_deselected(items=surplus)
        items[:] = [item for item in items if item not in left_out]
    return surplus


def _missing_because(session: AttentionSession, item: pytest.Item) -> tuple[str, str] | None:
    """Return the backend of an item and why this machine cannot run it at all; None where it can, or nobody can say."""
    parameter = parameter_of(item)
    if parameter is None or parameter.backend is None:
        return None
    try:
        machine = session.machines.machine(device_of(item))
        reason = session.kernels.backend_named(parameter.backend).unavailable_because(machine)
    except Exception:  # of a device that is not there, or of a conftest's backend: told when the item runs
        return None
    return (split(parameter.backend)[0], reason) if reason else None
