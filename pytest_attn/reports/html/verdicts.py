"""What the page calls a verdict: its words, its glyph, how grave it is. Never told by colour alone."""

from __future__ import annotations

from typing import NamedTuple

from pytest_attn.reports.records import Record


class Verdict(NamedTuple):
    """One verdict as a reader meets it. counted: its words behind a number; tone: bad, doubt, good, plain or none."""

    word: str
    glyph: str
    tone: str
    counted: str


#: the gravest first; what says nothing of a kernel stands behind what says that it is right
VERDICTS: dict[str, Verdict] = {
    "mismatch": Verdict("wrong", "✗", "bad", "wrong"),
    "broken": Verdict("invariant broken", "✗", "bad", "with a broken invariant"),
    "raised": Verdict("raised", "!", "bad", "raised"),
    "regressed": Verdict("regressed", "▼", "bad", "regressed"),
    "unconfirmed": Verdict("slower, not confirmed", "▼", "bad", "slower and not confirmed"),
    "unrecorded": Verdict("not recorded", "!", "bad", "not recorded"),
    "inconclusive": Verdict("inconclusive", "?", "doubt", "inconclusive"),
    "known defect": Verdict("known defect", "△", "doubt", "known defects"),
    "expected": Verdict("wrong as expected", "△", "doubt", "wrong as expected"),
    "unexpected": Verdict("right despite a known defect", "△", "doubt", "right despite a known defect"),
    "passed": Verdict("right", "✓", "good", "right"),
    "approximate": Verdict("right as approximate", "≈", "good", "right as approximate"),
    "held": Verdict("invariants hold", "✓", "good", "with all invariants"),
    "fast": Verdict("as fast as recorded", "✓", "good", "as fast as recorded"),
    "recorded": Verdict("recorded", "○", "plain", "recorded"),
    "no baseline": Verdict("no baseline", "○", "plain", "without a baseline"),
    "untimed": Verdict("not timed", "○", "plain", "not timed"),
    "skipped": Verdict("skipped", "-", "none", "skipped"),
}


def verdict_of(record: Record) -> str:
    """Return the key in `VERDICTS`, or a record's own word where that is newer than this table."""
    verdict = str(record["verdict"])
    if verdict != "passed":
        return verdict
    if record["question"] == "latency":
        return "fast"
    if record["reason"] and record["name"] != "fuzz":
        return "unexpected"
    return "approximate" if record["is_approximate"] else "passed"


def words_of(verdict: str) -> Verdict:
    """Return what the page calls a verdict; one that it does not know is a doubt."""
    return VERDICTS.get(verdict) or Verdict(verdict, "?", "doubt", verdict)
