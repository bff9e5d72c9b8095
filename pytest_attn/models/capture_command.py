"""`python -m pytest_attn capture FILE.py:FUNCTION`: the workloads that a function's attention asks, as code."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

_WORDS = "Run a function, and print the workloads of its attention calls as code, with counts."


def add_capture(commands: Any) -> None:
    """Declare the command; `run_capture` runs it."""
    command = commands.add_parser("capture", help=_WORDS, description=_WORDS)
    command.add_argument("function", metavar="FILE.py:FUNCTION", help="a function without arguments that runs the model")
    command.set_defaults(capture=run_capture, error=command.error)


def run_capture(given: argparse.Namespace) -> int:
    """Print the code; return 0. Another FILE:FUNCTION is a usage error: exit 2."""
    from pytest_attn.models.capture import NotReadError, capture, workloads_as_code

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
