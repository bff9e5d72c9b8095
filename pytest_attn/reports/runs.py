"""The runs in a .jsonl file: the lines of each, and the closing line that says which tests it collected, left out and ran."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, TypedDict, cast, get_args, get_type_hints

from pytest_attn.reports.files import ESCAPED
from pytest_attn.reports.records import OUR_SCHEMA, RUN, SCHEMA, Record, gathered, read_line, require_described
from pytest_attn.reports.strict_json import TEXT, array_of, by_name, object_of, parse_json
from pytest_attn.workloads.functions import printable


class RunFacts(TypedDict):
    """The closing line of a run; there ids of tests are by what is before their first bracket: {"a::b": ["[c]"]}."""

    command: Annotated[str, "what was typed"]
    choice: Annotated[str, "-k, -m and --deselect; --lf if it left out tests that did not fail before"]
    group: Annotated[str, "I/N where pytest-split divided the tests, else empty"]
    commit: Annotated[str, "of the repository, marked if there are uncommitted changes; empty without git"]
    sources: Annotated[
        dict[str, str],
        "git's id of what each Python file held that the run has imported, by its place in the repository: of an installed"
        " package as well, if the repository has it; and of files of C, CUDA and the like that git lacks and does not ignore",
    ]
    options: Annotated[str, "the options of pytest-attn that differ from their defaults, without outputs and device"]
    seed: Annotated[int, "of the inputs"]
    pytest_attn: Annotated[str, "its version"]
    plugin: Annotated[str, "SHA-256 of its own files"]
    python: Annotated[str, "its version"]
    device: Annotated[str, "name of the GPU of tests that name no device, or cpu; empty without such tests"]
    records: Annotated[int, "how many lines before this one are its records"]
    uncollected: Annotated[int, "how many files could not be collected"]
    exit: Annotated[int, "pytest's exit code"]
    collected: Annotated[int, "how many tests were collected, before any was deselected: those of the next four fields"]
    selected: Annotated[int, "how many were to run: those of `ran` and `unfinished`"]
    judged: Annotated[int, "how many of these came to a judgment"]
    skipped: Annotated[int, "how many of these were skipped, by whomever"]
    ran: Annotated[frozenset[str], "ids of tests that ran to their end, or that one skipped test stands for"]
    unfinished: Annotated[frozenset[str], "of tests that should have run, and did not"]
    left_out: Annotated[frozenset[str], "of tests that a plugin deselected, as pytest-split does"]
    unchosen: Annotated[frozenset[str], "of tests that -k, -m or --deselect leave out"]
    digest: Annotated[str, "SHA-256 of all that the run wrote before it: records and what stands here above"]


#: ends the choice of a run that collected what failed in an earlier one, and nothing else
LAST_FAILED = "--lf"
#: the types of the fields, and their meanings
_FIELDS = {name: get_args(hint) for name, hint in get_type_hints(RunFacts, include_extras=True).items()}
#: those that hold ids of tests
_IDS = [name for name, (kind, _) in _FIELDS.items() if kind == frozenset[str]]
_OF_TYPES = {str: TEXT, int: {"type": "integer"}, dict[str, str]: by_name(TEXT), frozenset[str]: by_name(array_of(TEXT))}
#: behind the digest, the last field
_END = '"}}'
CLOSING_LINE = object_of(
    {
        "schema": OUR_SCHEMA,
        RUN: object_of({name: {**_OF_TYPES[kind], "title": meaning} for name, (kind, meaning) in _FIELDS.items()}),
    }
)


@dataclass
class Run:
    """One run in a file.

    lines: those of its records, and the closing line last. records: how many. damaged: what is wrong with other lines.
    facts: of the closing line, None where there is none. versions: what the records say of the software and the GPU, by what
    that is.
    """

    path: str
    lines: list[str] = field(default_factory=list)
    records: int = 0
    damaged: list[str] = field(default_factory=list)
    facts: RunFacts | None = None
    versions: dict[str, set[str]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Take note of a record."""
        self.records += 1
        machine = record["machine"]
        if machine:
            self._note("torch's version", machine.get("torch"))
            self._note("pytest-attn's version", machine.get("pytest_attn"))
            if machine.get("kind") != "cpu":
                self._note("the GPU of some tests", machine.get("name"))
        if record["version"]:
            self._note(f"the library of {record['tags'].get('backend', record['subject'])}", record["version"])

    def _note(self, what: str, value: object) -> None:
        self.versions.setdefault(what, set()).add(str(value))


def read_runs(path: str) -> list[Run]:
    """Return the runs in a file: as a rule one; several where files were put behind one another. Raises OSError."""
    runs = [Run(path)]
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            run, where = runs[-1], f"{path}, line {number}"
            try:
                line = raw.decode()
                if not line.strip():
                    continue
                if not line.endswith("\n"):
                    raise ValueError(f"{where}: is cut short")
                record = read_line(line, where)
                if record is not None:
                    run.add(record)
                else:
                    run.facts = _facts_of(line, where)
                    runs.append(Run(path))
                run.lines.append(line)
            except UnicodeDecodeError:
                run.damaged.append(f"{where}: is not UTF-8")
            except ValueError as error:
                run.damaged.append(str(error))
    return [run for run in runs if run.lines or run.damaged] or [Run(path)]


def to_run_line(facts: RunFacts, written: hashlib._Hash | None = None) -> str:
    """Return the closing line of a run, with its digest. written: that of the lines before, where there are any."""
    ids = {name: grouped(facts[name]) for name in _IDS}  # type: ignore[literal-required]
    closing = {"schema": SCHEMA, RUN: {**facts, **ids, "digest": ""}}
    text = json.dumps(closing, ensure_ascii=False, separators=(",", ":")).removesuffix(_END)
    whole = written.copy() if written else hashlib.sha256()
    whole.update(text.encode(errors=ESCAPED))
    return f"{text}{whole.hexdigest()}{_END}"


def is_as_written(run: Run) -> bool:
    """Return whether the lines of a run that is closed are those of which its closing line has the digest."""
    text = "".join(run.lines).rstrip("\n")
    end = f"{run.facts['digest']}{_END}" if run.facts else ""
    return text.endswith(end) and hashlib.sha256(text.removesuffix(end).encode()).hexdigest() + _END == end


def _facts_of(line: str, where: str) -> RunFacts:
    closing = parse_json(line)
    require_described(closing, CLOSING_LINE, where)
    facts = closing[RUN]
    ids = {name: frozenset(f"{stem}{rest}" for stem, some in facts[name].items() for rest in some) for name in _IDS}
    return cast(RunFacts, {**facts, **ids})


def collected_by(facts: RunFacts) -> frozenset[str]:
    """Return the ids of all tests that a run knows of."""
    return facts["ran"] | facts["unfinished"] | facts["left_out"] | facts["unchosen"]


def grouped(ids: Iterable[str]) -> dict[str, list[str]]:
    """Return ids of tests by what stands before their first bracket, as that is much the same for many."""
    parts = (one.partition("[") for one in sorted(ids))
    return gathered((name, bracket + rest) for name, bracket, rest in parts)


def stable_id(nodeid: str) -> str:
    """Return a test's id as every host writes it: without xdist's group, and without where an installed suite lies."""
    path, colons, name = nodeid.partition("::")
    group = name.find("@", name.rfind("]") + 1)
    return printable(f"{re.sub(r'.*(?:site|dist)-packages/(?=.)', '', path)}{colons}{name if group < 0 else name[:group]}", 0)
