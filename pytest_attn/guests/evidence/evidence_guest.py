"""The guest evidence: `python -m pytest_attn verify` and `history`."""

from typing import Any

from pytest_attn.seam import Guest

_WORDS = (
    "Say whether a run is of this tree and whole: 0 where it is; 1 where it is not, with what was found and expected; 2 where"
    " that cannot be said. It is not a signature."
)


def add_verify(commands: Any) -> None:
    """Declare the command of `python -m pytest_attn`."""
    command = commands.add_parser("verify", help="say whether a run is of this tree and whole", description=_WORDS)
    command.add_argument("file", metavar="FILE.jsonl", help="what pytest --attn-output=FILE.jsonl wrote, or merge")
    command.add_argument("--at", metavar="REV", help="the revision that it must be of (default: this tree, without changes)")
    command.add_argument("--seed", type=int, help="the seed that it must have (default: any)")
    command.add_argument("--device", metavar="NAME", help='the GPU that it must have run on, as "NVIDIA H200" (default: any)')
    command.add_argument(
        "--args",
        default="",
        metavar="ARGUMENTS",
        help='of pytest, which say what must have run: --args="tests/kernels --attn-backends=mine" (default: none)',
    )
    command.add_argument("--no-collect", action="store_true", help="do not ask pytest here which tests there are")
    command.set_defaults(run="pytest_attn.guests.evidence.verify:run_verify", error=command.error)


def add_history(commands: Any) -> None:
    """Declare the other one."""
    words = "Write a page of several runs: p50s and what differs between neighbours, versions, verdicts, z."
    command = commands.add_parser("history", help=words, description=words)
    command.add_argument(
        "files", nargs="+", metavar="FILE.jsonl", help="what pytest --attn-output=FILE.jsonl wrote, one a run"
    )
    command.add_argument("-o", "--output", default="history.html", metavar="FILE.html", help="default: %(default)s")
    command.set_defaults(run="pytest_attn.guests.evidence.history:run_history", error=command.error)


GUEST = Guest(commands=(f"{__name__}:add_verify", f"{__name__}:add_history"))
