"""The .jsonl file of --attn-output, written as the run goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytest_attn.reports.records import Record, RecordWriter


class JsonLines:
    """The file, in the process that collects the records. If it cannot be written, the run goes on."""

    def __init__(self, path: str, with_samples: bool) -> None:
        self.problem = ""
        self.path, self._writer = path, RecordWriter(path, with_samples)

    def write(self, records: Iterable[Record]) -> None:
        """Append records, until one cannot be written."""
        self._attempt(lambda: self._writer.write(records))

    def write_lines(self, lines: Iterable[str]) -> None:
        """Append lines other than records in the same way."""
        self._attempt(lambda: self._writer.write_lines(lines))

    def close(self) -> None:
        """Finish the file."""
        self._attempt(self._writer.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self.problem:
            try:
                action()
            except OSError as error:
                self.problem = f"--attn-output: cannot write {self.path}: {error}"
