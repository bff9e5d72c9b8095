"""The files that a run writes for people and machines, beside what it prints."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import pytest

from pytest_attn.reports import files
from pytest_attn.reports.github import workflow_commands
from pytest_attn.reports.markdown import markdown_summary, support_page
from pytest_attn.reports.records import Record
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.json_lines import JsonLines
from pytest_attn.session.manifest import Manifest
from pytest_attn.session.session import AttentionSession


def open_json_lines(session: AttentionSession, config: pytest.Config) -> None:
    """Have records written to the .jsonl file of --attn-output, unless another process writes it, and all tests noted."""
    session.manifest = Manifest(config, session.settings, session.machines)
    config.pluginmanager.register(session.manifest, "attn-manifest")
    if session.settings.json is not None and not hasattr(config, "workerinput"):
        session.results.write_to(JsonLines(session.settings.json, session.settings.json_samples), session.manifest)


def write_summaries(session: AttentionSession, reporter: Any) -> None:
    """Write the .md file of --attn-output; in a job of GitHub Actions also its annotations, and its summary."""
    in_a_job = os.environ.get("GITHUB_ACTIONS") == "true"
    if session.settings.summary:
        write_whole("--attn-output", session.settings.summary, lambda: markdown_summary(session.results.records), reporter)
    if in_a_job and session.results.records:
        for command in workflow_commands(session.results.records):
            reporter.write_line(command)
        if path := os.environ.get("GITHUB_STEP_SUMMARY"):
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(markdown_summary(session.results.records))
            except OSError as error:
                reporter.write_line(f"GITHUB_STEP_SUMMARY: cannot write {path}: {error}", red=True)


def place_of(session: AttentionSession) -> Callable[[Any], tuple[int, str]]:
    """Return the order of backends in the registry, as a key for records, which arrive from workers in any order."""
    names = session.registrations.registry.names

    def place(record: Any) -> tuple[int, str]:
        base = record["subject"].partition("+")[0]
        return (names.index(base) if base in names else len(names), record["subject"])

    return place


def write_support(session: AttentionSession, path: str, reporter: Any) -> None:
    """Write the .support.md file of --attn-output atomically, in the order of registry and catalog."""
    from pytest_attn.backends.registry import status_of

    machine = session.machines.machine()
    groups = {str(entry.workload.name): entry.group for entry in session.registrations.catalog}
    columns = list(dict.fromkeys(groups.values()))
    by_backend = place_of(session)

    def place(record: Record) -> tuple[int, str, int]:
        group = groups.get(record["name"])
        return (*by_backend(record), columns.index(group) if group else len(columns))

    judged = [r for r in session.results.records if r["question"] == "check"]
    records = sorted(judged, key=place)
    ran = dict.fromkeys(r["subject"] for r in records if r["verdict"] != Verdict.SKIPPED)
    backends = [session.registrations.registry[name] for name in ran if session.registrations.registry.is_known(name)]
    versions = [f"{backend.name} {status_of(backend, machine)[1]}" for backend in backends]
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    title = f"Run on {today} on {machine.name}, torch {machine.torch_version}: {', '.join(versions)}."
    write_whole("--attn-output", path, lambda: support_page(records, groups, title), reporter)


def require_report_libraries() -> None:
    """Raise pytest.UsageError where what draws the charts of a report is not installed."""
    from pytest_attn.reports.html.page import INSTALL, missing_libraries

    if missing := missing_libraries():
        raise pytest.UsageError(f"--attn-output=FILE.html: needs {' and '.join(missing)}; {INSTALL}")


def write_report(session: AttentionSession, path: str, reporter: Any) -> None:
    """Write the .html file of --attn-output atomically, with backends in the order of the registry."""
    from pytest_attn.reports.html.page import report_page

    records = sorted(session.results.records, key=place_of(session))
    write_whole("--attn-output", path, lambda: report_page(records), reporter)


def write_whole(flag: str, path: str, text: Callable[[], str], reporter: Any) -> None:
    """Write a file atomically; say that it is written, or why not, and go on."""
    try:
        files.write_atomically(path, text())
        reporter.write_line(f"{flag}: written to {path}")
    except OSError as error:
        reporter.write_line(f"{flag}: cannot write {path}: {error}", red=True)
