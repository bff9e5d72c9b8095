"""`python -m pytest_attn verify run.jsonl`: whether a run is of this tree, and whole; a machine without a GPU can tell.

By what the closing line of a run says of it, and by what git and a collection say of the tree.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_attn.processes.last_words import last_words
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.reports.lines import count, some
from pytest_attn.reports.merging import problems, usage_errors
from pytest_attn.reports.records import failures, read_line
from pytest_attn.reports.runs import Run, RunFacts, is_as_written, read_runs
from pytest_attn.session.repository import commit_of, git, own_digest, sources_at, top_of
from pytest_attn.version import __version__

#: digits of a commit or a digest, and names of files or tests, that are shown
_DIGITS, _SHOWN = 10, 3
#: what a folder has in which pytest is run as a rule: else its tests had other names, or were fewer
_ROOTS = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg", "setup.py", ".git")


class CannotSayError(Exception):
    """Whether a run is of a tree cannot be said; the text says why."""


def run_verify(given: argparse.Namespace) -> int:
    """Print what is wrong, or one line that says of what the run is; return 0, 1 or 2."""
    with usage_errors(given):
        runs = read_runs(given.file)
    found: list[str] = []
    try:
        for said in _refusals(runs, given):
            found.append(said)
            print(f"verify: {said}", file=sys.stderr)
    except CannotSayError as error:
        if not found:
            print(f"verify: cannot say: {error}", file=sys.stderr)
            return 2
    if not found:
        print(_accepted([run.facts for run in runs if run.facts], runs, given))
    return int(bool(found))


def _accepted(closed: Sequence[RunFacts], runs: Sequence[Run], given: argparse.Namespace) -> str:
    records = [record for run in runs for line in run.lines if (record := read_line(line, given.file))]
    numbers = {name: sum(facts[name] for facts in closed) for name in ("judged", "skipped")}
    words = [count(sum(len(facts["ran"]) for facts in closed), "test"), *(f"{n:,} {name}" for name, n in numbers.items())]
    words.append(f"{failures(records):,} failed")
    words += [f"exit code {one}" for one in sorted({facts["exit"] for facts in closed} - {0})]
    words.append(f"seed {some(sorted({str(facts['seed']) for facts in closed}))}")
    words += sorted({facts["device"] for facts in closed} - {""})
    whole = "its tests were not collected here" if given.no_collect else "whole"
    return f"{given.file} is of {closed[0]['commit'][:_DIGITS]}, {whole}: {', '.join(words)}, pytest-attn {__version__}"


def _refusals(runs: Sequence[Run], given: argparse.Namespace) -> Iterator[str]:
    """Yield why the runs in a file are not one whole run of the tree. Raises CannotSayError."""
    yield from not_whole(runs)
    closed = [(run, run.facts) for run in runs if run.facts is not None]
    top = _top()
    here, commit = commit_of(top), _commit_named(given.at or "HEAD", top)
    if not given.at and here != commit:
        yield f"this tree has uncommitted changes, expected none; commit them, or name a revision: --at={_short(commit)}"
    sources = sources_at(top, commit)
    for run, facts in closed:
        yield from (f"{run.path} {said}" for said in not_of_commit(facts, commit, sources))
        if given.seed not in (None, facts["seed"]):
            yield f"{run.path} has seed {facts['seed']}, expected {given.seed}; run it with --attn-seed={given.seed}"
        if given.device not in (None, facts["device"]):
            found = facts["device"] or "no device"
            yield f"{run.path} ran on {found}, expected {given.device}; run it there: {facts['command']}"
    if not given.no_collect:
        if here != commit:
            raise CannotSayError(
                f"this tree is at {_short(here)}; git checkout {_short(commit)}, or leave it out: --no-collect"
            )
        yield from _of_other_tests(closed, given)


def not_whole(runs: Sequence[Run]) -> Iterator[str]:
    """Yield why runs are not one whole run, as it was written."""
    yield from problems(runs)
    for run in runs:
        if run.facts and not run.damaged and not is_as_written(run):
            yield f"{run.path}: its lines are not those of which its closing line has the digest: they were changed"
    closed = [run.facts for run in runs if run.facts]
    if closed and not any(facts["judged"] for facts in closed):
        yield f"{runs[0].path} has judged nothing, expected judgments; its device may be lacking: {closed[0]['command']}"


def _top() -> Path:
    top = top_of(Path.cwd())
    if top is None:
        raise CannotSayError(f"{Path.cwd()} is in no git repository; run it in that of the tests")
    return top


def _commit_named(revision: str, top: Path) -> str:
    commit = git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    if not commit:
        raise CannotSayError(f"{top} has no revision {revision}; git log lists them, git fetch --unshallow gets more")
    return commit


def tree_of(revision: str) -> tuple[str, dict[str, str]]:
    """Return the commit of a revision, and git's ids of its files. Raises CannotSayError."""
    top = _top()
    commit = _commit_named(revision, top)
    return commit, sources_at(top, commit)


def not_of_commit(facts: RunFacts, commit: str, sources: Mapping[str, str]) -> Iterator[str]:
    """Yield in which way a run is not of a commit, whose files have these ids. Raises CannotSayError."""
    if not facts["commit"]:
        raise CannotSayError(
            "git told it no commit: its tests lay in no repository, or in another user's (git config safe.directory)"
        )
    name, plus, _ = facts["commit"].partition("+")
    others = [place for place, told in facts["sources"].items() if sources.get(place) != told]
    if name != commit:
        yield f"is of commit {_short(name)}, expected {_short(commit)}; run it again there: {facts['command']}"
    elif plus:
        yield f"is of {_short(name)} with uncommitted changes, expected none; commit, and run it again: {facts['command']}"
    elif others:
        yield f"had other files than {_short(commit)} has: {some(others, _SHOWN)}; commit or install them, and run it again"
    elif not facts["sources"]:
        yield f"has imported nothing of {_short(commit)}, expected its tests or its kernels; name them: {facts['command']}"
    if facts["pytest_attn"] != __version__:
        raise CannotSayError(f"it is by pytest-attn {facts['pytest_attn']}, this is {__version__}; install the same")
    if facts["plugin"] != (own := own_digest()):
        found = _short(facts["plugin"])
        yield f"is by a pytest-attn with other files than this one ({found}, expected {_short(own)}); install the same"


def _of_other_tests(closed: Sequence[tuple[Run, RunFacts]], given: argparse.Namespace) -> Iterator[str]:
    """Yield which tests pytest collects here that did not run, and which options another run would have."""
    expected = _collected(shlex.split(given.args))
    wanted = expected["ran"] | expected["unfinished"]
    ran: set[str] = set().union(*(facts["ran"] for _, facts in closed))
    if missing := sorted(wanted - ran):
        yield (
            f"{given.file} has {len(wanted) - len(missing):,} of {count(len(wanted), 'test')} that pytest collects here, not"
            f" {some(missing, _SHOWN)}; run them, or name the arguments of the run: --args"
        )
    for options in sorted({_but_the_seed(facts) for _, facts in closed} - {_but_the_seed(expected)}):
        asked = _but_the_seed(expected) or "none"
        yield f"{given.file} has the options {options or 'none'}, expected {asked}; name them if they are meant: --args"


def _but_the_seed(facts: RunFacts) -> str:
    return re.sub(r"--attn-seed=\S+ ?", "", facts["options"]).strip()


def _collected(arguments: Sequence[str]) -> RunFacts:
    """Return what pytest says of the tests of this tree that it would run. Raises CannotSayError."""
    here = Path.cwd()
    root = here if arguments else next(one for one in (here, *here.parents) if any((one / name).exists() for name in _ROOTS))
    with ProcessFolder("verify-") as folder:
        path = Path(folder) / "collected.jsonl"
        words = ["pytest", *arguments, "--collect-only", "-q", f"--attn-output={path}"]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, cwd=root, check=False
        )
        facts = read_runs(str(path))[-1].facts if path.exists() else None
    if facts is None or facts["uncollected"] or not facts["selected"]:
        said = last_words(done.stderr + done.stdout)
        raise CannotSayError(f"{shlex.join(words[:-1])} fails here: {said}; mend it, or leave it out: --no-collect")
    return facts


def _short(name: str) -> str:
    return name[:_DIGITS] + ("+" if "+" in name else "")
