"""Text of the terminal on latencies: one row per case, what guests say of them, and what to type next."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from pytest_attn.reports.lines import compared_by, duration_in_column, narrowed, said_by_guests, timed_as
from pytest_attn.reports.records import Record, gathered, latency_of, verdict_of
from pytest_attn.reports.terminal import Line, in_table
from pytest_attn.reports.verdict import Cause, Tone, Verdict
from pytest_attn.seam import each

_MARKUP = {Tone.BAD: {"red": True}, Tone.DOUBT: {"yellow": True}}
#: in the closing sentence, in this order
_COUNTED = (
    *(Verdict.FAST, Verdict.REGRESSED, Verdict.SLOWER, Verdict.FASTER, Verdict.ALIKE, Verdict.INCONCLUSIVE),
    *(Verdict.NO_BASELINE, Verdict.UNCONFIRMED, Verdict.RECORDED),
    *(Verdict.UNRECORDED, Verdict.UNTIMED, Verdict.MISMATCH, Verdict.NO_RESULT, Verdict.RAISED, Verdict.EXPECTED),
)
#: of which the test says more than a line
_SAID = (Verdict.REGRESSED, Verdict.SLOWER)
_COUNTED_AS = {Verdict.RAISED: "cannot be timed", Verdict.MISMATCH: "wrong when timed"}
_MOST_ROWS = 40
_FIGURES = ("p50", "+-", "change", "detects")
#: columns that a narrow terminal does without, the first to go first; those in which nothing stands go before
_EXPENDABLE = ("mode", "detects", "direction", "+-")


def latency_summary(records: Sequence[Record], verbose: bool, width: int | None = None) -> Iterator[Line]:
    """Yield a row per case that was timed (without -v at most forty, the notable first) and the closing sentence.

    width: what a line may have, in characters; columns that it has no room for are left out, or follow below if verbose.
    """
    timed = [r for r in records if latency_of(r).get("p50")]
    ranked = sorted(timed, key=lambda r: (not _markup(r), not r["reason"]))
    shown = timed if verbose or len(timed) <= _MOST_ROWS else ranked[:_MOST_ROWS]
    if shown:
        yield from _timed_rows(shown, None if verbose else width, width)
    if len(shown) < len(timed):
        yield f"... {len(timed) - len(shown)} more with -v", {}
    for line in (one for lines in each("timed") for one in lines(shown)):
        yield line, {}
    for r in shown:
        for name, said in said_by_guests(latency_of(r)):
            yield f"{name:12}  {r['subject']} on {r['workload']}: {said}", {}
    yield from _reasons(records)
    yield closing(records)


def _timed_rows(records: Sequence[Record], narrow: int | None, width: int | None) -> Iterator[Line]:
    """Yield a row per case. narrow: what columns that are expendable must leave room for; None keeps all of them."""
    titles = ("p50", "+-", "change", "detects", "verdict", "backend", "workload", "direction", "mode", *_extra(records))
    rows = [_row(r, records) for r in records]
    idle = [title for at, title in enumerate(titles) if all(row[at] == "-" for row in rows)]
    table = narrowed([titles, *rows], narrow, tuple(dict.fromkeys((*idle, *_EXPENDABLE))))
    right = tuple(at for at, title in enumerate(table[0]) if title in _FIGURES)
    yield from in_table(table, list(map(_markup, records)), right, width)


def is_notable(record: Record) -> bool:
    """Return whether a case is shown even to those who want to see little.

    It failed or was not decided, or what was recorded for it cannot be used: a damaged file must not look like a pass.
    """
    is_recorded = record["verdict"] == Verdict.NO_BASELINE and record["cause"] != Cause.NONE_RECORDED
    return bool(_markup(record)) or is_recorded


def _markup(record: Record) -> dict[str, bool]:
    verdict = verdict_of(record)
    return _MARKUP.get(verdict.tone, {}) if verdict else {}


def _extra(records: Sequence[Record]) -> tuple[str, ...]:
    return ("CUPTI",) if any(latency_of(r).get("cupti") for r in records) else ()


def _row(record: Record, shown: Sequence[Record]) -> tuple[str, ...]:
    latency = latency_of(record)
    decision = latency.get("decision") or {}
    low, high, _ = latency["interval"]
    change, detectable = decision.get("change"), decision.get("detectable")
    row: tuple[str, ...] = (
        duration_in_column(decided(latency)),
        f"{(high - low) / 2 / latency['p50']:.1%}",
        "-" if change is None else f"{change:+.1%}",
        "-" if detectable is None else f"{detectable:.1%}" if detectable < 10 else ">x10",
        record["verdict"],
        record["subject"],
        record["workload"],
        latency.get("direction", record["direction"]),
        timed_as(latency["mode"], latency["calls"], latency["l2"]),
    )
    return (*row, duration_in_column(latency["cupti"]) if latency.get("cupti") else "-") if _extra(shown) else row


def decided(latency: Mapping[str, Any]) -> float:
    """Return the p50 of a record's latency that was compared, in seconds: of new processes, where these decided."""
    runs: Sequence[float] = (latency.get("decision") or {}).get("runs") or [latency["p50"]]
    return median(runs)


def _reasons(records: Sequence[Record]) -> Iterator[Line]:
    """One line per verdict and reason, with how many cases it holds."""
    reasons = [(r["verdict"], r["reason"], r) for r in records if r["reason"] and r["verdict"] not in _SAID]
    timed = (r for r in records if r["verdict"] in (Verdict.NO_BASELINE, Verdict.PASSED))
    reasons += [("disturbed", "; ".join(words), r) for r in timed if (words := latency_of(r).get("disturbances"))]
    for (verdict, reason), cases in gathered(((verdict, reason), r) for verdict, reason, r in reasons).items():
        which = f"{cases[0]['subject']} on {cases[0]['workload']}" if len(cases) == 1 else f"{len(cases)} cases"
        yield f"{verdict:12}  {which}: {reason}", {"yellow": True} if verdict == "disturbed" else _markup(cases[0])


def closing(records: Sequence[Record]) -> Line:
    """Return the sentence that says how it all went."""
    counts = Counter(verdict_of(r) for r in records)
    parts = [f"{counts[v]:,} {_COUNTED_AS.get(v, v.counted)}" for v in _COUNTED if counts[v]]
    text = f"latency: {', '.join(parts)}{_next(records)}"
    is_bad = any(v is not None and v.is_wrong for v in counts)
    is_good = any(counts[one] for one in (Verdict.FAST, Verdict.FASTER, Verdict.ALIKE))
    return text, {"red": True} if is_bad else {"green": True} if is_good else {}


def _next(records: Sequence[Record]) -> str:
    """Say what to type next."""
    if faster := sum(bool((latency_of(r).get("decision") or {}).get("is_faster")) for r in records):
        return f'; {faster} faster, keep it with --attn-update-baselines "faster"'
    if remedy := next((r["remedy"] for r in records if r["remedy"]), ""):
        return f"; record with {remedy}"
    undecided = [latency_of(r) for r in records if r["verdict"] == Verdict.INCONCLUSIVE]
    is_of_cpu = any(one.get("threads") and one.get("baseline") for one in undecided)
    return f"; compare with {words}" if is_of_cpu and (words := compared_by()) else ""
