"""The statements behind the hooks of plugin.py, for runs that have attention tests; others never load this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from pytest_attn.backends.backend import obstacle
from pytest_attn.reports.terminal import Line, listing, summary
from pytest_attn.session.case import AttentionCase
from pytest_attn.session.marker import AttentionMark, RequiresMark
from pytest_attn.session.parametrize import PARAMETER, CaseParameter, is_unselected
from pytest_attn.session.record import RECORD, CaseRecord
from pytest_attn.session.store import SESSION, AttentionSession, NoTorchError


def make_case(request: pytest.FixtureRequest, parameter: CaseParameter) -> AttentionCase:
    """Make the case of a test item; skips it where backend or device cannot take it."""
    item = request.node
    session = item.config.stash[SESSION]
    marker = item.get_closest_marker("attention")
    mark = AttentionMark.from_marker(marker, session.catalog, session.registry)
    case = AttentionCase(item, parameter, mark, session)
    case.skip_unless_runnable()
    return case


def deselect_unselected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the items that stand for tests of which nothing was selected."""
    unselected = [item for item in items if is_unselected(item)]
    if unselected:
        config.hook.pytest_deselected(items=unselected)
        items[:] = [item for item in items if not is_unselected(item)]


def skip_unless_met(item: pytest.Item, session: AttentionSession) -> None:
    """Skip an item with the first requirement that its machine does not meet."""
    marker = item.get_closest_marker("attention")
    device = marker.kwargs.get("device") if marker else None
    for requirement in item.iter_markers("attention_requires"):
        try:
            reason = RequiresMark.from_marker(requirement, session.registry).unmet_because(
                session.machine(device), session.registry
            )
        except (ValueError, NoTorchError) as error:
            pytest.fail(str(error), pytrace=False)
        if reason:
            pytest.skip(reason)


def attach_records(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Move the item's records to its report, as plain dicts; a test that raised without a judgement gets one."""
    records = item.stash.get(RECORD, [])
    if report.when == "call" and report.failed and not records and call.excinfo is not None and _is_case(item):
        parameter: CaseParameter = item.callspec.params[PARAMETER]  # type: ignore[attr-defined]
        reason = f"{call.excinfo.typename}: {call.excinfo.value}".splitlines()[0]
        records = [CaseRecord(item.nodeid, parameter.workload.id, parameter.backend or "-", "raised", False, reason)]
    if records:
        awaited = report.outcome == "passed" or hasattr(report, "wasxfail")  # by pytest.raises, or by an xfail mark
        records = [replace(r, verdict="expected") if awaited and r.verdict == "mismatch" else r for r in records]
        report.attn = [record.to_dict() for record in records]  # type: ignore[attr-defined]
        item.stash[RECORD] = []


def _is_case(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and PARAMETER in callspec.params


def print_summary(session: AttentionSession, reporter: Any, verbosity: int) -> None:
    """Print the summary of the run's cases; nothing under -q unless something is wrong."""
    wrong = any(record["verdict"] in ("mismatch", "raised") for record in session.records)
    if verbosity < 0 and not wrong:
        return
    _print(reporter, summary(session.records, verbose=verbosity > 0))


def count_runnable(session: AttentionSession, items: list[pytest.Item]) -> None:
    """Count the collected cases that no backend, device or workload stands in the way of."""
    for item in items:
        if not _is_case(item):
            continue
        parameter: CaseParameter = item.callspec.params[PARAMETER]  # type: ignore[attr-defined]
        marker = item.get_closest_marker("attention")
        assert marker is not None
        backend = session.registry[parameter.backend] if parameter.backend else None
        machine = session.machine(marker.kwargs.get("device"))
        if obstacle(backend, parameter.workload, machine, bool(marker.kwargs.get("backward"))) is None:
            session.runnable += 1


def print_listing(session: AttentionSession, reporter: Any) -> None:
    """Print backends with their status, the workloads of the catalog, and how many cases would run."""
    try:
        machine = session.machine()
    except (ValueError, NoTorchError) as error:
        _print(reporter, [(str(error), {"red": True})])
        return
    backends = []
    for name in session.registry.names:
        backend = session.registry[name]
        reason = backend.unavailable_because(machine)
        version = backend.version() if reason is None else "-"
        variants = " ".join(f"+{variant}" for variant in backend.variants)
        backends.append((name, version, variants or "-", reason or "available"))
    workloads = [(e.workload.id, e.group, e.workload.shape_id, e.source) for e in session.catalog]
    closing = (
        f"{session.runnable:,} of {session.cases:,} cases would run on {machine.name}"
        f" ({machine.device}, torch {machine.torch_version}); leave out --attn-list to run them"
    )
    _print(reporter, listing(backends, workloads, closing))


def _print(reporter: Any, lines: Iterable[Line]) -> None:
    reporter.section("attention")
    for text, markup in lines:
        reporter.write_line(text, **markup)
