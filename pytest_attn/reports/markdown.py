"""Output for code hosts: pages in Markdown of --attn-output and of a job of GitHub Actions, and annotations beside a test."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from pytest_attn.reports.latency_output import closing as closing_of_latencies
from pytest_attn.reports.latency_output import decided
from pytest_attn.reports.lines import count, duration_in_column, labeled, together
from pytest_attn.reports.records import Record, gathered, is_judged, latency_of, verdict_of
from pytest_attn.reports.terminal import closing as closing_of_checks
from pytest_attn.reports.terminal import ending, inapplicable, untested
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.seam import each
from pytest_attn.workloads.functions import printable, printable_lines

#: GitHub takes a summary of at most 1 MiB
_MOST_ROWS = 200
#: failures that are shown in full, and characters of one: where it hung, stacks are part
_MOST_IN_FULL, _LONGEST = 20, 8000


def markdown_summary(records: Sequence[Record]) -> str:
    """Return a page: how the run went in a sentence or two, what is wrong, what is in doubt, every latency, the machine."""
    parts = chain(
        ["## Attention", ""],
        _sentences(records),
        _table("Wrong", [r for r in records if (verdict := verdict_of(r)) and verdict.is_wrong]),
        _table("In doubt", [r for r in records if (verdict := verdict_of(r)) and verdict.is_doubtful]),
        _latencies([r for r in records if latency_of(r) and latency_of(r).get("p50")]),
        _unseen(records),
        _of_guests(records),
        _machines(records),
    )
    return "\n".join(parts) + "\n"


def _sentences(records: Sequence[Record]) -> Iterator[str]:
    for said in ending(records):
        yield from (as_text(said), "")
    judged = [r for r in records if r["question"] != "latency"]
    timed = [r for r in records if r["question"] == "latency"]
    if judged:
        yield from (f"{as_text(closing_of_checks(judged)[0])}.", "")
    if timed:
        yield from (f"{as_text(closing_of_latencies(timed)[0])}.", "")
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
        named = (as_code(r["subject"]), as_code(r["workload"]), r["direction"])
        if not is_judged(r):
            named = ("-", as_code(r["test"]), r["phase"])
        yield as_row(r["verdict"], *named, as_text(r["reason"]), as_code(r["command"]))
    yield from _rest(records)
    for r in [r for r in records if r["explanation"]][:_MOST_IN_FULL]:
        text = f"{_said(r)}\n{printable_lines(labeled('reproduce', r['command']))}"
        fence = "`" * max(3, _most_backticks(text) + 1)
        yield from (f"{fence}text", text, fence, "")


def _said(record: Record) -> str:
    """Return what a failure says in a terminal, but the command that repeats it."""
    said = printable_lines(together(record["explanation"]))
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."


def _latencies(records: Sequence[Record]) -> Iterator[str]:
    """A folded table: those that changed most first."""
    if not records:
        return
    yield from ("<details><summary>Latencies</summary>", "")
    yield from ("| p50 | change | kernel | workload | pass | verdict |", "| ---: | ---: | --- | --- | --- | --- |")
    for r in sorted(records, key=lambda r: -abs(_change(r) or 0.0))[:_MOST_ROWS]:
        change = _change(r)
        shown = "" if change is None else f"{change:+.1%}"
        whose = (as_code(r["subject"]), as_code(r["workload"]), r["direction"], r["verdict"])
        yield as_row(duration_in_column(decided(latency_of(r))), shown, *whose)
    yield from _rest(records)
    yield from ("</details>", "")


def as_row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def _rest(records: Sequence[object]) -> Iterator[str]:
    yield ""
    if len(records) > _MOST_ROWS:
        yield from (f"... and {len(records) - _MOST_ROWS} more", "")


def _change(record: Record) -> float | None:
    decision = latency_of(record).get("decision") or {}
    return decision.get("change")


def _unseen(records: Sequence[Record]) -> Iterator[str]:
    for title, found in (("Untested", untested(records)), ("Invariants that did not apply", inapplicable(records))):
        lines = [f"- {as_text(line)}" for line in found]
        if lines:
            yield from (f"### {title}", "", *lines[:_MOST_ROWS], "")
            yield from _rest(lines)


def _of_guests(records: Sequence[Record]) -> Iterator[str]:
    for title, texts in (one for results in each("results") for one in results(records)):
        if texts:
            yield from (f"### {title}", "", *(f"- {as_text(one)}" for one in texts), "")


def _machines(records: Sequence[Record]) -> Iterator[str]:
    machines = (r["machine"] for r in records if r["machine"])
    said = (f"{one.get('name', 'unknown')} ({one.get('device', '')}), torch {one.get('torch', '')}" for one in machines)
    yield from dict.fromkeys(map(as_text, said))


def as_text(text: str) -> str:
    """Return text that Markdown, its tables and HTML leave as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", _on_one_line(text))


def _on_one_line(text: str) -> str:
    return printable(" ".join(text.split()), 0)


def _most_backticks(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def as_code(text: str) -> str:
    """Return text as code: fenced by more backticks than it has, and with its pipes escaped, as tables ask for."""
    longest = _most_backticks(text)
    fence, room = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{room}{_on_one_line(text)}{room}{fence}".replace("|", "\\|") if text else ""


# -- which backend passed, refused or failed which group of workloads --------------------------------------------------

#: how a cell says what happened to its cases, the gravest first; a skip is a refusal here
_SHOWN = (
    *(Verdict.MISMATCH, Verdict.NO_RESULT, Verdict.RAISED, Verdict.KNOWN_DEFECT, Verdict.EXPECTED, Verdict.PASSED),
    *(Verdict.SKIPPED,),
)
_MISSING = Cause.NOT_HERE.value
_WORDS = {verdict: verdict.word for verdict in _SHOWN} | {Verdict.SKIPPED: "refused"}


def support_page(records: Sequence[Record], groups: Mapping[str, str], title: str) -> str:
    """Return a Markdown page: a table of backend x group, then every reason of a refusal, defect or failure.

    groups: the group of each workload's id; workloads of no group stand for themselves. title: machine, date, versions.
    A backend that the machine lacks is "not here" in every column.
    """
    missing = {record["subject"] for record in records if record["cause"] == Cause.NOT_HERE}
    cells: dict[str, dict[str, Counter[str]]] = {record["subject"]: {} for record in records}
    for record in records:
        if record["subject"] not in missing:
            group = groups.get(record["name"], record["workload"])
            cells[record["subject"]].setdefault(group, Counter())[record["verdict"]] += 1
    columns = list(dict.fromkeys(group for row in cells.values() for group in row)) or ["cases"]
    lines = [
        "# Which backend runs what",
        "",
        title,
        "",
        as_row("backend", *map(as_text, columns)),
        as_row(*["---"] * (len(columns) + 1)),
    ]
    for backend, row in cells.items():
        shown = [_MISSING if backend in missing else _verdicts(row.get(group, Counter())) for group in columns]
        lines.append(as_row(as_code(backend), *shown))
    return "\n".join([*lines, *_reasons(records)]) + "\n"


def _verdicts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[verdict]} {word}" for verdict, word in _WORDS.items() if counts[verdict]) or "-"


def _reasons(records: Sequence[Record]) -> list[str]:
    """List, for each backend, its reasons with how many cases each holds, the gravest first."""
    lines = []
    for verdict, word in _WORDS.items():
        told = [r for r in records if r["verdict"] == verdict and r["reason"]] if verdict is not Verdict.PASSED else []
        lines += ["", f"## {word.capitalize()} because"] if told else []
        for backend, reasons in gathered((r["subject"], r["reason"]) for r in told).items():
            lines += ["", f"{as_code(backend)}:", ""]
            for reason, number in Counter(reasons).most_common():  # what is Markdown in it stays
                lines.append(f"- {_on_one_line(reason)} ({count(number, 'case')})".replace("<", "\\<"))
    return lines


# -- annotations that show up beside the lines of a test in a pull request ------------------------------------------------

#: GitHub shows ten of each level for a step, and silently drops the others
_MOST_ANNOTATIONS = 10


def workflow_commands(records: Sequence[Record]) -> Iterator[str]:
    """Yield workflow commands, at most ten of each level, the last of which counts the rest."""
    for level in ("error", "warning", "notice"):
        marked = [record for record in records if (verdict := verdict_of(record)) and verdict.level == level]
        shown = marked if len(marked) <= _MOST_ANNOTATIONS else marked[: _MOST_ANNOTATIONS - 1]
        yield from (_annotation(level, record) for record in shown)
        if len(marked) > len(shown):
            yield f"::{level} title=pytest-attn::{len(marked) - len(shown)} more; the job's summary lists them"


def _annotation(level: str, record: Record) -> str:
    named = f"{record['subject']} on {record['workload']}" if is_judged(record) else record["test"]
    title = printable(f"{record['verdict']}: {named}", 0)
    said = f"{_said(record)}\n  reproduce" if record["explanation"] else record["reason"]  # the command is easily copied
    text = "\n".join(part for part in (said, record["command"]) if part) or record["verdict"]
    place = {"file": printable(record["test"].partition("::")[0], 0), "line": str(record["line"] or 1), "title": title}
    properties = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in place.items())
    return f"::{level} {properties}::{_escaped(printable_lines(text))}"


def _escaped(text: str, also: str = "") -> str:
    """Escape what ends a workflow command or one of its properties (actions/toolkit, packages/core/src/command.ts)."""
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
