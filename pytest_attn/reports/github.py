"""GitHub's words: annotations that show up beside the lines of a test in a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_attn.reports.records import Record, verdict_of

#: GitHub shows ten of each level for a step, and silently drops the others
_SHOWN = 10


def workflow_commands(records: Sequence[Record]) -> Iterator[str]:
    """Yield workflow commands, at most ten of each level, the last of which counts the rest."""
    for level in ("error", "warning", "notice"):
        marked = [record for record in records if (verdict := verdict_of(record)) and verdict.level == level]
        shown = marked if len(marked) <= _SHOWN else marked[: _SHOWN - 1]
        yield from (_annotation(level, record) for record in shown)
        if len(marked) > len(shown):
            yield f"::{level} title=pytest-attn::{len(marked) - len(shown)} more; the job's summary lists them"


def _annotation(level: str, record: Record) -> str:
    title = f"{record['verdict']}: {record['subject']} on {record['workload']}"
    text = "\n".join(part for part in (record["reason"], record["command"]) if part) or record["verdict"]
    place = {"file": record["test"].partition("::")[0], "line": str(record["line"] or 1), "title": title}
    properties = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in place.items())
    return f"::{level} {properties}::{_escaped(text)}"


def _escaped(text: str, also: str = "") -> str:
    """Escape what ends a workflow command or one of its properties (actions/toolkit, packages/core/src/command.ts)."""
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
