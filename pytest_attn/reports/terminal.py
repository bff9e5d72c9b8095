"""What the terminal says: records in, lines out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from pytest_attn.reports.columns import aligned
from pytest_attn.reports.records import Record

Line = tuple[str, dict[str, bool]]  # text and the terminal's markup


#: reasons that --attn-list prints, those of most cases first
_MOST_OBSTACLES = 20
#: of these, --attn-save-failures keeps the tensors
_KEPT = {"mismatch", "broken"}


def summary(records: Sequence[Record], verbose: bool, width: int | None = None, are_saved: bool = False) -> Iterator[Line]:
    """Yield the lines of the summary: a row per case if verbose, a line per problem, one closing sentence.

    width: what the rows of tables may have, in characters. are_saved: whether the tensors of failing cases are.
    """
    if verbose:
        yield from _rows(records, width)
    yield from _problems(records)
    if verbose:
        yield from _compilations(records)
    yield from _not_run(records)
    text, markup = closing(records)
    yield text + _next(records, are_saved), markup


def _rows(records: Sequence[Record], width: int | None) -> Iterator[Line]:
    ran = [r for r in records if r["z_element"] is not None]
    if not ran:
        return
    table = [("verdict", "backend", "workload", "direction", "worst", "z", "row", "head")]
    table += [
        (
            r["verdict"] + (" approximate" if r["is_approximate"] else ""),
            r["subject"],
            r["workload"] + (" (sampled)" if r["is_sampled"] else ""),
            "backward" if r["backward"] else "forward",
            f"{r['tensor']}/{r['distribution']}",
            *_levels(r),
        )
        for r in ran
    ]
    for number, line in enumerate(aligned(table, right=(5, 6, 7), width=width)):
        yield line, {"bold": True} if number == 0 else {"red": True} if ran[number - 1]["verdict"] == "mismatch" else {}


def _levels(record: Record) -> tuple[str, str, str]:
    """Write z at its three levels; where elements are NaN or infinite and should not be, that is what is wrong."""
    if any(tensor.get("wrong_positions") for tensor in record["tensors"]):
        return "not finite", "-", "-"
    return f"{record['z_element']:.3g}", f"{record['z_row']:.3g}", f"{record['z_head']:.3g}"


def _problems(records: Sequence[Record]) -> Iterator[Line]:
    for r in records:
        direction = " backward" if r["backward"] else ""
        case = f"{r['subject']} on {r['workload']}{direction}"
        if r["verdict"] == "mismatch":
            yield f"mismatch      {case}: {r['reason']}", {"red": True}
        elif r["verdict"] == "broken":
            yield f"broken        {case}: {r['reason']}", {"red": True}
        elif r["verdict"] == "raised":
            yield f"raised        {case}: {r['reason']}", {"red": True}
        elif r["verdict"] == "known defect":
            yield f"known defect  {case}: {r['reason'].removeprefix('known defect ')}", {"yellow": True}
        elif r["verdict"] == "passed" and r["name"] == "fuzz":
            yield f"fuzzed        {case}: {r['reason']}", {}
        elif r["reason"] and r["verdict"] == "passed":
            yield f"unexpected    {case} passed: known defect {r['reason']}", {"yellow": True}


def _compilations(records: Sequence[Record]) -> Iterator[Line]:
    """One line per compiled backend: how long its first calls took, which no latency contains, and its graph breaks."""
    compiled: dict[str, list[Record]] = {}
    for r in records:
        if r["compile_seconds"] is not None:
            compiled.setdefault(r["subject"], []).append(r)
    for name, cases in compiled.items():
        seconds = sorted(r["compile_seconds"] for r in cases)
        breaks = max(r["graph_breaks"] for r in cases)
        times = f"{seconds[len(seconds) // 2]:.1f} s in the median, {seconds[-1]:.1f} s at most"
        yield f"compiled      {name}: {count(len(cases), 'case')}, {times}, {count(breaks, 'graph break')} at most", {}


def _not_run(records: Sequence[Record]) -> Iterator[Line]:
    """One line per reason for which nothing of a backend ran at all; refused workloads are only counted."""
    ran = {r["subject"] for r in records if r["verdict"] != "skipped"}
    reasons: dict[str, list[str]] = {}
    for r in records:
        if r["verdict"] == "skipped" and r["subject"] not in ran and r["subject"] != "-":
            names = reasons.setdefault(r["reason"], [])
            if r["subject"] not in names:
                names.append(r["subject"])
    shown: set[str] = set()
    for reason, names in reasons.items():
        fresh = [name for name in names if name not in shown]
        shown.update(fresh)
        if fresh:
            yield f"not run       {', '.join(fresh)}: {reason}", {}


def _next(records: Sequence[Record], are_saved: bool) -> str:
    """Say what to type next."""
    verdicts = {r["verdict"] for r in records}
    if verdicts & _KEPT:
        return "" if are_saved else "; --lf --attn-save-failures=failures keeps the tensors"
    return "; -rs lists the reasons of skips" if "skipped" in verdicts else ""


def closing(records: Sequence[Record]) -> Line:
    """Return the sentence that says how it all went, of checks and invariants."""
    counts = Counter("approximate" if r["verdict"] == "passed" and r["is_approximate"] else r["verdict"] for r in records)
    backends = {r["subject"] for r in records if r["verdict"] != "skipped"}
    workloads = {r["workload"] for r in records if r["verdict"] != "skipped"}
    parts = [f"{counts[v]:,} {text}" for v, text in _WORDS.items() if counts[v]]
    good = [r for r in records if r["verdict"] == "passed" and r["z_element"] is not None and not r["is_approximate"]]
    text = ", ".join(parts)
    if backends:
        text += f"; {count(len(backends), 'kernel')} on {count(len(workloads), 'workload')}"
    if good:
        worst = max(good, key=lambda r: r["z_element"])
        text += f", largest passing z {worst['z_element']:.1f} ({worst['subject']}, {worst['tensor']}, {worst['workload']})"
    markup = (
        {"red": True}
        if counts["mismatch"] or counts["broken"] or counts["raised"]
        else {"green": True}
        if counts["passed"] or counts["approximate"] or counts["held"]
        else {}
    )
    return text, markup


_WORDS = {
    "passed": "right",
    "approximate": "right as approximate",
    "held": "with all invariants",
    "mismatch": "wrong",
    "broken": "with a broken invariant",
    "raised": "raised",
    "known defect": "known defects",
    "expected": "wrong as expected",
    "skipped": "skipped",
}


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, which is in the plural but after 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


def listing(
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]],
    closing: str,
    width: int | None = None,
    obstacles: Mapping[str, Counter[str]] = MappingProxyType({}),
) -> Iterator[Line]:
    """Yield the tables of --attn-list, each a header and its rows, why cases would not run, and the closing sentence.

    obstacles: by reason, how many cases of each backend.
    """
    for title, rows in tables:
        header, *lines = aligned([title, *rows], width=width)
        yield header, {"bold": True}
        for line in lines:
            yield line, {}
        yield "", {}
    ranked = sorted(obstacles.items(), key=lambda reason: -sum(reason[1].values()))
    for reason, names in ranked[:_MOST_OBSTACLES]:
        yield f"not run       {count(sum(names.values()), 'case')} of {', '.join(names)}: {reason}", {}
    if len(ranked) > _MOST_OBSTACLES:
        yield f"... {len(ranked) - _MOST_OBSTACLES} more reasons", {}
    yield closing, {}
