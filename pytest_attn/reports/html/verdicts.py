"""What the page calls a verdict, verdicts of newer versions included."""

from __future__ import annotations

from typing import NamedTuple

from pytest_attn.reports.records import Record, verdict_of
from pytest_attn.verdict import Tone, Verdict


class Words(NamedTuple):
    """One verdict as a reader meets it; counted: its words behind a number."""

    word: str
    glyph: str
    tone: str
    counted: str


def shown_verdict(record: Record) -> str:
    """Return the name under which the page shows a record's verdict."""
    verdict = verdict_of(record)
    return verdict.value if verdict else record["verdict"]


def words_of(name: str) -> Words:
    """Return what the page calls a verdict; one that it does not know is a doubt."""
    verdict = Verdict.named(name)
    if verdict is None:
        return Words(name, "?", Tone.DOUBT.value, name)
    return Words(verdict.word, verdict.glyph, verdict.tone.value, verdict.counted)
