"""Whose records these are: times of two machines never meet in one plot."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pytest_attn.reports.html.verdicts import shown_verdict, words_of
from pytest_attn.reports.records import Record
from pytest_attn.verdict import Verdict

#: of a GPU among others of its kind
_INDEX = re.compile(r":\d+$")


class MachineRecords(NamedTuple):
    """One machine with its software, and what was judged on it."""

    facts: Mapping[str, Any]
    records: Sequence[Record]


def by_machine(records: Sequence[Record]) -> list[MachineRecords]:
    """Separate records by machine and software, those where most is wrong first; GPUs of one kind are one machine.

    A test that raised before its machine was known belongs to the only machine, if there is only one.
    """
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        found.setdefault(_identity(record["machine"]), []).append(record)
    nameless = found.pop((), [])
    if nameless:
        owner = next(iter(found)) if len(found) == 1 else ()
        found.setdefault(owner, []).extend(nameless)
    machines = [MachineRecords(_richest(mine), mine) for mine in found.values()]
    return sorted(machines, key=lambda machine: -_wrong(machine.records))


def _identity(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what distinguishes a machine, () where nothing is known of it."""
    return tuple(f"{key}={_INDEX.sub('', str(value))}" for key, value in sorted(facts.items()))


def _richest(records: Sequence[Record]) -> Mapping[str, Any]:
    return max((record["machine"] for record in records), key=len)


def sentence(records: Sequence[Record]) -> str:
    """Say how the run went, what is wrong first."""
    counts = Counter(shown_verdict(record) for record in records)
    wrong, doubtful = (_counted(counts, tone) for tone in ("bad", "doubt"))
    fine = _counted(counts, "good", "plain", "none")
    if not records:
        return "No attention test ran."
    total = f"{len(records):,} judgment{'' if len(records) == 1 else 's'}"
    if wrong:
        start = f"{_wrong(records):,} of {total} went wrong: {wrong}."
    elif not _counted(counts, "good", "doubt"):
        return f"Nothing was found right or wrong: {fine}."
    else:
        start = "Nothing went wrong."
    parts = [f"To look at: {doubtful}." if doubtful else "", f"The rest: {fine}." if wrong and fine else ""]
    parts += [f"{fine[0].upper()}{fine[1:]}." if fine and not wrong else ""]
    return " ".join(part for part in (start, *parts) if part)


def _wrong(records: Sequence[Record]) -> int:
    return sum(words_of(shown_verdict(record)).tone == "bad" for record in records)


def _counted(counts: Counter[str], *tones: str) -> str:
    names = [verdict.value for verdict in Verdict]
    known = [*names, *(name for name in counts if name not in names)]
    shown = [(counts[v], words_of(v)) for v in known if counts[v] and words_of(v).tone in tones]
    return ", ".join(f"{number:,} {words.counted}" for number, words in shown)


def is_wrong(records: Sequence[Record]) -> bool:
    """Say whether anything is."""
    return _wrong(records) > 0


def facts_in_words(machine: MachineRecords) -> list[tuple[str, str]]:
    """Return what is known of a machine and its run, as terms and descriptions."""
    facts = machine.facts
    dates = sorted(str(record["date"]) for record in machine.records if record["date"])
    memory = facts.get("memory")
    seconds = sum(_seconds_of_each_test(machine.records).values())
    rows = [
        ("Machine", facts.get("name", "not known")),
        ("Device", " · ".join(dict.fromkeys(str(facts[key]) for key in ("device", "architecture") if facts.get(key)))),
        ("Memory", f"{memory / 2**30:,.0f} GiB" if isinstance(memory, (int, float)) else ""),
        ("Run", _span(dates)),
        ("Time in tests", f"{seconds:,.0f} s" if seconds >= 1 else ""),
        ("torch", facts.get("torch", "")),
        ("Python", facts.get("python", "")),
        ("pytest-attn", facts.get("pytest_attn", "")),
        ("Libraries", ", ".join(f"{library} {version}" for library, version in _libraries(machine.records))),
    ]
    return [(term, str(text)) for term, text in rows if text]


def _seconds_of_each_test(records: Sequence[Record]) -> dict[str, float]:
    """Every record of a test says how long the whole test took."""
    return {record["test"]: record["seconds"] for record in records}


def _span(dates: Sequence[str]) -> str:
    """Write when a run began and ended: "2026-11-21 19:34 to 19:40 UTC"."""
    if not dates:
        return ""
    (day, begun), (last, ended) = ((date[:10], date[11:16]) for date in (dates[0], dates[-1]))
    end = "" if (day, begun) == (last, ended) else f" to {ended}" if day == last else f" to {last} {ended}"
    return f"{day} {begun}{end} UTC"


def _libraries(records: Sequence[Record]) -> list[tuple[str, str]]:
    found = {
        (str(record["tags"].get("family", "")), str(record["version"]))
        for record in records
        if record["version"] and record["verdict"] != "skipped"
    }
    return sorted(found)
