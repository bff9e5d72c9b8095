"""`python -m pytest_attn merge OUT FILE.jsonl ...`: the files of all parts of a run as one, or else why they are not that."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_attn.files import write_atomically, written_atomically
from pytest_attn.reports.merging import problems
from pytest_attn.reports.part_files import PartFile, lines_of, scan

_WORDS = "Join the files of all parts of a run with --attn-shard, once none is missing and none is of another run."


def add_merge(commands: Any) -> None:
    """Declare the command; `run_merge` runs it."""
    command = commands.add_parser("merge", help=_WORDS, description=_WORDS)
    command.add_argument("out", metavar="OUT", help="NAME.jsonl for the records, or NAME.html or .md for a report of them")
    command.add_argument("files", nargs="+", metavar="FILE.jsonl", help="what pytest --attn-shard=I/N wrote, of each part")
    command.add_argument("--force", action="store_true", help="write OUT also where something is missing; still exit with 1")
    command.set_defaults(merge=run_merge, error=command.error)


def run_merge(given: argparse.Namespace) -> int:
    """Merge; return 0, or 1 where the parts are not one whole run, which is said. Other files are a usage error: exit 2."""
    _require_possible(given)
    try:
        is_report = not given.out.endswith(".jsonl")
        parts = sorted((part for path in given.files for part in scan(path, is_report)), key=lambda part: part.number)
    except FileNotFoundError as error:
        given.error(f"there is no {error.filename}; pytest --attn-output={error.filename} writes it")
    except OSError as error:
        given.error(str(error))
    found = problems(parts)
    for said in found:
        print(f"merge: {said}", file=sys.stderr)
    if found and not given.force:
        print(f"merge: not one whole run, so {given.out} was not written; --force writes it all the same", file=sys.stderr)
        return 1
    try:
        _write(given.out, parts)
    except OSError as error:
        given.error(f"cannot write {given.out}: {error.strerror or error}")
    records = sum(len(part.good) for part in parts)
    tests = sum(part.ended["tests"] for part in parts if part.ended)
    print(f"{'not whole: ' * bool(found)}{len(parts)} parts, {tests:,} tests, {records:,} records: written to {given.out}")
    return int(bool(found))


def _require_possible(given: argparse.Namespace) -> None:
    """End with a usage error where OUT cannot be made, or would be one of the inputs."""
    if given.out.endswith(".support.md") or not given.out.endswith((".jsonl", ".html", ".md")):
        given.error(f"OUT must end in .jsonl, .html or .md (not .support.md), got {given.out!r}")
    real = [os.path.realpath(path) for path in given.files]
    if os.path.realpath(given.out) in real:
        given.error(f"{given.out} is one of the input files: refusing to overwrite it; choose another OUT")
    for path, other in zip(given.files, real, strict=True):
        if real.count(other) > 1:
            given.error(f"{path} is named more than once")
    if given.out.endswith(".html"):
        from pytest_attn.reports.html.page import INSTALL, missing_libraries

        if missing := missing_libraries():
            given.error(f"needs {' and '.join(missing)}; {INSTALL}")


def _write(path: str, parts: Sequence[PartFile]) -> None:
    """Write OUT atomically."""
    if path.endswith(".jsonl"):
        with written_atomically(path) as file:
            for line in _lines(parts):
                file.write(line)
        return
    records = [record for part in parts for record in part.records or ()]
    if path.endswith(".html"):
        from pytest_attn.reports.html.page import report_page

        write_atomically(path, report_page(records))
    else:
        from pytest_attn.reports.markdown import markdown_summary

        write_atomically(path, markdown_summary(records))


def _lines(parts: Sequence[PartFile]) -> Iterator[str]:
    """Yield the lines that are records, part by part. Raises OSError where a file has changed since it was read."""
    for part in parts:
        wanted = set(part.good)
        for number, raw in lines_of(part.path):
            if number in wanted:
                wanted.remove(number)
                yield raw.decode()
        if wanted:
            raise OSError(f"{part.path} has changed meanwhile")
