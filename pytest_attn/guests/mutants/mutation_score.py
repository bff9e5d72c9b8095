"""Which faulty kernels tests found, and what it would take to find the rest: in records, terminals and pages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypedDict

from pytest_attn.reports.strict_json import TEXT, TRUTH, or_empty
from pytest_attn.reports.terminal import Line, in_table


class MutantFields(TypedDict):
    """The field of the records of --attn-mutants."""

    mutant: Annotated[
        dict[str, Any],
        "with --attn-mutants, the faulty kernel that took the place of the test's: name, kind, summary, condition, killed"
        " (found), found_with (if no test found it, the change that does; else empty)",
        or_empty({**dict.fromkeys(("name", "kind", "summary", "found_with"), TEXT), "killed": TRUTH}, condition=TEXT),
    ]


def mutation_summary(records: Sequence[Mapping[str, Any]], verbose: bool) -> Iterator[Line]:
    """Yield how many mutants were found, by test and by class, the survivors with what would find them, and the score."""
    kinds: dict[str, str] = {}
    killers: dict[str, set[str]] = {}
    by_test: dict[str, dict[str, bool]] = {}
    for record in filter(lambda record: record["mutant"], records):
        name, killed, test = record["mutant"]["name"], record["mutant"]["killed"], record["test"].partition("[")[0]
        kinds[name] = record["mutant"]["kind"]
        tests = by_test.setdefault(test, {})
        tests[name] = tests.get(name, False) or killed
        if killed:
            killers.setdefault(name, set()).add(test)
    if not kinds:
        yield "no faulty kernel ran", {"yellow": True}
        return
    yield from _table("test", [(test, sum(found.values()), len(found)) for test, found in by_test.items()])
    yield "", {}
    of_kind = {kind: [name for name, its in kinds.items() if its == kind] for kind in kinds.values()}
    yield from _table("class", [(kind, sum(n in killers for n in names), len(names)) for kind, names in of_kind.items()])
    yield "", {}
    yield from ((f"survived  {line}", {"yellow": True}) for line in survivors(records))
    if verbose:
        for name, found_by in killers.items():
            yield f"found     {name} by {', '.join(sorted(found_by))}", {}
    is_best = len(killers) == len(kinds)
    yield mutation_score(records), {"green": is_best, "yellow": not is_best}


def survivors(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of each mutant that no test has found what would have."""
    mutants = [record["mutant"] for record in records if record["mutant"]]
    killed = {mutant["name"] for mutant in mutants if mutant["killed"]}
    alive = {mutant["name"]: mutant["summary"] for mutant in mutants if mutant["name"] not in killed}
    words = {mutant["name"]: f" {mutant['found_with']}." for mutant in mutants if mutant["found_with"]}
    return [f"{name}: {summary}{words.get(name, '')}" for name, summary in alive.items()]


def mutation_score(records: Sequence[Mapping[str, Any]]) -> str:
    """Say how many mutants were found; "" where none ran."""
    ran = {record["mutant"]["name"] for record in records if record["mutant"]}
    found = len(ran) - len(survivors(records))
    return f"mutation score {found / len(ran):.0%}: {found} of {len(ran)} faulty kernels found" if ran else ""


def _table(title: str, rows: Sequence[tuple[str, int, int]]) -> Iterator[Line]:
    table = [(title, "found", "tried", ""), *((name, str(a), str(b), f"{a / b:.0%}") for name, a, b in rows)]
    yield from in_table(table, right=(1, 2, 3))


def mutation_results(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the score, and the survivors, with their titles on pages; nothing where no mutant ran."""
    if score := mutation_score(records):
        yield "Faulty kernels", (score,)
        yield "Survived", survivors(records)
