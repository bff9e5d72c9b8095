"""`python -m pytest_attn`: what is installed here and what it can run; reports of earlier runs. Collects no tests."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pkgutil import resolve_name
from typing import NoReturn

from pytest_attn.backends.machine import Machine, machine_of, resolve_device, versions_of
from pytest_attn.backends.registry import Registry, tables
from pytest_attn.reports.files import ESCAPED
from pytest_attn.reports.lines import aligned, room
from pytest_attn.reports.markdown import markdown_summary
from pytest_attn.reports.merging import add_merge, add_on_records, require_output, write_report
from pytest_attn.reports.records import Record
from pytest_attn.reports.terminal import listing
from pytest_attn.seam import guests
from pytest_attn.session.devices import NoTorchError, require_torch
from pytest_attn.version import __version__
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.functions import printable_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the listing, or run a command; return 0, or 1 where torch is missing or broken. Unknown arguments exit with 2."""
    given, unknown = _parser().parse_known_args(arguments)
    if unknown:
        given.error(f"unrecognized arguments: {' '.join(unknown)}")
    run = resolve_name(given.run) if isinstance(given.run, str) else given.run
    return int(run(given))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors may name anything, as a file that there is not."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and the message, without what a terminal or the log of a job obeys."""
        super().error(printable_lines(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pytest_attn",
        description="Without a command: print versions, backends with what they can do, and workloads. Runs no test.",
        epilog="Backends and workloads of your conftests are in: pytest --attn-list",
    )
    parser.add_argument("--version", action="version", version=f"pytest-attn {__version__}")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:N, xpu or mps (default: auto, the best there is)"
    )
    parser.set_defaults(run=_list, error=parser.error)
    commands = parser.add_subparsers(title="commands; the first three take .jsonl files of --attn-output", metavar="COMMAND")
    for name, (run, words) in _COMMANDS.items():
        command = add_on_records(commands, name, words, run)
        if run is _report:
            into = "or FILE.md, as summary prints it (default: %(default)s)"
            command.add_argument("-o", "--output", default="report.html", metavar="FILE.html", help=into)
    add_merge(commands)
    for name in (one for guest in guests() for one in guest.commands):
        resolve_name(name)(commands)
    return parser


def _list(given: argparse.Namespace) -> int:
    """Print what is installed here and what it can run."""
    try:
        require_torch()
        machine = machine_of(resolve_device(given.device))
    except NoTorchError as error:
        print(error, file=sys.stderr)
        return 1
    except ValueError as error:
        given.error(f"argument --device: {error}")
    command = "pytest --pyargs pytest_attn.suite --attn-workloads=smoke"
    if given.device != "auto":
        command += f" --attn-device={given.device}"
    print("\n".join(_lines(machine, f"next: {command}  (the bundled tests, on small workloads)")))
    return 0


def _lines(machine: Machine, closing: str) -> Iterator[str]:
    """Yield versions, tables and the closing sentence."""
    architecture = f", {machine.architecture}" if machine.capability else ""
    device = f"{machine.device}, {machine.name}{architecture}, {machine.memory / 2**30:,.0f} GiB"
    yield from aligned([*versions_of(machine).items(), ("device", device)])
    yield ""
    for text, _ in listing(tables(Registry(), builtin_catalog(), machine), closing, room(sys.stdout.isatty())):
        yield text


# -- the commands that take .jsonl files ----------------------------------------------------------------------------------


def _report(records: Sequence[Record], given: argparse.Namespace) -> None:
    require_output(given, given.output, "-o", (".html", ".md"))
    try:
        write_report(given.output, records)
    except OSError as error:
        given.error(f"cannot write {given.output}: {error.strerror}")
    print(f"written to {given.output}")


def _summary(records: Sequence[Record], given: argparse.Namespace) -> None:
    print(markdown_summary(records), end="")


_COMMANDS = {
    "report": (_report, "Write the page that --attn-output=FILE.html writes."),
    "summary": (_summary, "Print the summary that --attn-output=FILE.md writes."),
}


def _run() -> int:
    """Run, and end quietly where who reads the output has gone, as `| head` does, or a person has stopped it.

    A character that the output lacks is escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ESCAPED)
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT  # as of a program that the signal has ended
    return code


if __name__ == "__main__":
    sys.exit(_run())
