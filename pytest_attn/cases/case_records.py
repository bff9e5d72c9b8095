"""The records of a test: what a judgment leaves behind, as builtin types, and how it gets on pytest's report."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, get_args

import pytest

from pytest_attn.backends.machine import Machine
from pytest_attn.backends.raised import message_of
from pytest_attn.backends.subject import CallableSubject, Subject, name_of
from pytest_attn.cases.unjudged import REFUSED
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.reports.lines import raised_words, taken_apart, z_figure
from pytest_attn.reports.records import TEST, Record, is_wrong, latency_of, new_record
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.devices import NoTorchError
from pytest_attn.session.kinds import CaseParameter, asks_gradients, device_of, id_from_root, kind_of, parameter_of, typed_name
from pytest_attn.session.session import AttentionSession, session_of
from pytest_attn.version import __version__
from pytest_attn.workloads.catalog import Catalog
from pytest_attn.workloads.functions import shell_word
from pytest_attn.workloads.workload import Direction, Workload

#: the records of an item whose test is not done yet
RECORDS = pytest.StashKey[list[Record]]()
#: whether any has come on a report, of which a test with subtests has several
_HAS_RECORDS = pytest.StashKey[bool]()
_SHOWN = (
    *("name", "distribution", "passed", "z_element", "z_row", "z_head", "z_slope", "slope"),
    *("absmax", "mean_abs", "mse", "relative_l2", "cosine", "worst", "found", "exact", "budget", "wrong_positions"),
)
_SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim", "dtype")


def figures_of(comparison: Comparison | None) -> dict[str, Any]:
    """Return the fields of a record that say how close the tensor that is reported is to its limits; none without one."""
    if comparison is None:
        return {}
    reported, compilation = comparison.reported, comparison.compilation
    return {
        "tensor": reported.name,
        "distribution": reported.distribution,
        "z_element": reported.z_element,
        "z_row": reported.z_row,
        "z_head": reported.z_head,
        "z_slope": reported.z_slope,
        "tensors": tuple({name: getattr(row, name) for name in _SHOWN} for row in comparison.tensors),
        "faults": comparison.faults,
        "is_sampled": comparison.is_sampled,
        "untested": (*comparison.untested, *comparison.unjudged),
        "sampled": {name: list(counts) for name, counts in comparison.sampled.items()},
        "is_approximate": comparison.is_approximate,
        "compile_seconds": compilation.seconds if compilation else None,
        "graph_breaks": compilation.graph_breaks if compilation else 0,
    }


def facts_of(session: AttentionSession, workload: Workload, subject: Subject | str, device: str | None) -> dict[str, Any]:
    """Return the fields of a record that say what was judged, and where. device: the one that a marker names."""
    return {
        "workload": workload.id,
        "name": workload.name or "",
        **_of_workload(session.registrations.catalog, workload),
        "subject": name_of(subject),
        **_kernel(session, subject),
        "machine": _described(session.machines.machine(device)),
    }


@lru_cache(maxsize=256)  # every backend leaves a record of the same workload
def _of_workload(catalog: Catalog, workload: Workload) -> dict[str, Any]:
    """Say where the catalog has a workload; and its sizes, with the operations and bytes that its passes need."""
    passes = get_args(Direction)
    shape = {
        "id": workload.shape_id,
        **{name: getattr(workload, name) for name in _SIZES},
        "mask": workload.mask.label if workload.mask else "",
        "flops": {one: workload.flops(one) for one in passes},
        "bytes": {one: workload.bytes(one) for one in passes},
    }
    return {"group": catalog.group_of(workload.name), "aliases": tuple(catalog.aliases_of(workload.name)), "shape": shape}


def _kernel(session: AttentionSession, subject: Subject | str) -> dict[str, Any]:
    """Say which library a backend is of; a callable is of none, whatever its name."""
    if isinstance(subject, str) or not subject.is_backend:
        declared = subject.declared.stated if isinstance(subject, CallableSubject) else {}
        return {
            "tags": {"family": "callable", "backend": name_of(subject), "compile": "none"},
            "version": "",
            "declared": declared,
        }
    name, _, variant = subject.name.partition("+")
    tags = {"family": subject.library, "backend": name, "compile": variant or "none"}
    return {"tags": tags, "version": session.registrations.version_of(subject)}


@lru_cache
def _described(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "device": machine.device,
        "kind": machine.kind,
        "architecture": machine.architecture,
        "memory": machine.memory,
        "torch": str(machine.torch_version),  # torch has a class of its own for it
        "python": platform.python_version(),
        "pytest_attn": __version__,
    }


# -- on pytest's report of the test ------------------------------------------------------------------------------------


#: what a test may await, with pytest.raises or an xfail mark
_AWAITED = (Verdict.MISMATCH, Verdict.BROKEN, Verdict.NO_RESULT, Verdict.RAISED, Verdict.REGRESSED, Verdict.UNCONFIRMED)


def attach_records(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Move the item's records to its report; a failure that none of them tells gets one of its own.

    The report of a test's set-up says which case begins: nothing else is known of one whose process is killed.
    """
    if report.failed:
        _look_after(item, call, report)
    if report.when == "setup" and report.passed:
        report.attn_begins = {"test": id_from_root(item), **fields_of_case(parameter_of(item))}  # type: ignore[attr-defined]
    records = item.stash.get(RECORDS, [])
    item.stash[RECORDS] = []
    item.stash[_HAS_RECORDS] = bool(records) or (report.when != "setup" and item.stash.get(_HAS_RECORDS, False))
    finished = [_finished(record, item, report) for record in records]
    if report.failed and not any(map(is_wrong, finished)):
        finished += [_finished(record, item, report) for record in _failure(item, call, report)]
    if not finished:
        return
    report.attn = finished  # type: ignore[attr-defined]
    for added in map(_properties_of, finished):
        report.user_properties += added
        item.user_properties += added  # JUnit XML has those of the last report
    if report.when == "call" and report.passed:
        _skip_if_inconclusive(item, report, records)


def _skip_if_inconclusive(item: pytest.Item, report: pytest.TestReport, records: Sequence[Record]) -> None:
    """Have what could not be decided not look like a pass."""
    if doubts := [record["reason"] for record in records if record["verdict"] == Verdict.INCONCLUSIVE]:
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, f"Skipped: inconclusive latency: {doubts[0]}")


def _properties_of(record: Record) -> list[tuple[str, str]]:
    """Return what JUnit XML and the like say of a record: how near it is to its limits, and how fast."""
    of, found = record["subject"], []
    if record["z_element"] is not None:
        found.append((f"attn_z_{of}", f"{z_figure(record['z_element'])} ({record['tensor']})"))
    if (p50 := latency_of(record).get("p50")) is not None:
        found.append((f"attn_p50_{of}_{record['direction']}", f"{p50:.6g}"))
    return found


def _look_after(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Find out whether a failed test has left its device unusable, or whether others take its memory."""
    session = session_of(item.config)
    session.cuda.look_after(item.nodeid)
    if call.excinfo is not None and "out of memory" in message_of(call.excinfo.value) and session.sharers > 1:
        said = f"{session.sharers} workers share this device; fewer leave more memory to each: -n"
        report.sections.append(("attn", said))


def fields_of_case(parameter: CaseParameter | None) -> dict[str, str]:
    """Return the fields of a record that say which case it is, as far as that is known before it is made."""
    if parameter is None:
        return {"workload": "-", "subject": "-"}
    workload = parameter.workload
    return {"workload": workload.id, "name": workload.name or "", "subject": parameter.backend or "-"}


def _failure(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> list[Record]:
    """Return the record of a failure that no judgment has left: its kernel's, or the test's own."""
    parameter, error = parameter_of(item), call.excinfo.value if call.excinfo else None
    is_stage = report.when in ("setup", "call") and REFUSED not in item.stash
    if is_stage and not item.stash[_HAS_RECORDS] and parameter is not None and error is not None:
        return [_raised(item, parameter, raised_words(type(error).__name__, message_of(error)), error)]
    if not session_of(item.config).kernels.are_tested:
        return []  # of a kernel that the test was to find
    if error is None:
        reason = str(report.longrepr).partition("\n")[0].strip()
    elif isinstance(error, pytest.fail.Exception):
        reason = message_of(error).partition("\n")[0]
    else:
        reason = raised_words(type(error).__name__, message_of(error))
    command = f"pytest {shell_word(id_from_root(item))}"
    named: Any = {**fields_of_case(parameter), "test": id_from_root(item), "reason": reason, "command": command}
    return [new_record(**named, question=TEST, verdict=Verdict.FAILED.value)]


def _finished(record: Record, item: pytest.Item, report: pytest.TestReport) -> Record:
    """Add what is known at the end: when and where, how long it took, and whether what is wrong was expected to be."""
    is_awaited = report.outcome == "passed" or hasattr(report, "wasxfail")
    verdict = Verdict.EXPECTED.value if is_awaited and record["verdict"] in _AWAITED else record["verdict"]
    date = datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds")
    line = (item.location[1] or 0) + 1
    seconds, phase = round(report.duration, 4), report.when or ""
    return {**record, "verdict": verdict, "date": date, "seconds": seconds, "line": line, "phase": phase}


def _raised(item: pytest.Item, parameter: CaseParameter, reason: str, error: BaseException) -> Record:
    """Return the record of a test that raised without a judgment; its explanation is what was noted beneath the error."""
    notes = getattr(error, "__notes__", ())
    noted = taken_apart("\n".join([reason, *notes])) if notes else []
    case = getattr(item, "funcargs", {}).get("attn")
    context = getattr(case, "_context", None)
    subject = (context and (context.asked or context.backend)) or parameter.backend or "-"
    command = context.command() if context else f"pytest {shell_word(typed_name(item))}"
    try:
        facts = facts_of(session_of(item.config), parameter.workload, subject, device_of(item))
    except (ValueError, NoTorchError):  # of a device that is not there, which is why the test raised
        facts = {**fields_of_case(parameter), "subject": name_of(subject)}
    if unknown := kind_of(item).unknown:
        facts |= {"workload": unknown, "shape": {}}
    return new_record(
        **facts,
        test=id_from_root(item),
        question=getattr(context, "question", "check"),
        verdict=Verdict.RAISED.value,
        reason=reason,
        explanation=[line for line in noted if line["label"] != "reproduce"],
        command=command,
        direction="forward+backward" if asks_gradients(item) else "forward",
    )
