"""Whether files of records are all parts of one run (--attn-shard): every part once, whole, and of the same run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from pytest_attn.reports.part_files import ORDER, PartFile

#: pytest's exit codes after which all tests of a part have run: passed, failed, none there
_FINISHED = (0, 1, 5)
_SHOWN = 3


def problems(files: Sequence[PartFile]) -> list[str]:
    """Return, in sentences, why these are not all parts of one run; nothing where they are."""
    parts = [one for one in files if one.facts]
    return [
        *_no_parts(files),
        *_numbers(parts),
        *(said for one in files for said in _unfinished(one)),
        *_divided_otherwise(parts),
        *_differences(parts),
        *_twice(parts),
    ]


def _no_parts(files: Sequence[PartFile]) -> Iterator[str]:
    for one in files:
        if not one.facts:
            yield f"{one.path} does not say which part it is; pytest --attn-shard=I/N --attn-output=FILE.jsonl does"


def _numbers(parts: Sequence[PartFile]) -> Iterator[str]:
    """Say which parts are missing, or there more than once, and whose number of parts is another."""
    totals = Counter(one.facts["parts"] for one in parts)
    if len(totals) > 1:
        said = _who(parts, lambda one: f"N = {one.facts['parts']}")
        yield f"these are parts of runs with different N: {said}; run all parts with the same"
    if not totals:
        return
    total = totals.most_common(1)[0][0]
    there = Counter(one.number for one in parts)
    missing = [number for number in range(1, total + 1) if not there[number]]
    for number, times in sorted(there.items()):
        if times > 1:
            paths = ", ".join(one.path for one in parts if one.number == number)
            yield f"part {number} is there {times} times ({paths}); leave out all but one"
    if missing:
        are, they = ("is", "it") if len(missing) == 1 else ("are", "them")
        yield (
            f"{numbers(missing)} of {total} {are} missing; run {they} with pytest --attn-shard={missing[0]}/{total} and the"
            " options of the others, or name the file"
        )


def _unfinished(one: PartFile) -> Iterator[str]:
    """Say what a part has not run, or not written."""
    for damage in one.damaged[:_SHOWN]:
        yield f"{damage}; run this part again"
    if len(one.damaged) > _SHOWN:
        yield f"{one.path}: {len(one.damaged) - _SHOWN} more lines are damaged"
    if not one.facts:
        return
    if not one.ended:
        yield f"{one.name} did not end: it has records of {_count(len(one.tests), 'test')}, and no closing line; run it again"
        return
    ended = one.ended
    if ended["ran"] < ended["tests"]:
        why = "; was it stopped, or run with -x or --lf?" if ended["exit"] in _FINISHED else ""
        yield f"{one.name} ran {ended['ran']:,} of its {_count(ended['tests'], 'test')}{why}; run it again"
    if ended.get("exit", 0) not in _FINISHED:
        yield f"{one.name} ended with pytest's exit code {ended['exit']}; its output says why"
    if uncollected := ended.get("uncollected", 0):
        yield f"{one.name} could not collect {_count(uncollected, 'file')}, so tests are missing; its output says why"


def _divided_otherwise(parts: Sequence[PartFile]) -> Iterator[str]:
    """Say where parts are not of one list of tests, divided once."""
    ended = [one for one in parts if {"collection", "split", "total"} <= one.ended.keys()]
    if len({one.ended["collection"] for one in ended}) > 1:
        said = _who(ended, lambda one: f"{one.ended['total']:,} tests ({one.ended['collection']})")
        yield (
            f"the parts are of different tests, so some may be in two parts or in none: {said}; the same -k, -m, backends and"
            " libraries everywhere give the same tests"
        )
    elif len({one.ended["split"] for one in ended}) > 1:
        said = _who(ended, lambda one: one.ended["split"])
        yield (
            f"the same tests were divided in different ways, so some are in two parts or in none: {said}; give all parts the"
            " same --attn-shard-durations"
        )


def _differences(parts: Sequence[PartFile]) -> Iterator[str]:
    """Say which code, options, software or device is not the same in all parts."""
    for kind in ORDER:
        yield from _values_differ(kind, [(one, one.found[kind]) for one in parts if kind in one.found])
    for name in sorted({name for one in parts for name in one.libraries}):
        having = [(one, one.libraries[name]) for one in parts if name in one.libraries]
        yield from _values_differ(f"the library of {name}", having)


def _values_differ(what: str, having: Sequence[tuple[PartFile, set[str]]]) -> Iterator[str]:
    """Say which parts have which values, where there is more than one."""
    if len({value for _, values in having for value in values}) > 1:
        said = {id(one): " and ".join(sorted(values)) for one, values in having}
        yield f"{what} differs: {_who([one for one, _ in having], lambda one: said[id(one)])}"


def _twice(parts: Sequence[PartFile]) -> Iterator[str]:
    """Say which tests are in two parts."""
    first: dict[str, PartFile] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for one in parts:
        for test in sorted(one.tests):
            other = first.setdefault(test, one)
            if other is not one and other.number != one.number:
                twice.setdefault((other.name, one.name), []).append(test)
    for (other_name, name), tests in twice.items():
        are = f"and {len(tests) - 1:,} more are" if len(tests) > 1 else "is"
        yield f"{tests[0]} {are} both in {other_name} and in {name}; run both parts again, with the same tests and options"


def _who(parts: Sequence[PartFile], value_of: Callable[[PartFile], str]) -> str:
    """Say which parts have which value, the most common one first."""
    having: dict[str, list[int]] = {}
    for one in sorted(parts, key=lambda one: one.number):
        having.setdefault(value_of(one), []).append(one.number)
    ordered = sorted(having.items(), key=lambda pair: -len(pair[1]))
    return "; ".join(f"{value} in {numbers(who)}" for value, who in ordered)


def numbers(found: Iterable[int]) -> str:
    """Write numbers of parts: "part 3", "parts 1, 2 and 4 to 8"."""
    runs: list[list[int]] = []
    for number in sorted(set(found)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = [str(one) for run in runs for one in (run if len(run) < 3 else [f"{run[0]} to {run[-1]}"])]
    is_one = sum(map(len, runs)) == 1
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    return f"part{'' if is_one else 's'} {listed}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
