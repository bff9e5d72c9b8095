"""The guest evidence: `python -m pytest_attn verify`, `history` and `certify`."""

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
    """Declare that of runs over time."""
    words = "Write a page of several runs: p50s and what differs between neighbours, versions, verdicts, z."
    command = commands.add_parser("history", help=words, description=words)
    command.add_argument(
        "files", nargs="+", metavar="FILE.jsonl", help="what pytest --attn-output=FILE.jsonl wrote, one a run"
    )
    command.add_argument("-o", "--output", default="history.html", metavar="FILE.html", help="default: %(default)s")
    command.set_defaults(run="pytest_attn.guests.evidence.history:run_history", error=command.error)


def add_certify(commands: Any) -> None:
    """Declare that of certificates."""
    words = "Write of each kernel, version and device of whole runs what was right, as a small JSON file and a badge."
    command = commands.add_parser("certify", help=words, description=words)
    command.add_argument("files", nargs="*", metavar="FILE.jsonl", help="what pytest --attn-output=FILE.jsonl wrote, or merge")
    command.add_argument("-o", "--output", default="certificates", metavar="DIR", help="their folder (default: %(default)s)")
    command.add_argument("--page", metavar="FILE.md", help="write the tables of all certificates in DIR into this page, too")
    command.set_defaults(run="pytest_attn.guests.evidence.certify:run_certify", error=command.error)


GUEST = Guest(commands=(f"{__name__}:add_verify", f"{__name__}:add_history", f"{__name__}:add_certify"))
