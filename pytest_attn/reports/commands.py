"""`python -m pytest_attn report | rank | summary FILE.jsonl ...`: from .jsonl files of a run alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from pytest_attn.reports.columns import room
from pytest_attn.reports.files import write_atomically
from pytest_attn.reports.merging import add_merge
from pytest_attn.reports.records import Record, read_records


def add_commands(parser: argparse.ArgumentParser) -> Any:
    """Declare the commands, and return where others are added; `run_command` runs the one that was given."""
    commands = parser.add_subparsers(title="commands; the first four take .jsonl files of --attn-output", metavar="COMMAND")
    for name, (run, words) in _COMMANDS.items():
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument("files", nargs="+", metavar="FILE.jsonl", help="what pytest --attn-output=FILE.jsonl wrote")
        command.set_defaults(run=run, error=command.error)
        if run is _report:
            command.add_argument("-o", "--output", default="report.html", metavar="FILE.html", help="(default: %(default)s)")
    add_merge(commands)
    return commands


def run_command(given: argparse.Namespace) -> int:
    """Run a command; return 0. A missing or unwritable file is a usage error: exit 2."""
    try:
        given.run(read_records(*given.files), given)
    except BrokenPipeError:
        raise
    except FileNotFoundError as error:
        given.error(f"there is no {error.filename}; pytest --attn-output={error.filename} writes it")
    except (OSError, ValueError) as error:
        given.error(str(error))
    except (KeyError, TypeError, AttributeError) as error:  # fields that are missing or of another shape
        given.error(f"these records cannot be read: {type(error).__name__}: {error}; did --attn-output write them?")
    return 0


def _report(records: Sequence[Record], given: argparse.Namespace) -> None:
    from pytest_attn.reports.html.page import INSTALL, missing_libraries, report_page

    if missing := missing_libraries():
        given.error(f"needs {' and '.join(missing)}; {INSTALL}")
    if any(os.path.realpath(given.output) == os.path.realpath(path) for path in given.files):
        given.error(f"{given.output} is one of the input files: refusing to overwrite it; choose another -o")
    try:
        write_atomically(given.output, report_page(records))
    except OSError as error:
        given.error(f"cannot write {given.output}: {error.strerror}")
    print(f"written to {given.output}")


def _rank(records: Sequence[Record], given: argparse.Namespace) -> None:
    from pytest_attn.reports.ranking import rank
    from pytest_attn.reports.ranking_output import rank_summary

    for text, _ in rank_summary(rank(records), verbose=False, width=room(sys.stdout.isatty())):
        print(text)


def _summary(records: Sequence[Record], given: argparse.Namespace) -> None:
    from pytest_attn.reports.markdown import markdown_summary

    print(markdown_summary(records), end="")


_COMMANDS = {
    "report": (_report, "Write the page that --attn-output=FILE.html writes."),
    "rank": (_rank, "Print which backend is fastest and right, as --attn-rank does."),
    "summary": (_summary, "Print the summary that --attn-output=FILE.md writes."),
}
