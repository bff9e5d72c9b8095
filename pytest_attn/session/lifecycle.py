"""The statements behind the hooks of plugin.py, for runs that have attention tests; others never load this."""

from __future__ import annotations

import contextlib
import datetime
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from pytest_attn.backends.backend import obstacle
from pytest_attn.backends.configured import split
from pytest_attn.backends.listing import tables
from pytest_attn.reports.columns import room
from pytest_attn.reports.terminal import Line, listing, summary
from pytest_attn.session.case import AttentionCase
from pytest_attn.session.facts import facts_of
from pytest_attn.session.marker import AttentionMark, RequiresMark
from pytest_attn.session.outputs import place_of
from pytest_attn.session.parametrize import PARAMETER, CaseParameter, is_unselected, test_of
from pytest_attn.session.record import RECORD, CaseRecord
from pytest_attn.session.store import SESSION, AttentionSession, NoTorchError


def make_case(request: pytest.FixtureRequest, parameter: CaseParameter) -> AttentionCase:
    """Make the case of a test item; skips it where backend or device cannot take it."""
    item = request.node
    session = item.config.stash[SESSION]
    if session.settings.fuzz:
        from pytest_attn.session.fuzz import FuzzParameter, make_fuzz_case

        if isinstance(parameter, FuzzParameter):
            return make_fuzz_case(request, parameter)
    marker = item.get_closest_marker("attention")
    mark = AttentionMark.from_marker(marker, session.catalog, session.registry)
    if session.lost and session.device(mark.device).type == "cuda":
        pytest.skip(session.lost)
    if session.settings.mutants and parameter.backend:
        session.mutation.skip_if_killed(test_of(item), parameter.backend)
    case = AttentionCase(request, parameter, mark, session)
    case.skip_unless_runnable()
    return case


def deselect_unselected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the items that stand for tests of which nothing was selected."""
    unselected = [item for item in items if is_unselected(item)]
    if unselected:
        config.hook.pytest_deselected(items=unselected)
        items[:] = [item for item in items if not is_unselected(item)]


def group_by_workload(items: list[pytest.Item]) -> None:
    """Keep the cases of one workload and test in one xdist worker, which then computes each reference once."""
    for item in items:
        if _is_case(item) and item.get_closest_marker("xdist_group") is None:
            parameter: CaseParameter = item.callspec.params[PARAMETER]  # type: ignore[attr-defined]
            test = item.name.partition("[")[0]
            item.add_marker(pytest.mark.xdist_group(f"{test}-{parameter.workload.id}"))  # "]" would end the group's name


def skip_unless_met(item: pytest.Item, session: AttentionSession) -> None:
    """Skip an item with the first requirement that its machine does not meet."""
    try:
        reason = _unmet(item, session)
    except (ValueError, NoTorchError) as error:
        pytest.fail(str(error), pytrace=False)
    if reason:
        pytest.skip(reason)


def _unmet(item: pytest.Item, session: AttentionSession) -> str | None:
    marker = item.get_closest_marker("attention")
    device = marker.kwargs.get("device") if marker else None
    marks = (RequiresMark.from_marker(mark, session.registry) for mark in item.iter_markers("attention_requires"))
    reasons = (mark.unmet_because(session.machine(device), session.registry) for mark in marks)
    return next(filter(None, reasons), None)


def attach_records(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Move the item's records to its report, as plain dicts; a test that raised without a judgement gets one."""
    records = item.stash.get(RECORD, [])
    if report.failed:  # what fails in the end is not recorded, whenever it was timed
        session = item.config.stash[SESSION]
        session.pending = [one for one in session.pending if one.nodeid != item.nodeid]
        session.lost = session.lost or _lost_in(item)
    is_stage = report.when in ("setup", "call")
    if is_stage and report.failed and not records and call.excinfo is not None and _is_case(item):
        parameter: CaseParameter = item.callspec.params[PARAMETER]  # type: ignore[attr-defined]
        reason = f"{call.excinfo.typename}: {call.excinfo.value}".splitlines()[0]
        records = [_raised(item, parameter, reason)]
    if records:
        awaited = report.outcome == "passed" or hasattr(report, "wasxfail")  # by pytest.raises, or by an xfail mark
        records = [replace(r, verdict="expected") if awaited and r.verdict in ("mismatch", "broken") else r for r in records]
        date = datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds")
        place = (item.location[1] or 0) + 1
        records = [replace(r, date=date, seconds=round(report.duration, 4), line=place) for r in records]
        report.attn = [record.to_dict() for record in records]  # type: ignore[attr-defined]
        item.stash[RECORD] = []
        doubts = [r.reason for r in records if r.verdict == "inconclusive"]
        if doubts and report.when == "call" and report.passed:
            path, line, _ = item.location
            report.outcome = "skipped"  # what could not be decided must not look like a pass
            report.longrepr = (path, (line or 0) + 1, f"Skipped: inconclusive latency: {doubts[0]}")


def _lost_in(item: pytest.Item) -> str:
    """Say that a test left the CUDA context of this process unusable, as an illegal memory access does; "" where none did."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        words = str(error).splitlines()[0]
        return f"no CUDA in this process any more: {item.nodeid} lost it ({words}); run the others again without that test"
    return ""


def _raised(item: pytest.Item, parameter: CaseParameter, reason: str) -> CaseRecord:
    """Return the record of a test that raised without a judgement."""
    case = getattr(item, "funcargs", {}).get("attn")
    subject = parameter.backend or (case.asked if isinstance(case, AttentionCase) else "-")
    try:
        session, marker = item.config.stash[SESSION], item.get_closest_marker("attention")
        facts = facts_of(session, parameter.workload, subject, marker.kwargs.get("device") if marker else None)
    except (ValueError, NoTorchError):  # of a device that is not there, which is why the test raised
        facts = {"workload": parameter.workload.id, "name": parameter.workload.name or "", "subject": subject}
    command = case.command() if isinstance(case, AttentionCase) else f"pytest {shlex.quote(item.nodeid)}"
    facts |= {"verdict": "raised", "reason": reason, "command": command}
    return CaseRecord(test=item.nodeid, backward=False, direction="forward", **facts)


def open_terminal(session: AttentionSession, config: pytest.Config) -> None:
    """Get ready to show progress, now, while no output is captured."""
    if session.progress.line.is_watched and session.settings.tune:
        from pytest_attn.session.tuning import TuneProgress

        config.pluginmanager.register(TuneProgress(session), "attn-tune-progress")


def count_cases(items: list[pytest.Item]) -> int:
    """Count the items that have a case."""
    return sum(_is_case(item) for item in items)


def settle_mutant(item: pytest.Item, report: pytest.TestReport) -> None:
    """Under --attn-mutants: a test that fails has found its faulty kernel, and passes."""
    if _is_case(item) and (parameter := item.callspec.params[PARAMETER]) is not None:  # type: ignore[attr-defined]
        mutation = item.config.stash[SESSION].mutation
        found = mutation.settle(test_of(item), parameter.backend, report)
        if found:
            report.attn_mutant = found  # type: ignore[attr-defined]


def _is_case(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and PARAMETER in callspec.params


def print_summary(session: AttentionSession, reporter: Any, verbosity: int) -> None:
    """Print the profiles that were asked for, then the summary: nothing more under -q unless something is wrong."""
    if session.mutants:
        from pytest_attn.reports.mutation import mutation_summary

        _print(reporter, mutation_summary(session.mutants, verbosity > 0), "attention mutants")
        return
    width = room(reporter.isatty)
    if session.settings.profile:
        from pytest_attn.reports.profile import profile_tables

        _print(reporter, profile_tables(sorted(session.records, key=place_of(session)), width), "attention kernels")
    judged = [record for record in session.records if record["latency"] is None]
    timed = [record for record in session.records if record["latency"] is not None]
    if session.settings.tune:  # configurations have no baselines: how they stand is what --attn-tune prints
        timed = [record for record in timed if not split(record["subject"])[1]]
    wrong = any(record["verdict"] in ("mismatch", "broken", "raised") for record in judged)
    if judged and (verbosity >= 0 or wrong):
        _print(reporter, summary(judged, verbosity > 0, width, bool(session.settings.save_failures)))
    if timed:
        from pytest_attn.reports.latency import is_notable, latency_summary

        if verbosity >= 0 or any(map(is_notable, timed)):
            _print(reporter, latency_summary(timed, verbosity > 0, width), "attention latency")


def count_runnable(session: AttentionSession, items: list[pytest.Item]) -> None:
    """Count the collected cases that no backend, device or workload stands in the way of, and the others by their reasons."""
    for item in items:
        if not _is_case(item):
            continue
        parameter: CaseParameter = item.callspec.params[PARAMETER]  # type: ignore[attr-defined]
        marker = item.get_closest_marker("attention")
        assert marker is not None
        backend = session.registry[parameter.backend] if parameter.backend else None
        machine = session.machine(marker.kwargs.get("device"))
        with contextlib.suppress(Exception):  # one whose checks fail will fail when it runs, and say so then
            backward = bool(marker.kwargs.get("backward"))
            reason = _unmet(item, session) or obstacle(backend, parameter.workload, machine, backward)
            session.runnable += reason is None
            if reason:
                session.obstacles.setdefault(reason, Counter())[parameter.backend or "any kernel"] += 1


def print_listing(session: AttentionSession, reporter: Any) -> None:
    """Print backends with their status, the workloads of the catalog, and how many cases would run."""
    try:
        machine = session.machine()
    except (ValueError, NoTorchError) as error:
        _print(reporter, [(str(error), {"red": True})])
        return
    closing = (
        f"{session.runnable:,} of {session.cases:,} cases would run on {machine.name}"
        f" ({machine.device}, torch {machine.torch_version}); leave out --attn-list to run them"
    )
    texts = listing(tables(session.registry, session.catalog, machine), closing, room(reporter.isatty), session.obstacles)
    _print(reporter, texts)


def _print(reporter: Any, lines: Iterable[Line], title: str = "attention") -> None:
    reporter.write_sep("=", title)
    for text, markup in lines:
        reporter.write_line(text, **markup)
