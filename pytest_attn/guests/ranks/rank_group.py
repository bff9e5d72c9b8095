"""The ranks that compute one callable, as the judge sees them: how tensors reach them, and what may become of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from pytest_attn.guests.ranks.communication import last_collective
from pytest_attn.processes.channel import Message
from pytest_attn.processes.last_words import ending, last_words
from pytest_attn.session.deadline import DeadlineError

#: tensors by name: q, k, v or dout; out, lse, dq, dk, dv
Tensors: TypeAlias = Mapping[str, torch.Tensor]


class RanksLostError(DeadlineError):
    """Ranks do not answer any more: one ended, or they wait for one another. The text says which, and for what.

    No `except Exception` of a judgment takes it for an answer of the kernel.
    """


class RankGroup(ABC):
    """Ranks with a callable each. Whole tensors go in, in the test's layout; each rank's shards come back, by rank.

    Raises RemoteRaisedError where the callable raised, ContractError where it returned something else than a result,
    RanksLostError.
    """

    ranks: int
    #: of device
    kind: str

    @abstractmethod
    def forward(self, number: int, tensors: Tensors, backward: bool) -> list[Tensors]:
        """Call the callable on the shards of q, k and v. backward: whether `backward` may follow for this number."""

    @abstractmethod
    def backward(self, number: int, dout: torch.Tensor) -> list[Tensors]:
        """Return dq, dk and dv of the call of this number."""

    def step(self, what: str, **given: object) -> list[Any]:
        """Have all ranks make a step of a measurement (worker_timing.py); return their answers, by rank. Raises StaleError."""
        raise NotImplementedError


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write tensors as they lie in memory, from whatever device."""
    torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, path)


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Read tensors that `write_tensors` wrote, onto the CPU."""
    found: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return found


#: what a rank leaves in the folder of its pool
STACK, COLLECTIVE, OUTPUT = "stack-{}", "collective-{}", "output-{}"
#: frames that are the user's are shown; those of the machinery end the stack
_OWN = tuple(f"pytest_attn/{name}.py" for name in ("guests/ranks/rank", "guests/ranks/worker_timing", "latency/kernel_work"))
#: frames that tell nothing
_WRAPPERS = ("pytest_attn/guests/ranks/communication.py", "c10d_logger.py", "<frozen importlib")
#: frames that are shown at either end of a long stack
_INNERMOST, _OUTERMOST = 4, 8


class RankPostMortem(NamedTuple):
    """The traces of a rank: its last collective, its stack, the last line that it printed, how it ended."""

    collective: str
    stack: tuple[str, ...]
    printed: str
    returncode: int | None = None

    @classmethod
    def of(cls, folder: Path, rank: int) -> RankPostMortem:
        """Read what a rank has left in the folder of its pool."""
        stack, output = (_text(folder / name.format(rank)) for name in (STACK, OUTPUT))
        return cls(last_collective(folder / COLLECTIVE.format(rank)), _stack_of(stack), last_words(output, silence=""))


def _stack_of(text: str) -> tuple[str, ...]:
    """Return the main thread's frames from faulthandler's text, the innermost first; a long stack without its middle."""
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


def describe_ended(rank: int, seen: RankPostMortem, when: str, others: Mapping[int, str]) -> str:
    """Say that a rank has ended by itself, or was killed. others: the last collectives of the other ranks."""
    lines = [f"rank {rank} {ending(seen.returncode)} {when}"]
    collectives = {rank: seen.collective, **others}
    lines += [f"  rank {one}: {collectives[one]}" for one in sorted(collectives) if collectives[one]]
    if seen.printed:
        lines.append(f"  its last words: {seen.printed}")
    return "\n".join(lines)


def describe_wrong(rank: int, ranks: int, answer: Message) -> str:
    """Say what a rank has answered instead of a result: what the callable raised there, or what is wrong with what it did."""
    if "raised" in answer:
        return f"rank {rank} of {ranks} raised {answer['raised']}\n{answer['text']}"
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
