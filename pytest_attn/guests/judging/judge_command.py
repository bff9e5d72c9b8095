"""`python -m pytest_attn judge`: a verdict as one JSON object, of one candidate or, by --serve, of one for each line."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import IO, Any, NoReturn

from pytest_attn.guests.judging.answers import BUDGET, FEEDBACK, REQUEST, as_python, unjudged
from pytest_attn.reports.strict_json import first_fault, parse_json

#: bytes of a request, which may have the text of a kernel
_LONGEST = 4 << 20
_JUDGE = "pytest_attn.guests.judging.judge_kernel:judge"
_LAUNCHER = "pytest_attn.guests.isolation.isolated_executor:launcher_of_process"
_SET_DUMPABLE = 4  # PR_SET_DUMPABLE of prctl(2)
#: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3), and bytes; it takes no more for the second
_KEPT_MEMORY = {-1: 1 << 30, -3: 1 << 25}
_WORDS = "Judge a kernel in a process of its own: exit status 0 where it is right, 1 where it is wrong, 2 where nobody knows."


def add_judge(commands: Any) -> None:
    """Add the command to those of `python -m pytest_attn`. commands: the subparsers."""
    judge = commands.add_parser("judge", help=_WORDS, description=_WORDS)
    judge.add_argument("kernel", nargs="?", metavar="FILE.py:FUNCTION", help="or module:FUNCTION")
    judge.add_argument("--workloads", metavar="NAMES", help="names of the catalog, FILE.jsonl of flashinfer-trace, or JSON")
    judge.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    judge.add_argument("--serve", action="store_true", help="answer each line of JSON on stdin by one on stdout")
    judge.add_argument("--feedback", choices=FEEDBACK, default="full", help="what is given back (default: %(default)s)")
    judge.add_argument("--measure", action="store_true", help="time it, too")
    judge.add_argument("--backward", action="store_true", help="judge and time the gradients of q, k and v, too")
    judge.add_argument("--seed", default="random", help="of the inputs (default: %(default)s)")
    judge.add_argument("--budget-s", type=float, default=BUDGET, metavar="SECONDS", help="for all (default: %(default)g)")
    judge.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    judge.add_argument("--declared", default="{}", metavar="JSON", help='what it says of itself: {"layout": "bshd"}')
    judge.error = partial(_refuse, judge.error)
    judge.set_defaults(run=_run, error=judge.error)


def _refuse(say: Callable[[str], NoReturn], message: str) -> NoReturn:
    """Exit with what is wrong with the command line, where --json is among it with an object that says so."""
    if any(len(word) > 2 and "--json".startswith(word) for word in sys.argv):
        print(_line(unjudged(message)))
    say(message)


def _run(given: argparse.Namespace) -> int:
    """Judge what the command line names, or each line of stdin; return 0, 1 or 2 as the judgment says, of --serve 0."""
    if given.serve == bool(given.kernel):
        given.error("name either FILE.py:FUNCTION or --serve")
    if given.kernel and not given.workloads:
        given.error("name --workloads, as --workloads=smoke; python -m pytest_attn lists them")
    try:
        with _stdout_alone() as out:
            return _serve(given, out) if given.serve else _judge_one(given, out)
    except OSError as error:  # status 1 says that the kernel is wrong
        print(f"judge: no answer can be given: {error}", file=sys.stderr)
        sys.exit(2)


def _close_to_others() -> None:
    """Have this process import nothing from the working folder, and no other process of its user open what it has open.

    A candidate's files there may be named as libraries, and what its process writes to this one's stdout is a forged answer.
    Threads wait asleep: those of the judge and of the candidate take turns.
    """
    here = os.getcwd()
    sys.path[:] = [one for one in sys.path if one not in ("", here)]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def _stdout_alone() -> Iterator[IO[str]]:
    """Give the stdout of the time before, and have whatever is printed within go to stderr."""
    if sys.stdout is None:
        raise OSError("stdout is closed")
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", encoding="utf-8", closefd=False) as out:
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)


# -- one judgment --------------------------------------------------------------------------------------------------------


def _judge_one(given: argparse.Namespace, out: IO[str]) -> int:
    is_json = given.workloads.lstrip().startswith(("{", "["))
    try:
        _close_to_others()
        workloads = _parsed("workloads", given) if is_json else given.workloads
        answer, code = _answered({"kernel": given.kernel, "workloads": workloads}, given)
    except Exception as error:  # status 1 says that the kernel is wrong
        answer, code = unjudged(_words_of(error)), 2
    print(_line(answer) if given.json else _text(answer), file=out)
    return code


def _parsed(option: str, given: argparse.Namespace) -> Any:
    """Return what an option says in JSON. Raises ValueError, which names it."""
    try:
        return parse_json(getattr(given, option))
    except ValueError as error:
        raise ValueError(f"--{option}: {error}") from None


def _words_of(error: Exception) -> str:
    """Return why a request could not be judged, without the frames that torch adds."""
    said = str(error).partition("\n")[0]
    return said if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {said}"


def _line(answer: dict[str, Any]) -> str:
    return json.dumps(answer, allow_nan=False, separators=(",", ":"))


def _text(answer: dict[str, Any]) -> str:
    """Return an answer as a person reads it."""
    words = {True: "right", False: "wrong", None: "not judged"}[answer["right"]]
    lines = [f"{words}: {answer['unjudged'] or answer['subject']}"]
    for one in answer["workloads"]:
        lines += [f"{one['workload']}: {one['verdict']}", *(one.get("text") or one.get("said", "")).splitlines()]
        for time in one["times"]:
            lines.append(f"{time['direction']}: p50 {time['p50'] * 1e6:.4g} us, {time['share_of_peak']:.0%} of the peak")
        lines += [f"not judged: {skipped['what']}: {skipped['why']}" for skipped in one["not_judged"]]
    return "\n".join(lines)


def _answered(asked: dict[str, Any], given: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Return the answer to a request, and the exit status that says it. Raises ValueError for one that asks nothing."""
    options = {name: getattr(given, name) for name in ("measure", "backward", "seed", "budget_s", "feedback")}
    options |= {"declared": _parsed("declared", given), **asked}
    if fault := first_fault(options, REQUEST):
        raise ValueError(fault)
    options["feedback"] = min(options["feedback"], given.feedback, key=FEEDBACK.index)
    options["budget_s"] = min(options["budget_s"], given.budget_s)
    targets = [options.pop(name) for name in ("kernel", "source") if name in asked]
    if len(targets) != 1:
        raise ValueError("a request has either kernel, FILE.py:FUNCTION, or source, a text")
    options.pop("id", None)
    workloads, declared = options.pop("workloads"), options.pop("declared")
    seed = options["seed"]
    options["seed"] = int(seed) if isinstance(seed, str) and seed.isdecimal() else seed
    judge = resolve_name(_JUDGE)  # loads torch
    found = judge(targets[0], workloads, isolated=True, device=given.device, **options, **as_python(declared))
    return found.as_dict(options["feedback"]), found.exit_code


# -- one for each line -----------------------------------------------------------------------------------------------------


def _serve(given: argparse.Namespace, out: IO[str]) -> int:
    """Answer each line; return 0 where no more come."""
    _close_to_others()
    _keep_memory()
    resolve_name(_LAUNCHER)()  # before the first line comes
    resolve_name(_JUDGE)
    while sys.stdin and (line := sys.stdin.buffer.readline(_LONGEST + 1)):
        print(_line(_answer_to(line, given)), file=out, flush=True)
    return 0


def _keep_memory() -> None:
    """Have glibc keep what is freed: new pages for each tensor took a fifth of the time of exact attention."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None:
        for parameter, size in _KEPT_MEMORY.items():
            mallopt(parameter, size)


def _answer_to(line: bytes, given: argparse.Namespace) -> dict[str, Any]:
    """Return the answer to a line."""
    if len(line) > _LONGEST:
        while line and not line.endswith(b"\n"):
            line = sys.stdin.buffer.readline(_LONGEST)
        return unjudged(f"a line of more than {_LONGEST:,} bytes; expected one JSON object")
    asked: Any = None
    try:
        asked = parse_json(line.decode())
        if not isinstance(asked, dict):
            raise ValueError("expected one JSON object a line")
        answer, _ = _answered(asked, given)
    except Exception as error:  # which must not end the others' judge
        answer = unjudged(_words_of(error))
    return {"id": asked["id"], **answer} if isinstance(asked, dict) and "id" in asked else answer
