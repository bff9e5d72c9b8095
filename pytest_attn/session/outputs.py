"""The files that a run writes for people and machines, beside what it prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pytest_attn.reports.github import workflow_commands
from pytest_attn.reports.markdown import markdown_summary
from pytest_attn.reports.records import Record, RecordWriter
from pytest_attn.session.store import AttentionSession


class JsonLines:
    """The file of --attn-json, in the process that collects the records. Where it cannot be written, the run goes on."""

    def __init__(self, path: str, with_samples: bool) -> None:
        self.problem = ""
        self._path, self._writer = path, RecordWriter(path, with_samples)

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
                self.problem = f"--attn-json: cannot write {self._path}: {error}"


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


def write_whole(flag: str, path: str, text: Callable[[], str], reporter: Any) -> None:
    """Write a file whole or not at all; say where that fails, and go on."""
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text(), encoding="utf-8")
        unfinished.replace(target)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        reporter.write_line(f"{flag}: cannot write {path}: {error}", red=True)
