"""The guest against: `pytest --attn-against=REV`, and the commands `compare` and `bisect`."""

import argparse
from typing import Any

from pytest_attn.seam import Guest
from pytest_attn.session.option_types import action

_HERE = "pytest_attn.guests.against"
_WORDS = "Say what changed between two runs: verdicts, p50s, z, memory, compilation, kernels launched, refusals."
_BISECT = (
    "For `git bisect run python -m pytest_attn bisect TEST`: exit with 1 where TEST is slower than in the oldest good"
    " revision, 0 where it is not, and 125 where that cannot be said, as it is wrong, does not build, or is inconclusive."
)


def _other_side(text: str) -> Any:
    """Return what the text of the option means; few runs come here."""
    from pytest_attn.guests.against.other_side import other_side

    return other_side(text)


_OPTIONS = {
    "against": action(
        "Judge this version and another, and time both by turns in new processes, without a baseline: a revision, the python"
        " of an environment that has the other version, or self",
        "REV|PYTHON|self",
        _other_side,
        is_serial=True,
        group="latency",
        short="this version against another, without a baseline",
    ),
}


def add_commands(commands: Any) -> None:
    """Declare both commands of `python -m pytest_attn`."""
    compare = commands.add_parser("compare", help=_WORDS, description=_WORDS)
    compare.add_argument("base", metavar="BASE.jsonl", help="what pytest --attn-output=FILE.jsonl wrote before")
    compare.add_argument("head", metavar="HEAD.jsonl", help="and now")
    compare.add_argument("--md", action="store_true", help="as a comment for a pull request")
    compare.set_defaults(run=f"{_HERE}.compare_records:run_compare", error=compare.error)
    words = {"help": "TEST is slower than in a good revision: 1, 0 or 125", "description": _BISECT}
    bisect = commands.add_parser("bisect", **words, prefix_chars="+", add_help=False)  # -x and -h are pytest's
    bisect.add_argument("arguments", nargs=argparse.REMAINDER, metavar="TEST", help="a test, and further arguments of pytest")
    bisect.set_defaults(run=f"{_HERE}.compare_records:run_bisect", help=bisect.format_help)


GUEST = Guest(
    options=_OPTIONS,
    mode=f"{_HERE}.against_run:AgainstOther",
    commands=(f"{_HERE}.against_guest:add_commands",),
    compares="another revision, on this machine, here and now: --attn-against=REV",
)
