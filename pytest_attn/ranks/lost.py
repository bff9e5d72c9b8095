"""What is said of ranks that ended, raised, or wait for one another."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pytest_attn.ranks.collectives import last_collective
from pytest_attn.ranks.wire import COLLECTIVE, OUTPUT, STACK, Message

#: frames that are the user's are shown; those of the machinery end the stack
_OWN = tuple(
    f"pytest_attn/{name}.py" for name in ("ranks/serving", "ranks/rank", "ranks/timing", "ranks/clocks", "latency/work")
)
#: frames that tell nothing
_WRAPPERS = ("pytest_attn/ranks/collectives.py", "c10d_logger.py", "<frozen importlib")
#: frames that are shown at either end of a long stack
_INNERMOST, _OUTERMOST = 4, 8


class Seen(NamedTuple):
    """What a rank has left: its last collective, its stack, the last line that it printed, how it ended."""

    collective: str
    stack: tuple[str, ...]
    printed: str
    returncode: int | None = None

    @classmethod
    def of(cls, folder: Path, rank: int) -> Seen:
        """Read what a rank has left in the folder of its pool."""
        stack, output = folder / STACK.format(rank), folder / OUTPUT.format(rank)
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
        errors = [line for line in lines if re.match(r"E  |\w*Error|ERROR|INTERNALERROR> \w*Error", line)]
        last = (errors or [line for line in lines if line.strip()] or [""])[-1].strip()
        read = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
        return cls(last_collective(folder / COLLECTIVE.format(rank)), _frames(read), last)


def describe_ended(rank: int, seen: Seen, when: str = "while the case ran", others: Mapping[int, str] | None = None) -> str:
    """Say that a rank has ended by itself, or was killed. others: the last collectives of the other ranks."""
    lines = [f"rank {rank} {_ending(seen.returncode)} {when}"]
    collectives = {rank: seen.collective, **(others or {})}
    lines += [f"  rank {one}: {collectives[one]}" for one in sorted(collectives) if collectives[one]]
    if seen.printed:
        lines.append(f"  its last words: {seen.printed[:300]}")
    return "\n".join(lines)


def describe_wrong(rank: int, ranks: int, answer: Message) -> str:
    """Say what a rank has answered instead of a result: what the callable raised there, or what is wrong with what it did."""
    if "raised" in answer:
        return f"rank {rank} of {ranks} raised {answer['raised']}:\n{answer['text']}"
    return str(answer.get("contract") or f"rank {rank}: {answer.get('stale')}")


def describe_hang(
    ranks: int, seconds: float, seen: Mapping[int, Seen], raised: Mapping[int, Message], answered: Mapping[int, Message]
) -> str:
    """Say which ranks wait for what, with their stacks. raised: what other ranks have raised, for which these wait."""
    if raised:
        rank, answer = next(iter(sorted(raised.items())))
        first = f"{describe_wrong(rank, ranks, answer)}\nwhile others wait:"
    else:
        first = f"the ranks gave no result within {seconds:g} s (--attn-rank-timeout):"
    lines = [first]
    for rank in range(ranks):
        if rank in seen:
            lines.append(f"  rank {rank}: {seen[rank].collective or 'was in no collective yet'}")
        elif rank not in raised and rank in answered:
            lines.append(f"  rank {rank}: has returned its result")
    for rank, one in seen.items():
        if one.stack:
            lines += [f"stack of rank {rank}, the innermost call first:", *(f"  {frame}" for frame in one.stack)]
    return "\n".join(lines)


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "has ended"
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"has left the interpreter with exit code {returncode}"


def _frames(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread, from faulthandler's text, down to the user's own."""
    _, _, main = text.rpartition("Current thread ")
    frames: list[str] = []
    for line in main.splitlines()[1:]:
        match = re.match(r'  File "(.*)", line (\d+) in (.*)', line)
        if not match or any(own in match[1] for own in _OWN):
            break
        if not any(wrapper in match[1] for wrapper in _WRAPPERS):
            frames.append(f"{match[1]}:{match[2]} in {match[3]}")
    if len(frames) > _INNERMOST + _OUTERMOST:
        frames[_INNERMOST:-_OUTERMOST] = ["..."]
    return tuple(frames)
