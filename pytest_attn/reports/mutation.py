"""The mutation score: which faulty kernels a user's tests found, and what it would take to find the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_attn.reports.columns import aligned
from pytest_attn.reports.terminal import Line

#: one mutant under one test, as session/mutants.py leaves it
MutantRecord = Mapping[str, Any]
_CONDITIONS = {
    "magnitude": 'inputs="outlier" or "large" in the marker',
    "poison": "attn.check_invariants",
    "layout": "attn.check_invariants",
    "strides": "attn.check_invariants with --attn-thorough",
    "layouts": "attn.check_invariants",
    "calls": "attn.check_invariants",
    "workloads": "attn.check_invariants, or more workloads in one test",
    "held": "attn.check_invariants",
    "repeats": "attn.check_invariants, or --attn-thorough",
    "lse-gradient": "returns_lse=True and a gradient of lse",
}


def mutation_summary(records: Sequence[MutantRecord], verbose: bool) -> Iterator[Line]:
    """Yield killed and reached mutants by test and by class, the survivors with what would kill them, and the score."""
    reached: dict[str, MutantRecord] = {}
    killers: dict[str, set[str]] = {}
    by_test: dict[str, dict[str, bool]] = {}
    for record in records:
        reached.setdefault(record["name"], record)
        tests = by_test.setdefault(record["test"], {})
        tests[record["name"]] = tests.get(record["name"], False) or record["killed"]
        if record["killed"]:
            killers.setdefault(record["name"], set()).add(record["test"])
    yield from _table("test", [(test, sum(found.values()), len(found)) for test, found in by_test.items()])
    kinds = dict.fromkeys(record["kind"] for record in reached.values())
    yield "", {}
    yield from _table("class", [(kind, *_of_kind(kind, reached, killers)) for kind in kinds])
    survivors = [record for name, record in reached.items() if name not in killers]
    yield "", {}
    for record in survivors:
        advice = _CONDITIONS.get(record["condition"], "workloads whose inputs reach it more often")
        yield f"survived  {record['name']}: {record['summary']} Try {advice}.", {"yellow": True}
    if verbose:
        for name, found_by in killers.items():
            yield f"killed    {name} by {', '.join(sorted(found_by))}", {}
    score = (len(reached) - len(survivors)) / len(reached)
    text = f"mutation score {score:.0%}: {len(reached) - len(survivors)} of {len(reached)} faulty kernels found"
    yield text, {"green": not survivors, "yellow": bool(survivors)}


def _of_kind(kind: str, reached: Mapping[str, MutantRecord], killers: Mapping[str, set[str]]) -> tuple[int, int]:
    names = [name for name, record in reached.items() if record["kind"] == kind]
    return sum(name in killers for name in names), len(names)


def _table(title: str, rows: Sequence[tuple[str, int, int]]) -> Iterator[Line]:
    table = [(title, "killed", "reached", ""), *((name, str(a), str(b), f"{a / b:.0%}") for name, a, b in rows)]
    for number, line in enumerate(aligned(table, right=(1, 2, 3))):
        yield line, {"bold": number == 0}
