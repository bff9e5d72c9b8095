"""What each rank says of a sample: how long it took there, and how much of that was spent in collectives."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple


class RankTimes(NamedTuple):
    """Seconds of one call on one rank; inside: of these in collectives; late: after the common beginning. None: unknown."""

    seconds: float
    inside: float | None = None
    late: float | None = None


class Shared(NamedTuple):
    """One sample on all ranks. seconds: of the rank that took longest."""

    seconds: float
    ranks: tuple[RankTimes, ...]

    @classmethod
    def of(cls, ranks: Sequence[RankTimes]) -> Shared:
        """Put together what the ranks say."""
        return cls(max(rank.seconds for rank in ranks), tuple(ranks))


def figures_of(samples: Sequence[Shared], profiled: Sequence[dict[str, float] | None]) -> dict[str, Any]:
    """Return the p50 of each rank, of what it did outside collectives, and the share of those; in builtin types.

    profiled: what the profiler saw on each rank, which counts where samples do not tell; None where it saw no kernel.
    """
    ranks = list(zip(*(one.ranks for one in samples), strict=True))
    found: dict[str, Any] = {"seconds": [median(one.seconds for one in mine) for mine in ranks]}
    late = [max(one.late for one in sample.ranks if one.late is not None) for sample in samples if _is_late_known(sample)]
    found["apart"] = median(late) if late else None
    if profiled and all(profiled):
        own = [one["own"] for one in profiled if one]
        share = [one["inside"] / one["span"] for one in profiled if one and one["span"]]
        return {**found, "own": own, "communication": share, "communication_by": "NCCL's kernels in the profiler"}
    if samples and all(one.inside is not None for one in samples[0].ranks):
        own = [median(one.seconds - (one.inside or 0.0) for one in mine) for mine in ranks]
        share = [median((one.inside or 0.0) / one.seconds for one in mine) for mine in ranks]
        return {**found, "own": own, "communication": share, "communication_by": "wrapped functions of torch.distributed"}
    return {**found, "own": [], "communication": [], "communication_by": ""}


def _is_late_known(sample: Shared) -> bool:
    return all(one.late is not None for one in sample.ranks)
