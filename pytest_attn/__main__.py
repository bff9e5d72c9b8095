"""`python -m pytest_attn`: what is installed here and what it can run; reports of earlier runs. Collects no tests."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_attn.backends.machine import versions_of
from pytest_attn.models.capture_command import add_capture
from pytest_attn.reports.commands import add_commands, run_command
from pytest_attn.version import __version__

if TYPE_CHECKING:
    from pytest_attn.backends.machine import Machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the listing, or run a command; return 0, or 1 where torch is missing or broken. Unknown arguments exit with 2."""
    from pytest_attn.backends.machine import machine_of, resolve_device
    from pytest_attn.session.devices import NoTorchError, require_torch

    parser = _parser()
    given = parser.parse_args(arguments)
    if "run" in given:
        return run_command(given)
    if "merge" in given:
        return int(given.merge(given))
    if "capture" in given:
        return int(given.capture(given))
    wanted = given.device
    try:
        require_torch()
        machine = machine_of(resolve_device(wanted))
    except NoTorchError as error:
        print(error, file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(f"argument --device: {error}")
    command = "pytest --pyargs pytest_attn.suite --attn-workloads=smoke"
    if wanted != "auto":
        command += f" --attn-device={wanted}"
    print("\n".join(_lines(machine, f"next: {command}  (the bundled tests, on small workloads)")))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pytest_attn",
        description="Without a command: print versions, backends with what they can do, and workloads. Runs no test.",
        epilog="Backends and workloads of your conftests are in: pytest --attn-list",
    )
    parser.add_argument("--version", action="version", version=f"pytest-attn {__version__}")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:N, xpu or mps (default: auto, the best there is)"
    )
    add_capture(add_commands(parser))
    return parser


def _lines(machine: Machine, closing: str) -> Iterator[str]:
    """Yield versions, tables and the closing sentence."""
    from pytest_attn.backends.registry import Registry, tables
    from pytest_attn.reports.columns import aligned, room
    from pytest_attn.reports.terminal import listing
    from pytest_attn.workloads.catalog import builtin_catalog

    architecture = f", {machine.architecture}" if machine.capability else ""
    device = f"{machine.device}, {machine.name}{architecture}, {machine.memory / 2**30:,.0f} GiB"
    yield from aligned([*versions_of(machine).items(), ("device", device)])
    yield ""
    for text, _ in listing(tables(Registry(), builtin_catalog(), machine), closing, room(sys.stdout.isatty())):
        yield text


def _run() -> int:
    """Run, and end quietly where who reads the output has gone, as `| head` does."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(_run())
