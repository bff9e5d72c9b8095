"""The lines of a failure, each after its label; numbers and times as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

#: characters of the labels of a mismatch or a regression
LABEL_WIDTH = 10


#: numbers from which on powers of ten are easier to read than digits
_LARGE = 1e6


def figure(value: float, plain: str) -> str:
    """Return a number as `plain` formats it, and by its power of ten where it is large: "3.1e30", "infinite"."""
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if math.isnan(value) or abs(value) < _LARGE:
        return format(value, plain)
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def labeled(label: str, text: str, width: int = LABEL_WIDTH) -> str:
    """Return one indented line, such as "  where      all 4 heads"."""
    return f"  {label:<{width}} {text}"


def duration(seconds: float, milliseconds_from: float = 1e-4) -> str:
    """Return a time with four digits and its unit: "6.81 us", "0.398 ms", "1.21 s".

    milliseconds_from: the seconds below which it is in microseconds.
    """
    for limit, factor, unit in ((milliseconds_from, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds:.4g} s"


def duration_in_column(seconds: float) -> str:
    """Return a time with its unit, aligned by the decimal point within a unit."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.4f} ms" if seconds < 1e-2 else f"{seconds * 1e3:.2f} ms"


# -- over ranks --------------------------------------------------------------------------------------------------------


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
