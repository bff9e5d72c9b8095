"""What a run has found so far: the records of finished cases, in the one process or in the controller of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_attn.reports.records import Record
    from pytest_attn.session.json_lines import JsonLines
    from pytest_attn.session.manifest import Manifest


class Results:
    """A plugin of pytest that takes the records off its test reports, on which they also come from xdist's workers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.mutants: list[dict[str, Any]] = []  # what happened to each faulty kernel in each case
        self._lines: JsonLines | None = None
        self._manifest: Manifest | None = None
        self._held: list[Record] = []  # what is to be recorded, until it is

    def write_to(self, lines: JsonLines, manifest: Manifest) -> None:
        """Also write each record to a .jsonl file, as it comes, and last what the run collected and ran."""
        self._lines, self._manifest = lines, manifest

    def pytest_sessionstart(self) -> None:
        """Begin the file at once: that of an earlier run must not stand for this one if it is killed."""
        if self._lines is not None:
            self._lines.write([])

    def replace(self, is_meant: Callable[[Record], bool], changes: Callable[[Record], Mapping[str, Any]]) -> None:
        """Change fields of records, as where what was to be recorded was not."""
        from pytest_attn.reports.records import changed

        for records in (self.records, self._held):
            records[:] = [changed(one, **changes(one)) if is_meant(one) else one for one in records]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a report carries."""
        records = getattr(report, "attn", ())
        self.records.extend(records)
        if records and self._lines is not None:
            from pytest_attn.reports.verdict import Verdict

            self._held += [one for one in records if one["verdict"] == Verdict.RECORDED]
            self._lines.write(one for one in records if one["verdict"] != Verdict.RECORDED)
        if found := getattr(report, "attn_mutant", None):
            self.mutants.append(found)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        """Finish the .jsonl file of --attn-output."""
        if self._lines is not None:
            self._lines.write(self._held)
            if self._manifest is not None:
                self._lines.write_lines([self._manifest.closing_line(int(exitstatus), len(self.records))])
            self._lines.close()
            if self._lines.problem:
                terminalreporter.write_line(self._lines.problem, red=True)
            else:
                terminalreporter.write_line(f"--attn-output: written to {self._lines.path}")
