"""What the terminal says of latencies: one row per case, and what to type next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from pytest_attn.reports.columns import aligned, narrowed
from pytest_attn.reports.records import Record
from pytest_attn.reports.terminal import Line

_MARKUP = {
    "regressed": {"red": True},
    "unconfirmed": {"red": True},
    "unrecorded": {"red": True},
    "inconclusive": {"yellow": True},
    "disturbed": {"yellow": True},
    "raised": {"red": True},
}
_WORDS = {
    "passed": "as fast as recorded",
    "regressed": "regressed",
    "inconclusive": "inconclusive",
    "no baseline": "without a baseline",
    "unconfirmed": "slower and not confirmed",
    "recorded": "recorded",
    "unrecorded": "not recorded",
    "untimed": "not timed",
    "raised": "cannot be timed",
}
#: how the reason of a case begins that was never recorded; any other says why its baseline cannot be used
NONE_RECORDED = "none recorded"
#: what reasons begin with that recording anew mends; others say what to do themselves
_TO_RECORD = (NONE_RECORDED, "recorded ")
_MOST_ROWS = 40
_FIGURES = ("p50", "+-", "change", "finds")
#: columns that a narrow terminal does without, the first to go first; those in which nothing stands go before
_EXPENDABLE = ("mode", "finds", "direction", "+-")


def latency_summary(records: Sequence[Record], verbose: bool, width: int | None = None) -> Iterator[Line]:
    """Yield a row per case that was timed (without -v at most forty, the notable first) and the closing sentence.

    width: what a line may have, in characters; columns that it has no room for are left out, or follow below if verbose.
    """
    timed = [r for r in records if r["latency"].get("p50")]
    ranked = sorted(timed, key=lambda r: (r["verdict"] not in _MARKUP, not r["reason"]))
    shown = timed if verbose or len(timed) <= _MOST_ROWS else ranked[:_MOST_ROWS]
    if shown:
        table = [("p50", "+-", "change", "finds", "verdict", "backend", "workload", "direction", "mode", *_extra(shown))]
        rows = [_row(r, shown) for r in shown]
        idle = [title for at, title in enumerate(table[0]) if all(row[at] == "-" for row in rows)]
        shorter = narrowed([*table, *rows], None if verbose else width, tuple(dict.fromkeys((*idle, *_EXPENDABLE))))
        right = tuple(at for at, title in enumerate(shorter[0]) if title in _FIGURES)
        for number, line in enumerate(aligned(shorter, right, width)):
            yield line, {"bold": True} if number == 0 else _MARKUP.get(shown[number - 1]["verdict"], {})
    if len(shown) < len(timed):
        yield f"... {len(timed) - len(shown)} more with -v", {}
    yield from _reasons(records)
    yield closing(records)


def is_notable(record: Record) -> bool:
    """Whether a case is shown even to those who want to see little.

    It failed or was not decided, or what was recorded for it cannot be used: a damaged file must not look like a pass.
    """
    has_unusable_baseline = record["verdict"] == "no baseline" and not record["reason"].startswith(NONE_RECORDED)
    return record["verdict"] in _MARKUP or has_unusable_baseline


def is_to_be_recorded(reason: str) -> bool:
    """Whether recording mends that a case has no baseline. Where it does not, the reason says what does."""
    return reason.startswith(_TO_RECORD)


def _extra(records: Sequence[Record]) -> tuple[str, ...]:
    return ("CUPTI",) if any(r["latency"].get("cupti") for r in records) else ()


def _row(record: Record, shown: Sequence[Record]) -> tuple[str, ...]:
    latency = record["latency"]
    decision = latency.get("decision") or {}
    low, high, _ = latency["interval"]
    change, finds = decision.get("change"), decision.get("detectable")
    calls = f" x{latency['calls']}" if latency["calls"] > 1 else ""
    runs = decision.get("runs") or [latency["p50"]]  # of fresh processes, where these decided
    row: tuple[str, ...] = (
        in_units(median(runs)),
        f"{(high - low) / 2 / latency['p50']:.1%}",
        "-" if change is None else f"{change:+.1%}",
        "-" if finds is None else f"{finds:.1%}",
        record["verdict"],
        record["subject"],
        record["workload"],
        latency["direction"],
        f"{latency['mode']}{calls}, {latency['l2']}",
    )
    return (*row, in_units(latency["cupti"]) if latency.get("cupti") else "-") if _extra(shown) else row


def _reasons(records: Sequence[Record]) -> Iterator[Line]:
    """One line per verdict and reason, with how many cases it holds."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in records:
        if r["reason"] and r["verdict"] != "regressed":
            found.setdefault((r["verdict"], r["reason"]), []).append(f"{r['subject']} on {r['workload']}")
    for r in records:
        if r["verdict"] in ("no baseline", "passed") and r["latency"].get("disturbances"):
            reason = "; ".join(r["latency"]["disturbances"])
            found.setdefault(("disturbed", reason), []).append(f"{r['subject']} on {r['workload']}")
    for (verdict, reason), cases in found.items():
        which = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
        yield f"{verdict:12}  {which}: {reason}", _MARKUP.get(verdict, {})


def closing(records: Sequence[Record]) -> Line:
    """Return the sentence that says how it all went."""
    counts = Counter(r["verdict"] for r in records)
    text = "latency: " + ", ".join(f"{counts[v]:,} {words}" for v, words in _WORDS.items() if counts[v])
    faster = [r for r in records if (r["latency"].get("decision") or {}).get("is_faster")]
    if faster:
        text += f'; {len(faster)} faster, keep it with --attn-update-baselines "faster"'
    elif any(r["verdict"] == "no baseline" and is_to_be_recorded(r["reason"]) for r in records):
        text += '; record with --attn-update-baselines "first recording"'
    is_bad = any(counts[v] for v in ("regressed", "unconfirmed", "unrecorded", "raised"))
    markup = {"red": True} if is_bad else {"green": True} if counts["passed"] else {}
    return text, markup


def in_units(seconds: float) -> str:
    """Return a time with its unit, aligned by the decimal point within a unit."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.4f} ms" if seconds < 1e-2 else f"{seconds * 1e3:.2f} ms"
