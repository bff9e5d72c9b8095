"""`python -m pytest_attn capture`: the workloads of a function's attention calls, as code."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any


def add_capture(commands: Any) -> None:
    """Add the command to those of `python -m pytest_attn`. commands: the subparsers."""
    words = "Run a function, and print the workloads of its attention calls as code, with counts."
    capture = commands.add_parser("capture", help=words, description=words)
    capture.add_argument("function", metavar="FILE.py:FUNCTION", help="a function without arguments that runs the model")
    capture.set_defaults(run=_capture, error=capture.error)


def _capture(given: argparse.Namespace) -> int:
    """Print the workloads that a function's attention asks, as code; another FILE:FUNCTION exits with 2."""
    from pytest_attn.guests.models.capture import NotReadError, capture, workloads_as_code  # imports torch

    path, _, name = given.function.rpartition(":")
    if not Path(path).is_file():
        given.error(f"there is no file {path or given.function!r}; expected FILE.py:FUNCTION")
    sys.path.insert(0, str(Path(path).resolve().parent))
    function = runpy.run_path(path).get(name)
    if function is None or not callable(function):
        given.error(f"{path} has no function {name!r}")
    assert function is not None
    try:
        calls = capture(function)
    except NotReadError as error:
        given.error(str(error))
    if not calls:
        given.error(f"{name} made no attention call that is caught; pytest_attn.capture(step, functions=[...]) takes your own")
    print(workloads_as_code(calls))
    return 0
