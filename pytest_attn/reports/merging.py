"""`python -m pytest_attn merge OUT FILE.jsonl ...`: files of records as one, once they are proven to be one whole run.

They are if every test that any of them collected ran in exactly one, with the same code, options, software and device.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from pytest_attn.reports.files import write_atomically, written_atomically
from pytest_attn.reports.html.page import INSTALL, missing_libraries, report_page
from pytest_attn.reports.lines import count, some
from pytest_attn.reports.markdown import markdown_summary
from pytest_attn.reports.records import Record, failures, gathered, read_line, read_records
from pytest_attn.reports.runs import LAST_FAILED, Run, RunFacts, collected_by, read_runs

_WORDS = "Join the files of a run that was divided, once every test that was collected has run in exactly one of them."
#: pytest's exit codes after which all of a run's tests have run: passed, failed, none there
_FINISHED = (0, 1, 5)
#: how many damaged lines or tests, and how many files, are named
_SHOWN, _FILES = 3, 8
_Closed = tuple[Run, RunFacts]
_Value = TypeVar("_Value")


# -- the command ---------------------------------------------------------------------------------------------------------


def add_merge(commands: Any) -> None:
    """Declare the command; `run_merge` runs it."""
    command = commands.add_parser("merge", help=_WORDS, description=_WORDS)
    command.add_argument("out", metavar="OUT", help="NAME.jsonl for the records, or NAME.html or .md for a report of them")
    command.add_argument("files", nargs="+", metavar="FILE.jsonl", help="what pytest --attn-output=FILE.jsonl wrote")
    command.add_argument("--force", action="store_true", help="write OUT also where something is missing; still exit with 1")
    command.set_defaults(run=run_merge, error=command.error)


def run_merge(given: argparse.Namespace) -> int:
    """Merge; return 0, or 1 where the files are not one whole run, which is said. Other files are a usage error: exit 2."""
    require_output(given, given.out, "OUT", (".jsonl", ".html", ".md"))
    runs = _runs_of(given)
    found = problems(runs)
    for said in found:
        print(f"merge: {said}", file=sys.stderr)
    if found and not given.force:
        print(f"merge: not one whole run, so {given.out} was not written; --force writes it all the same", file=sys.stderr)
        return 1
    read = [record for run in runs for line in run.lines if (record := read_line(line, given.out))]
    try:
        _write(given.out, runs, read)
    except OSError as error:
        given.error(f"cannot write {given.out}: {error.strerror or error}")
    tests, records = len(_union(run.facts["ran"] for run in runs if run.facts)), sum(run.records for run in runs)
    counts = [count(len(runs), "run"), count(tests, "test"), count(records, "record")]
    if failed := failures(read):
        counts.append(f"{count(failed, 'test')} failed")
    print(f"{'not whole: ' * bool(found)}{', '.join(counts)}: written to {given.out}")
    return int(bool(found))


def _runs_of(given: argparse.Namespace) -> list[Run]:
    """Return the runs in the files, each of which is named once."""
    real = list(map(os.path.realpath, given.files))
    if twice := [path for path, other in zip(given.files, real, strict=True) if real.count(other) > 1]:
        given.error(f"{twice[0]} is named more than once")
    with usage_errors(given):
        return [run for path in given.files for run in read_runs(path)]


@contextmanager
def usage_errors(given: argparse.Namespace) -> Iterator[None]:
    """Make it a usage error, exit 2, where a file is missing, or cannot be read or written."""
    try:
        yield
    except BrokenPipeError:
        raise
    except FileNotFoundError as error:
        told = vars(given)
        if error.filename not in (*told.get("files", ()), *map(told.get, ("file", "base", "head"))):  # what a command writes
            given.error(f"cannot write {error.filename}: {error.strerror}")
        if not error.filename:
            given.error("the name of a file is empty; name what pytest --attn-output=FILE.jsonl wrote")
        given.error(f"there is no {error.filename}; pytest --attn-output={error.filename} writes it")
    except IsADirectoryError as error:
        given.error(f"{error.filename} is a folder; name the .jsonl file in it")
    except (OSError, ValueError) as error:
        given.error(str(error))


def add_on_records(
    commands: Any, name: str, words: str, run: Callable[[Sequence[Record], argparse.Namespace], None]
) -> argparse.ArgumentParser:
    """Declare a command that takes .jsonl files, and return it. run: what it does with their records and its arguments."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=words, description=words)
    command.add_argument("files", nargs="+", metavar="FILE.jsonl", help="what pytest --attn-output=FILE.jsonl wrote")
    command.set_defaults(run=partial(_run_on_records, run), error=command.error)
    return command


def _run_on_records(run: Callable[[Sequence[Record], argparse.Namespace], None], given: argparse.Namespace) -> int:
    """Run a command; return 0. A missing or unwritable file is a usage error: exit 2."""
    try:
        with usage_errors(given):
            run(read_records(*given.files), given)
    except (KeyError, TypeError, AttributeError) as error:  # fields that are missing or of another shape
        given.error(f"these records cannot be read: {type(error).__name__}: {error}; did --attn-output write them?")
    return 0


def require_output(given: argparse.Namespace, out: str, name: str, endings: tuple[str, ...]) -> None:
    """End with a usage error where a file cannot be made, or would be one of the inputs. name: of its argument."""
    if os.path.realpath(out) in map(os.path.realpath, given.files):
        given.error(f"{out} is one of the input files: refusing to overwrite it; choose another {name}")
    if out.endswith(".support.md") or not out.endswith(endings):
        *others, last = endings
        given.error(f"{name} must end in {', '.join(others)} or {last} (not .support.md), got {out!r}")
    if out.endswith(".html") and (missing := missing_libraries()):
        given.error(f"needs {' and '.join(missing)}; {INSTALL}")


def _write(path: str, runs: Sequence[Run], records: Sequence[Record]) -> None:
    """Write OUT atomically: all lines, closing ones as well, so that OUT can be merged with others; or a report of them."""
    if path.endswith(".jsonl"):
        with written_atomically(path) as file:
            file.writelines(line for run in runs for line in run.lines)
    else:
        write_report(path, records)


def write_report(path: str, records: Sequence[Record]) -> None:
    """Write a report atomically: the page, or the summary where the name ends in .md."""
    write_atomically(path, (report_page if path.endswith(".html") else markdown_summary)(records))


# -- the proof -----------------------------------------------------------------------------------------------------------


def problems(runs: Sequence[Run]) -> list[str]:
    """Return, in sentences, why these are not one whole run; nothing where they are."""
    closed = [(run, run.facts) for run in runs if run.facts is not None]
    tests = [*_nowhere(closed), *_twice(closed)]
    return [
        *(said for run in runs for said in _damaged(run)),
        *(said for run, facts in closed for said in _incomplete(run, facts)),
        *tests,
        *(_divided_otherwise(closed) if tests else ()),
        *_differences(closed),
    ]


def _damaged(run: Run) -> Iterator[str]:
    again = "run it again" if run.facts is None else _again(run.facts)
    for damage in run.damaged[:_SHOWN]:
        yield f"{damage}; {again}"
    if len(run.damaged) > _SHOWN:
        yield f"{run.path}: {len(run.damaged) - _SHOWN} more lines are damaged"
    if run.facts is None:
        yield (
            f"{run.path} has {count(run.records, 'record')} and no closing line: its run was killed, is not over, or used an"
            " older pytest-attn; run it again"
        )


def _incomplete(run: Run, facts: RunFacts) -> Iterator[str]:
    if facts["records"] != run.records and not run.damaged:
        yield f"{run.path} has {count(run.records, 'record')}, and its run wrote {facts['records']:,}; {_again(facts)}"
    if uncollected := facts["uncollected"]:
        yield f"{run.path} could not collect {count(uncollected, 'file')}, so tests are missing; its output says why"
    elif facts["exit"] not in _FINISHED:
        yield f"{run.path} ended with pytest's exit code {facts['exit']}; its output says why"
    elif facts["choice"].endswith(LAST_FAILED):
        yield f"{run.path} is of {LAST_FAILED}, which collects only what failed before; run it without: {facts['command']}"
    elif not collected_by(facts):
        yield f"{run.path} collected no tests; its command was: {facts['command']}"
    elif facts["collected"] != len(collected_by(facts)):
        yield f"{run.path} does not know which tests it collected, as its workers crashed; {_again(facts)}"


def _again(facts: RunFacts) -> str:
    return f"run it again: {facts['command']}"


def _nowhere(closed: Sequence[_Closed]) -> Iterator[str]:
    """Say which tests ran nowhere, but for those that the same -k, -m and --deselect of all runs leave out."""
    has_one_choice = len({facts["choice"] for _, facts in closed}) == 1
    collected = _union(collected_by(facts) for _, facts in closed)
    chosen = _union(facts["ran"] | facts["unfinished"] | facts["left_out"] for _, facts in closed)
    missing = (chosen if has_one_choice else collected) - _union(facts["ran"] for _, facts in closed)
    for run, facts in closed:
        if stopped := missing & facts["unfinished"]:
            missing -= stopped
            given = count(len(facts["ran"] | facts["unfinished"]), "test")
            yield (
                f"{run.path} ran {len(facts['ran']):,} of its {given}, and not"
                f" {some(sorted(stopped), _SHOWN)}; was it stopped, or run with -x or --lf? R{_again(facts)[1:]}"
            )
    if missing:
        groups, splits = _groups(closed)
        remedy = "run them with the options of the others, or name the files of their runs"
        if absent := sorted({*range(1, splits + 1)} - {*groups}):
            named = f"{'group' if len(absent) == 1 else 'groups'} {', '.join(map(str, absent))} of {splits}"
            remedy = (
                f"pytest-split's {named} {'is' if len(absent) == 1 else 'are'} missing, so run --splits={splits}"
                f" --group={absent[0]} with the options of the others, or name the file"
            )
        yield (
            f"{count(len(missing), 'test')} of {len(collected):,} that were collected ran in none of these files;"
            f" {remedy}. Not run: {some(sorted(missing), _SHOWN)}"
        )


def _twice(closed: Sequence[_Closed]) -> Iterator[str]:
    """Say which tests ran in two files."""
    first: dict[str, Run] = {}
    ran = ((first.setdefault(test, run), run, test) for run, facts in closed for test in facts["ran"])
    twice = gathered(((other.path, run.path), test) for other, run, test in ran if other is not run)
    for (path, other_path), tests in twice.items():
        yield (
            f"{count(len(tests), 'test')} ran both in {path} and in {other_path}: {some(sorted(tests), _SHOWN)}; leave out"
            " one of these files, or run both again with the same tests and options"
        )


def _divided_otherwise(closed: Sequence[_Closed]) -> Iterator[str]:
    """Say why tests may be missing, or there twice: the runs collected, chose or divided them in different ways."""
    groups, splits = _groups(closed)
    given, left_out = [facts["ran"] | facts["unfinished"] for _, facts in closed], (facts["left_out"] for _, facts in closed)
    is_divided = sum(map(len, given)) == len(_union(given)) and _union(given) >= _union(left_out)
    if len({collected_by(facts) for _, facts in closed}) > 1:
        said = _who(closed, lambda run, facts: count(len(collected_by(facts)), "test"))
        yield (
            f"the runs collected different tests: {said}; the same paths, libraries and --attn-backends, by name, give all"
            " hosts the same"
        )
    elif len({facts["choice"] for _, facts in closed}) > 1:
        yield f"the runs chose in different ways: {_who(closed, lambda run, facts: facts['choice'] or 'all tests')}"
    elif splits and sorted(groups) == [*range(1, splits + 1)] and not is_divided:
        yield (
            "pytest-split divided the same tests in different ways; give all groups the same --durations-path and"
            " --splitting-algorithm"
        )


def _groups(closed: Sequence[_Closed]) -> tuple[list[int], int]:
    """Return the groups of pytest-split, and of how many these are; 0 where not all runs are of as many."""
    told = [facts["group"].partition("/") for _, facts in closed]
    splits = {splits for _, _, splits in told}
    return ([int(group) for group, _, _ in told], int(splits.pop())) if len(splits) == 1 and "" not in splits else ([], 0)


def _differences(closed: Sequence[_Closed]) -> Iterator[str]:
    """Say which code, options, software or device is not the same in all runs."""
    values: dict[str, list[tuple[Run, set[str]]]] = {}
    for run, facts in closed:
        name, plus, changes = facts["commit"].partition("+")
        own = {
            "the commit": {f"{name[:10]}{plus}{changes}" or "none"},
            "the choice of options": {facts["options"] or "none"},
            "pytest-attn's version": {facts["pytest_attn"]},
            "Python's version": {".".join(facts["python"].split(".")[:2])},
            "the device": {facts["device"]} - {""},
        }
        for what in own.keys() | run.versions.keys():
            if found := own.get(what, set()) | run.versions.get(what, set()):
                values.setdefault(what, []).append((run, found))
    for what, having in sorted(values.items()):
        if len(_union(found for _, found in having)) > 1:
            yield f"{what} differs: {_who(having, lambda run, found: ' and '.join(sorted(found)))}"


# -- words ---------------------------------------------------------------------------------------------------------------


def _union(sets: Iterable[Collection[str]]) -> set[str]:
    return {one for found in sets for one in found}


def _who(having: Iterable[tuple[Run, _Value]], value_of: Callable[[Run, _Value], str]) -> str:
    """Say which files have which value, the most common one first."""
    paths = gathered((value_of(run, value), run.path) for run, value in having)
    ordered = sorted(paths.items(), key=lambda pair: -len(pair[1]))
    return "; ".join(f"{value} in {some(who, _FILES)}" for value, who in ordered)
