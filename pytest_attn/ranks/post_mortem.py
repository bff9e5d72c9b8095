"""What is said of ranks that ended, raised, or wait for one another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pytest_attn.processes.channel import Message
from pytest_attn.processes.last_words import ending, last_words, stack_of
from pytest_attn.ranks.collectives import last_collective

#: what a rank leaves in the folder of its pool
STACK, COLLECTIVE, OUTPUT = "stack-{}", "collective-{}", "output-{}"
#: frames that are the user's are shown; those of the machinery end the stack
_OWN = tuple(f"pytest_attn/{name}.py" for name in ("ranks/rank_server", "ranks/rank", "ranks/worker_timing", "latency/work"))
#: frames that tell nothing
_WRAPPERS = ("pytest_attn/ranks/collectives.py", "c10d_logger.py", "<frozen importlib")


class RankPostMortem(NamedTuple):
    """What a rank has left: its last collective, its stack, the last line that it printed, how it ended."""

    collective: str
    stack: tuple[str, ...]
    printed: str
    returncode: int | None = None

    @classmethod
    def of(cls, folder: Path, rank: int) -> RankPostMortem:
        """Read what a rank has left in the folder of its pool."""
        stack, output = (_text(folder / name.format(rank)) for name in (STACK, OUTPUT))
        frames = stack_of(stack, _is_machinery, _is_wrapper)
        return cls(last_collective(folder / COLLECTIVE.format(rank)), frames, last_words(output, silence=""))


def describe_ended(
    rank: int, seen: RankPostMortem, when: str = "while the case ran", others: Mapping[int, str] | None = None
) -> str:
    """Say that a rank has ended by itself, or was killed. others: the last collectives of the other ranks."""
    lines = [f"rank {rank} {ending(seen.returncode)} {when}"]
    collectives = {rank: seen.collective, **(others or {})}
    lines += [f"  rank {one}: {collectives[one]}" for one in sorted(collectives) if collectives[one]]
    if seen.printed:
        lines.append(f"  its last words: {seen.printed}")
    return "\n".join(lines)


def describe_wrong(rank: int, ranks: int, answer: Message) -> str:
    """Say what a rank has answered instead of a result: what the callable raised there, or what is wrong with what it did."""
    if "raised" in answer:
        return f"rank {rank} of {ranks} raised {answer['raised']}:\n{answer['text']}"
    return str(answer.get("contract") or f"rank {rank}: {answer.get('stale')}")


def describe_hang(
    ranks: int,
    seconds: float,
    seen: Mapping[int, RankPostMortem],
    raised: Mapping[int, Message],
    answered: Mapping[int, Message],
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


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _is_machinery(file: str) -> bool:
    return any(own in file for own in _OWN)


def _is_wrapper(file: str) -> bool:
    return any(wrapper in file for wrapper in _WRAPPERS)
