"""attention_requires: a test is skipped with the first requirement that its machine does not meet; and GPUs for ranks."""

from __future__ import annotations

import pytest

from pytest_attn.backends.machine import Machine
from pytest_attn.session.machines import NoTorchError
from pytest_attn.session.marks import RequiresMark
from pytest_attn.session.session import AttentionSession


def skip_unless_met(item: pytest.Item, session: AttentionSession) -> None:
    """Have pytest skip an item whose requirements are not met; fail one whose requirements cannot be asked about."""
    try:
        reason = unmet_because(item, session)
    except (ValueError, NoTorchError) as error:
        pytest.fail(str(error), pytrace=False)
    if reason:
        item.add_marker(pytest.mark.skip(reason=reason))


def unmet_because(item: pytest.Item, session: AttentionSession) -> str | None:
    """Say which requirement of an item is not met, or None. Raises ValueError or NoTorchError where that cannot be said."""
    registry = session.registrations.registry
    marker = item.get_closest_marker("attention") or item.get_closest_marker("attention_model")
    device = marker.kwargs.get("device") if marker else None
    marks = (RequiresMark.from_marker(mark, registry) for mark in item.iter_markers("attention_requires"))
    reasons = (mark.unmet_because(session.machines.machine(device), registry) for mark in marks)
    return next(filter(None, reasons), None)


def too_few_gpus_because(ranks: int, machine: Machine, share: str) -> str:
    """Say that there are fewer GPUs than ranks, which may not share one, "" where that is not so."""
    if machine.kind != "cuda" or machine.device_count >= ranks or share != "no":
        return ""
    return f"needs {ranks} GPUs, this machine has {machine.device_count}"
