"""`python -m pytest_attn audit`: a repository's own tests with faulty kernels in place of theirs, and what they let pass."""

from __future__ import annotations

import argparse
from typing import Any

from pytest_attn.reports.merging import require_output

_WORDS = "Run attention tests with faulty kernels in place of theirs: which do they let pass, and by which tolerance?"


def add_audit(commands: Any) -> None:
    """Add the command to those of `python -m pytest_attn`. commands: the subparsers."""
    audit = commands.add_parser("audit", help=_WORDS, description=_WORDS)
    audit.add_argument("files", nargs="+", metavar="TESTS", help="files, folders or ids of tests")
    named = "the kernel: module:function, or a fixture or parameter of tests (default: the one attention function they call)"
    audit.add_argument("--replace", action="append", default=[], metavar="NAME", help=named)
    layout = "of a function of yours: bhsd, (batch, heads, rows, dim), or bshd (default: %(default)s)"
    audit.add_argument("--layout", choices=("bhsd", "bshd"), default="bhsd", help=layout)
    audit.add_argument(
        "--seconds", type=float, default=600.0, help="for all; no fault is tried past them (default: %(default)g)"
    )
    audit.add_argument("--pytest", default="", metavar="OPTIONS", help='options of pytest, as --pytest="-k causal"')
    audit.add_argument("-o", "--output", metavar="FILE", help="write FILE.md or FILE.json, too")
    audit.set_defaults(run=_run, error=audit.error)


def _run(given: argparse.Namespace) -> int:
    """Audit; return 0, or 1 where no test could be audited. Other arguments are a usage error: exit 2."""
    if given.output is not None:
        require_output(given, given.output, "-o", (".md", ".json"))
    if not given.seconds > 0:
        given.error(f"--seconds must be a number of seconds > 0, got {given.seconds:g}")
    from pytest_attn.guests.audit.audit_report import run_audit  # imports torch

    return run_audit(given)
