"""The files that a run writes for people and machines, beside what it prints."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pytest_attn.reports import files
from pytest_attn.reports.github import workflow_commands
from pytest_attn.reports.markdown import markdown_summary
from pytest_attn.reports.records import Record, RecordWriter
from pytest_attn.session.store import AttentionSession


class JsonLines:
    """The file of --attn-json, in the process that collects the records. Where it cannot be written, the run goes on."""

    def __init__(self, path: str, with_samples: bool) -> None:
        self.problem = ""
        self.path, self._writer = path, RecordWriter(path, with_samples)

    def write(self, records: Iterable[Record]) -> None:
        """Append records, until one cannot be written."""
        self._attempt(lambda: self._writer.write(records))

    def close(self) -> None:
        """Finish the file."""
        self._attempt(self._writer.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self.problem:
            try:
                action()
            except OSError as error:
                self.problem = f"--attn-json: cannot write {self.path}: {error}"


def json_lines(session: AttentionSession, config: pytest.Config) -> JsonLines | None:
    """Return what writes the file of --attn-json, None where it is not asked for or another process writes it."""
    if session.settings.json is None or hasattr(config, "workerinput"):
        return None
    return JsonLines(session.settings.json, session.settings.json_samples)


def write_summaries(session: AttentionSession, reporter: Any) -> None:
    """Write --attn-summary; in a job of GitHub Actions also its annotations, and its summary."""
    in_a_job = os.environ.get("GITHUB_ACTIONS") == "true"
    if session.settings.summary:
        write_whole("--attn-summary", session.settings.summary, lambda: markdown_summary(session.records), reporter)
    if in_a_job and session.records:
        for command in workflow_commands(session.records):
            reporter.write_line(command)
        if path := os.environ.get("GITHUB_STEP_SUMMARY"):
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(markdown_summary(session.records))
            except OSError as error:
                reporter.write_line(f"GITHUB_STEP_SUMMARY: cannot write {path}: {error}", red=True)


def place_of(session: AttentionSession) -> Callable[[Any], tuple[int, str]]:
    """Return the order of backends in the registry, as a key for records, which arrive from workers in any order."""
    names = session.registry.names

    def place(record: Any) -> tuple[int, str]:
        base = record["subject"].partition("+")[0]
        return (names.index(base) if base in names else len(names), record["subject"])

    return place


def write_support(session: AttentionSession, path: str, reporter: Any) -> None:
    """Write the page of --attn-support, whole or not at all, in the order of registry and catalog."""
    from pytest_attn.backends.listing import status_of
    from pytest_attn.reports.support import support_page

    machine = session.machine()
    groups = {str(entry.workload.name): entry.group for entry in session.catalog}
    columns = list(dict.fromkeys(groups.values()))
    by_backend = place_of(session)

    def place(record: dict[str, Any]) -> tuple[int, str, int]:
        group = groups.get(record["name"])
        return (*by_backend(record), columns.index(group) if group else len(columns))

    judged = [r for r in session.records if r["question"] == "check"]
    records = sorted(judged, key=place)
    ran = dict.fromkeys(r["subject"] for r in records if r["verdict"] != "skipped")
    backends = [session.registry[name] for name in ran if session.registry.is_known(name)]
    versions = [f"{backend.name} {status_of(backend, machine)[1]}" for backend in backends]
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    title = f"Run on {today} on {machine.name}, torch {machine.torch_version}: {', '.join(versions)}."
    write_whole("--attn-support", path, lambda: support_page(records, groups, title), reporter)


def require_report_libraries() -> None:
    """Raise pytest.UsageError where what draws the charts of --attn-report is not installed."""
    from pytest_attn.reports.html.page import INSTALL, missing_libraries

    if missing := missing_libraries():
        raise pytest.UsageError(f"--attn-report: needs {' and '.join(missing)}; {INSTALL}")


def write_report(session: AttentionSession, path: str, reporter: Any) -> None:
    """Write the page of --attn-report, whole or not at all, with backends in the order of the registry."""
    from pytest_attn.reports.html.page import report_page

    records = sorted(session.records, key=place_of(session))
    write_whole("--attn-report", path, lambda: report_page(records), reporter)


def write_whole(flag: str, path: str, text: Callable[[], str], reporter: Any) -> None:
    """Write a file whole or not at all; say that it is written, or why not, and go on."""
    try:
        files.write_whole(path, text())
        reporter.write_line(f"{flag}: written to {path}")
    except OSError as error:
        reporter.write_line(f"{flag}: cannot write {path}: {error}", red=True)
