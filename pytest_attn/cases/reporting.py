"""What a case puts on pytest's report of its test: its records, as builtin types, and a skip where nothing was decided."""

from __future__ import annotations

import datetime
import shlex

import pytest

from pytest_attn.cases.records import RECORDS, facts_of
from pytest_attn.cases.unjudged import REFUSED
from pytest_attn.reports.records import Record, new_record
from pytest_attn.session.items import CaseParameter, parameter_of
from pytest_attn.session.kinds import device_of, kind_of
from pytest_attn.session.machines import NoTorchError
from pytest_attn.session.session import session_of
from pytest_attn.verdict import Verdict

#: what a test may await, with pytest.raises or an xfail mark
_AWAITED = (Verdict.MISMATCH, Verdict.BROKEN, Verdict.NO_RESULT)


def attach_records(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Move the item's records to its report; a test that raised without a judgment gets one."""
    records, parameter = item.stash.get(RECORDS, []), parameter_of(item)
    if report.failed:
        session_of(item.config).cuda.look_after(item.nodeid)
    is_stage = report.when in ("setup", "call")
    is_kernels = REFUSED not in item.stash
    if is_stage and is_kernels and report.failed and not records and call.excinfo is not None and parameter is not None:
        reason = f"{call.excinfo.typename}: {call.excinfo.value}".splitlines()[0]
        records = [_raised(item, parameter, reason)]
    if not records:
        return
    item.stash[RECORDS] = []
    report.attn = [_finished(record, item, report) for record in records]  # type: ignore[attr-defined]
    doubts = [record["reason"] for record in records if record["verdict"] == Verdict.INCONCLUSIVE]
    if doubts and report.when == "call" and report.passed:
        path, line, _ = item.location
        report.outcome = "skipped"  # what could not be decided must not look like a pass
        report.longrepr = (path, (line or 0) + 1, f"Skipped: inconclusive latency: {doubts[0]}")


def _finished(record: Record, item: pytest.Item, report: pytest.TestReport) -> Record:
    """Add what is known at the end: when and where, how long it took, and whether what is wrong was expected to be."""
    is_awaited = report.outcome == "passed" or hasattr(report, "wasxfail")
    verdict = Verdict.EXPECTED.value if is_awaited and record["verdict"] in _AWAITED else record["verdict"]
    date = datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds")
    line = (item.location[1] or 0) + 1
    return {**record, "verdict": verdict, "date": date, "seconds": round(report.duration, 4), "line": line}


def _raised(item: pytest.Item, parameter: CaseParameter, reason: str) -> Record:
    """Return the record of a test that raised without a judgment."""
    case = getattr(item, "funcargs", {}).get("attn")
    run = getattr(case, "_run", None)
    subject = (run and (run.asked or run.backend)) or parameter.backend or "-"
    command = run.command if run else f"pytest {shlex.quote(item.nodeid)}"
    try:
        facts = facts_of(session_of(item.config), parameter.workload, subject, device_of(item))
    except (ValueError, NoTorchError):  # of a device that is not there, which is why the test raised
        name = subject if isinstance(subject, str) else subject.name
        facts = {"workload": parameter.workload.id, "name": parameter.workload.name or "", "subject": name}
    if unknown := kind_of(item).unknown:
        facts |= {"workload": unknown, "shape": {}}
    return new_record(
        **facts,
        test=item.nodeid,
        question="check",
        verdict=Verdict.RAISED.value,
        reason=reason,
        command=command,
        direction="forward",
    )
