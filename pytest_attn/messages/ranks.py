"""How the time of a callable over ranks reads: which rank is slow, what collectives take, how well ranks were aligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pytest_attn.messages.durations import duration

#: how much longer than the median of the others a rank takes outside collectives that is named
_SLOWER = 1.2


def describe_ranks(ranks: Mapping[str, Any]) -> str:
    """Say which rank is slower than the others, how much of the time collectives take, and how well ranks were aligned.

    ranks: of a latency, as `Latency.ranks` has them.
    """
    number = ranks["number"]
    said = [f"{number} rank{'s' * (number > 1)} ({ranks['shard']}, {ranks['topology']})"]
    own, shares = ranks["own"], ranks["communication"]
    if own:
        said.append(f"outside collectives {_who_takes(own)}")
    if shares:
        least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
        said.append(f"in collectives {least if least == most else f'{least} to {most}'} of the time")
    if ranks["apart"] is not None:
        said.append(f"begun within {duration(ranks['apart'])} of one another")
    return "; ".join(said)


def _who_takes(own: Sequence[float]) -> str:
    """Say what ranks take, and which of them takes longer than the others."""
    slow = slow_rank(own)
    if slow is None:
        return f"each took {duration(median(own))}" if len(own) > 1 else f"it took {duration(own[0])}"
    others = [one for rank, one in enumerate(own) if rank != slow]
    whose = "the others" if len(others) > 1 else f"rank {1 - slow}"
    return f"rank {slow} took {duration(own[slow])}, {whose} {duration(median(others))}"


def slow_rank(own: Sequence[float]) -> int | None:
    """Return the rank that takes notably longer than the others; None where none does, or there are no others.

    own: seconds of each rank outside collectives: inside, all of them wait for the slow one.
    """
    if len(own) < 2:
        return None
    slowest = max(range(len(own)), key=own.__getitem__)
    others = [one for rank, one in enumerate(own) if rank != slowest]
    return slowest if own[slowest] > _SLOWER * median(others) else None
