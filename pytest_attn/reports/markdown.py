"""The summary in Markdown: of --attn-output=FILE.md, and of a job of GitHub Actions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from pytest_attn.messages.durations import duration_in_column
from pytest_attn.reports.latency import closing as closing_of_latencies
from pytest_attn.reports.records import Record, latency_of, verdict_of
from pytest_attn.reports.terminal import closing as closing_of_checks

#: GitHub takes a summary of at most 1 MiB
_MOST_ROWS = 200


def markdown_summary(records: Sequence[Record]) -> str:
    """Return a page: how the run went in a sentence or two, what is wrong, what is in doubt, every latency, the machine."""
    parts = chain(
        ["## Attention", ""],
        _sentences(records),
        _table("Wrong", [r for r in records if (verdict := verdict_of(r)) and verdict.is_wrong]),
        _table("In doubt", [r for r in records if (verdict := verdict_of(r)) and verdict.is_doubtful]),
        _latencies([r for r in records if latency_of(r) and latency_of(r).get("p50")]),
        _machines(records),
    )
    return "\n".join(parts) + "\n"


def _sentences(records: Sequence[Record]) -> Iterator[str]:
    judged = [r for r in records if r["question"] != "latency"]
    timed = [r for r in records if r["question"] == "latency"]
    if judged:
        yield from (f"{_text(closing_of_checks(judged)[0])}.", "")
    if timed:
        yield from (f"{_text(closing_of_latencies(timed)[0])}.", "")
    if not records:
        yield from ("No attention test ran.", "")


def _table(title: str, records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    yield from (
        f"### {title}",
        "",
        "| verdict | kernel | workload | pass | why | again |",
        "| --- | --- | --- | --- | --- | --- |",
    )
    for r in records[:_MOST_ROWS]:
        cells = (
            r["verdict"],
            _code(r["subject"]),
            _code(r["workload"]),
            r["direction"],
            _text(r["reason"]),
            _code(r["command"]),
        )
        yield f"| {' | '.join(cells)} |"
    yield from _rest(records)


def _latencies(records: Sequence[Record]) -> Iterator[str]:
    """A folded table: those that changed most first."""
    if not records:
        return
    yield from ("<details><summary>Latencies</summary>", "")
    yield from ("| p50 | change | kernel | workload | pass | verdict |", "| ---: | ---: | --- | --- | --- | --- |")
    for r in sorted(records, key=lambda r: -abs(_change(r) or 0.0))[:_MOST_ROWS]:
        change = _change(r)
        shown = "" if change is None else f"{change:+.1%}"
        whose = (_code(r["subject"]), _code(r["workload"]), r["direction"], r["verdict"])
        yield _row(duration_in_column(latency_of(r)["p50"]), shown, *whose)
    yield from _rest(records)
    yield from ("</details>", "")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rest(records: Sequence[Record]) -> Iterator[str]:
    yield ""
    if len(records) > _MOST_ROWS:
        yield from (f"... and {len(records) - _MOST_ROWS} more", "")


def _change(record: Record) -> float | None:
    decision = latency_of(record).get("decision") or {}
    change: float | None = decision.get("change")
    return change


def _machines(records: Sequence[Record]) -> Iterator[str]:
    found = Counter(
        f"{r['machine']['name']} ({r['machine']['device']}), torch {r['machine']['torch']}" for r in records if r["machine"]
    )
    for machine in found:
        yield _text(machine)


def _text(text: str) -> str:
    """Return text that Markdown, its tables and HTML leave as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Return text as code: fenced by more backticks than it has, and with its pipes escaped, as tables ask for."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence, room = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{room}{' '.join(text.split())}{room}{fence}".replace("|", "\\|") if text else ""
