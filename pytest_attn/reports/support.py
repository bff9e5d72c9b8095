"""The table of --attn-output=FILE.support.md: which backend passed, refused or failed which group of workloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pytest_attn.reports.records import Record
from pytest_attn.verdict import Cause, Verdict

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
    cells: dict[str, dict[str, Counter[str]]] = {record["subject"]: {} for record in records}
    missing = {record["subject"] for record in records if record["cause"] == Cause.NOT_HERE}
    for record in records:
        if record["subject"] in missing:
            continue
        group = groups.get(record["name"], record["workload"])
        verdicts = cells.setdefault(record["subject"], {}).setdefault(group, Counter())
        verdicts[record["verdict"]] += 1
    columns = list(dict.fromkeys(group for row in cells.values() for group in row)) or ["cases"]
    lines = ["# Which backend runs what", "", title, "", _row(["backend", *columns]), _row(["---"] * (len(columns) + 1))]
    for backend, row in cells.items():
        shown = [_cell(row.get(group, Counter())) for group in columns] or ["-"]
        lines.append(_row([f"`{backend}`", *([_MISSING] * len(shown) if backend in missing else shown)]))
    return "\n".join([*lines, *_reasons(records)]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(verdicts: Counter[str]) -> str:
    return ", ".join(f"{verdicts[v]} {word}" for v, word in _WORDS.items() if verdicts[v]) or "-"


def _reasons(records: Sequence[Record]) -> list[str]:
    """List, for each backend, its reasons with how many cases each holds, the gravest first."""
    lines = []
    for verdict, word in _WORDS.items():
        reasons: dict[str, Counter[str]] = {}
        for record in records:
            if record["verdict"] == verdict and record["reason"]:
                reasons.setdefault(record["subject"], Counter())[record["reason"]] += 1
        if reasons and verdict is not Verdict.PASSED:
            lines += ["", f"## {word.capitalize()} because"]
            for backend, counts in reasons.items():
                lines += ["", f"`{backend}`:", ""]
                lines += [f"- {reason} ({_cases(number)})" for reason, number in counts.most_common()]
    return lines


def _cases(number: int) -> str:
    return "1 case" if number == 1 else f"{number} cases"
