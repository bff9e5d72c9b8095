"""`python -m pytest_attn history FILE.jsonl ... -o page.html`: one file per commit or night on one page, which opens offline.

What differs between a case and the one before it is what `compare` finds in the two, by the gate's rule. No change point is
looked for.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from pytest_attn.guests.against.compare_records import changes, judged, told_apart
from pytest_attn.reports.files import write_atomically
from pytest_attn.reports.html.page import asset, policy, shown_verdict, words_of
from pytest_attn.reports.latency_output import decided
from pytest_attn.reports.lines import count, duration, z_figure
from pytest_attn.reports.merging import usage_errors
from pytest_attn.reports.records import Record, failures, is_judged, latency_of, read_records
from pytest_attn.reports.runs import read_runs
from pytest_attn.workloads.functions import printable

#: pixels between two runs, and of the height of a chart
_STEP, _HEIGHT = 72, 140
_OF_MACHINE = ("name", "torch", "python", "pytest_attn")
#: a condition of a time that adds nothing to Python's version
_TOO_LONG = "interpreter"


class Night(NamedTuple):
    """One file: when its run began, of which commit, its last record of each case, and what it ran with, by name."""

    date: str
    commit: str
    records: Sequence[Record]
    conditions: dict[str, str]

    @property
    def label(self) -> str:
        """Its column."""
        return f"{self.date[:16].replace('T', ' ')} {self.commit[:10]}".strip()


class Series(NamedTuple):
    """The records of each case, by the number of their night; by the id of one how it differs from that before, or would."""

    cases: dict[tuple[str, ...], dict[int, Record]]
    differences: dict[int, list[tuple[str, str, str]]]
    least: dict[int, float]


def run_history(given: argparse.Namespace) -> int:
    """Write the page; return 0. Files that cannot be read or written are a usage error: exit 2."""
    out = given.output
    if not out.endswith(".html") or os.path.realpath(out) in map(os.path.realpath, given.files):
        given.error(f"-o must end in .html and be none of the input files, got {out!r}")
    with usage_errors(given):
        nights = sorted(map(_night, given.files), key=lambda night: night.date)
        series = series_of(nights)
        write_atomically(out, history_page(nights, series))
    counts = count(len(nights), "run"), count(len(series.cases), "case"), count(len(series.differences), "difference")
    print(f"{', '.join(counts)} between neighbours: written to {out}")
    return 0


def _night(path: str) -> Night:
    """Read a file. Raises ValueError where it has no records."""
    found = [one for one in read_records(path) if is_judged(one)]
    if not found:
        raise ValueError(f"{path} has no judgments; was its run stopped before the first test? leave it out")
    commits = dict.fromkeys(run.facts["commit"] for run in read_runs(path) if run.facts)
    told: dict[str, set[str]] = {}
    for record in found:
        own = {record["tags"].get("family", ""): record["version"], **latency_of(record).get("conditions", {})}
        own |= {name: record["machine"].get(name) for name in _OF_MACHINE}
        for name, value in own.items():
            if value and name != _TOO_LONG:
                told.setdefault(name, set()).add(str(value))
    conditions = {name: ", ".join(sorted(values)) for name, values in told.items()}
    last = [records[-1] for records in judged(found).values()]
    return Night(min(one["date"] for one in found), " ".join(commits), last, conditions)


def series_of(nights: Sequence[Night]) -> Series:
    """Compare each case with the last night that has it, on the same machine where there is one."""
    series = Series({}, {}, {})
    for number, night in enumerate(nights):
        machines = {key: record["machine"].get("name") for key, (record,) in judged(night.records).items()}
        before = [_last(of_case.values(), machines.get(key)) for key, of_case in series.cases.items()]
        for now, *said in changes(before, night.records):
            series.differences.setdefault(id(now), []).append(tuple(said))  # type: ignore[arg-type]
        series.least.update((id(now), least) for now, least in told_apart(before, night.records))
        for key, (record,) in judged(night.records).items():
            series.cases.setdefault(key, {})[number] = record
    return series


def _last(records: Iterable[Record], machine: str | None) -> Record:
    *_, last = sorted(records, key=lambda record: record["machine"].get("name") == machine)
    return last


# -- the page ------------------------------------------------------------------------------------------------------------


def history_page(nights: Sequence[Night], series: Series) -> str:
    """Return the whole page, which loads nothing and runs no script."""
    labels = [night.label for night in nights]
    title = f"{count(len(nights), 'run')} of pytest-attn, {labels[0]} to {labels[-1]}"
    charts = [_figure(key, found, nights, series) for key, found in series.cases.items() if len(list(_timed(found))) > 1]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy()}">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<title>{_text(title)}</title><style>{asset("style.css")}</style></head><body>
<h1>{_text(title)}</h1>
<p>A case is compared with the last run before that has it, of the same machine if there is one, by the gate's rule.
What differs is marked.
No change point is looked for.</p>
<h2>Runs</h2>{_table(("run", "cases", "failed", "what else changed"), _runs(nights))}
<h2>What differs</h2>{_table(("run", "what", "kernel", "workload", "before", "then"), _differences(labels, series))}
<h2>Times</h2><p>p50s with their intervals; red is slower than before, green faster. Dashed: another version or machine.</p>
{"".join(charts)}
<h2>Verdicts and z</h2>{_table(("question", "kernel", "workload", "direction", *labels), _verdicts(nights, series))}
</body></html>
"""


def _runs(nights: Sequence[Night]) -> Iterator[Iterable[str]]:
    for before, night in zip((None, *nights), nights, strict=False):
        told = _changed(before, night) if before else [f"{name} {value}" for name, value in night.conditions.items()]
        yield map(_cell, (night.label, str(len(night.records)), str(failures(night.records)), "; ".join(told)))


def _changed(before: Night, night: Night) -> list[str]:
    names = before.conditions.keys() & night.conditions.keys()
    pairs = {name: (before.conditions[name], night.conditions[name]) for name in sorted(names)}
    return [f"{name} {then} -> {now}" for name, (then, now) in pairs.items() if then != now]


def _differences(labels: Sequence[str], series: Series) -> Iterator[Iterable[str]]:
    for number, label in enumerate(labels):
        for one in (found[number] for found in series.cases.values() if number in found):
            for what, before, after in series.differences.get(id(one), ()):
                yield map(_cell, (label, what, one["subject"], one["workload"], before, after))


def _verdicts(nights: Sequence[Night], series: Series) -> Iterator[Iterable[str]]:
    for (_, question, *case), found in series.cases.items():
        cells = (_verdict(found[at], series) if at in found else _cell("") for at in range(len(nights)))
        yield (*map(_cell, (question, *case)), *cells)


def _verdict(record: Record, series: Series) -> str:
    words = words_of(shown_verdict(record))
    z, taken = record["z_element"], latency_of(record)
    figures = duration(decided(taken)) if taken.get("p50") else "" if z is None else f"z {z_figure(z)}"
    least = f" (+{series.least[id(record)]:.1%} would show)" if id(record) in series.least else ""
    mark = " *" if id(record) in series.differences else ""
    return _cell(f"{words.glyph} {words.word} {figures}{least}{mark}", words.tone)


def _timed(found: dict[int, Record]) -> Iterator[tuple[int, float, float, float, Record]]:
    for number, record in found.items():
        if (taken := latency_of(record)).get("p50"):
            p50 = decided(taken)
            yield number, p50, min(p50, taken["interval"][0]), max(p50, taken["interval"][1]), record


def _figure(key: tuple[str, ...], found: dict[int, Record], nights: Sequence[Night], series: Series) -> str:
    """Return the chart of one case."""
    points = list(_timed(found))
    least, most = min(low for _, _, low, _, _ in points), max(high for _, _, _, high, _ in points)
    width, scale = _STEP * len(nights), (_HEIGHT - 20) / ((most - least) or 1.0)

    def line(x: float, low: float, high: float, style: str, said: str) -> str:
        y = [10 + (most - one) * scale for one in (low, high)]
        return f'<line x1="{x}" x2="{x}" y1="{y[0]:.1f}" y2="{y[1]:.1f}" style="{style}"><title>{_text(said)}</title></line>'

    drawn = [
        line(_STEP * number, least, most, "stroke:var(--doubt);stroke-dasharray:4", "; ".join(told))
        for number in range(1, len(nights))
        if (told := _changed(nights[number - 1], nights[number]))
    ]
    for number, p50, low, high, record in points:
        what = {said[0] for said in series.differences.get(id(record), ())}
        color = "bad" if "slower" in what else "good" if "faster" in what else "plain"
        said = f"{nights[number].label}: {duration(p50)}, {duration(low)} to {duration(high)}"
        x = _STEP * (number + 0.5)
        drawn.append(line(x, low, high, f"stroke:var(--{color});stroke-width:2", said))
        drawn.append(f'<circle cx="{x}" cy="{10 + (most - p50) * scale:.1f}" r="4" style="fill:var(--{color})"/>')
    _, _, subject, workload, direction = key
    caption = f"{subject} on {workload}, {direction}: {duration(least)} to {duration(most)}"
    svg = f'<svg role="img" aria-label="{_text(caption)}" width="{width}" height="{_HEIGHT}">{"".join(drawn)}</svg>'
    return f'<figure><figcaption>{_text(caption)}</figcaption><div class="scroll">{svg}</div></figure>'


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{_text(one)}</th>" for one in titles)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f'<div class="scroll"><table class="list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str, tone: str = "") -> str:
    return f'<td class="{tone}">{_text(text)}</td>'


def _text(text: str) -> str:
    return escape(printable(text, 0))
