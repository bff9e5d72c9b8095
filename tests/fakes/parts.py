"""Files of a run in parts, as pytest --attn-shard=I/N writes them, without running anything."""

import itertools

from fakes.records import run_of
from pytest_attn.reports.parts import to_part_line
from pytest_attn.reports.records import changed, to_line
from pytest_attn.version import __version__

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lines_of_part(number, parts, records, tests=None, commit=COMMIT, version=__version__, ended=None, **begun):
    """Return the lines of one part. ended: what its last line says otherwise."""
    facts = {"number": number, "parts": parts, "commit": commit, "options": "", "pytest_attn": version, "python": "3.12.1"}
    facts |= begun
    count = len({record["test"] for record in records}) if tests is None else tests
    end = {
        "device": "NVIDIA H200",
        "collection": "c" * 12,
        "split": "5" * 12,
        "total": 4000,
        "tests": count,
        "ran": count,
        "uncollected": 0,
        "exit": 0,
    }
    return [
        to_part_line({"state": "begun", **facts}),
        *map(to_line, records),
        to_part_line({"state": "ended", **facts, **end, **(ended or {})}),
    ]


def write_parts(folder, parts, cases_per_part, seed=0):
    """Write part-1.jsonl and so on; return, for each part, its records. Every test is in one part."""
    pool = itertools.cycle(run_of(max(100, min(600, cases_per_part)), seed))
    found = []
    for number in range(1, parts + 1):
        names = [f"test_kernel.py::test_it[part{number}-case{case}]" for case in range(cases_per_part)]
        found.append([changed(next(pool), test=name, version="") for name in names])
        write(folder, number, lines_of_part(number, parts, found[-1]))
    return found


def write(folder, number, lines):
    """Write the file of one part; return its path."""
    path = folder / f"part-{number}.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
