"""The lines of a part in a file, read one at a time: its records, what it says of itself, and what is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_attn.reports.parts import facts_of_line, stable_id
from pytest_attn.reports.records import Record, read_line

#: what must be the same in all parts, as a sentence begins
ORDER = _COMMIT, _OPTIONS, _OURS, _PYTHON, _TORCH, _DEVICE, _GPU = (
    *("the commit", "the choice of options", "pytest-attn's version", "Python's version", "torch's version"),
    *("the device", "the GPU of some tests"),
)


@dataclass
class PartFile:
    """The lines of one part in a file.

    facts: of its first line. ended: of its last one, empty where there is none. good: the numbers of the lines that are
    records. damaged: what is wrong with others. tests: their ids. found: what must be the same in all parts. libraries:
    versions by backend, which must be the same too. records: all of them, None where only their lines are wanted.
    """

    path: str
    facts: Mapping[str, Any]
    ended: Mapping[str, Any] = field(default_factory=dict)
    good: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    tests: set[str] = field(default_factory=set)
    found: dict[str, set[str]] = field(default_factory=dict)
    libraries: dict[str, set[str]] = field(default_factory=dict)
    records: list[Record] | None = None

    def __post_init__(self) -> None:
        if self.facts:
            self.note(_COMMIT, _short(self.facts.get("commit")))
            self.note(_OPTIONS, _short(self.facts.get("options")))
            self.note(_OURS, str(self.facts.get("pytest_attn")))
            self.note(_PYTHON, ".".join(str(self.facts.get("python")).split(".")[:2]))

    @property
    def number(self) -> int:
        """Which part, 0 where nobody says."""
        return int(self.facts.get("number", 0))

    @property
    def name(self) -> str:
        """What it is called in a message."""
        return f"part {self.number} ({self.path})" if self.number else self.path

    def note(self, kind: str, value: str) -> None:
        """Keep what must be the same in all parts."""
        self.found.setdefault(kind, set()).add(value)

    def add(self, record: Record, number: int) -> None:
        """Take note of a record and its line."""
        self.good.append(number)
        if self.records is not None:
            self.records.append(record)
        self.tests.add(stable_id(record["test"]))
        machine = record["machine"]
        if machine:
            self.note(_TORCH, str(machine.get("torch")))
            if machine.get("kind") != "cpu":
                self.note(_GPU, str(machine.get("name")))
            self.note(_OURS, str(machine.get("pytest_attn")))
        if record["version"]:
            backend = str(record["tags"].get("backend", record["subject"]))
            self.libraries.setdefault(backend, set()).add(record["version"])


def lines_of(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, one at a time."""
    with open(path, "rb") as file:
        yield from enumerate(file, 1)


def scan(path: str, with_records: bool = False) -> list[PartFile]:
    """Return the parts in a file: as a rule one; several where files were put behind one another. Raises OSError.

    with_records: whether they keep their records, which take far more memory than their lines.
    """

    def part(facts: Mapping[str, Any]) -> PartFile:
        return PartFile(path, facts, records=[] if with_records else None)

    found: list[PartFile] = []
    for number, raw in lines_of(path):
        if not raw.strip():
            continue
        if not found:
            found.append(part({}))
        try:
            if not raw.endswith(b"\n"):
                raise ValueError(f"{path}, line {number}: is cut short")
            line = raw.decode()
            facts = facts_of_line(line, f"{path}, line {number}")
            if facts is None:
                record = read_line(line, f"{path}, line {number}")
                assert record is not None, line
                found[-1].add(record, number)
            elif facts["state"] == "ended":
                _end(found[-1], facts)
            else:
                found.append(part(facts))
        except UnicodeDecodeError:
            found[-1].damaged.append(f"{path}, line {number}: is not UTF-8")
        except ValueError as error:
            found[-1].damaged.append(str(error))
    return [one for one in found if one.facts or one.good or one.damaged] or [part({})]


def _end(part: PartFile, facts: Mapping[str, Any]) -> None:
    """Take the closing line of a part. Raises ValueError where that is of another part, or of none that began."""
    if part.number != facts["number"] or part.facts["parts"] != facts["parts"] or part.ended:
        raise ValueError(f"{part.path}: part {facts['number']} of {facts['parts']} ends without having begun")
    part.ended = facts
    if facts.get("device"):
        part.note(_DEVICE, str(facts["device"]))


def _short(value: object) -> str:
    """Return a commit or options as they read in a sentence."""
    text = str(value or "")
    if not text:
        return "none"
    commit, plus, changes = text.partition("+")
    return f"{commit[:10]}{plus}{changes}" if len(commit) == 40 else text
