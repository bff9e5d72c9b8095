"""Files of the runs of one suite, as pytest --attn-output=FILE.jsonl writes them in groups, without running anything."""

import hashlib
import itertools

from fakes.records import run_of
from pytest_attn.reports.files import ESCAPED
from pytest_attn.reports.records import changed, to_line
from pytest_attn.reports.runs import to_run_line
from pytest_attn.version import __version__

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_runs(folder, count, cases):
    """Write part-1.jsonl and so on, each with cases of its own; return, for each file, its records."""
    pool = itertools.cycle(run_of(max(100, min(600, cases))))
    found = []
    for number in range(1, count + 1):
        names = [f"test_kernel.py::test_it[part{number}-case{case}]" for case in range(cases)]
        found.append([changed(next(pool), test=name, version="") for name in names])
    every = [record["test"] for records in found for record in records]
    for number, records in enumerate(found, 1):
        write(folder, number, lines_of_run(records, every, group=f"{number}/{count}"))
    return found


def lines_of_run(found, every, tests=(), **facts):
    """Return the lines of a run. found: its records. every: the tests that it collected. tests: those that left no record."""
    ran = {record["test"] for record in found} | set(tests)
    closing = {
        "command": f"pytest --group={facts.get('group', '').partition('/')[0]}",
        "choice": "",
        "group": "",
        "commit": COMMIT,
        "sources": {},
        "options": "",
        "seed": 0,
        "pytest_attn": __version__,
        "plugin": "",
        "python": "3.12.1",
        "device": "NVIDIA H200",
        "records": len(found),
        "uncollected": 0,
        "exit": 0,
        "collected": len(ran | set(every)),
        "selected": len(ran),
        "judged": len(ran),
        "skipped": 0,
        "ran": ran,
        "unfinished": (),
        "left_out": set(every) - ran,
        "unchosen": (),
    }
    lines = [*map(to_line, found)]
    written = hashlib.sha256("".join(f"{line}\n" for line in lines).encode(errors=ESCAPED))
    return [*lines, to_run_line({**closing, **facts}, written)]


def write(folder, number, lines):
    path = folder / f"part-{number}.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
