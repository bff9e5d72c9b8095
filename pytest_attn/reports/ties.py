"""Whether one backend is slower than another, or only seems to be: one process is one value.

Samples within a process agree far better than processes do (docs/results/latency-h200.md), so an interval of samples says
little of the next process. Where both backends have baselines of at least ten processes from the same day, these are compared
by ranks (Mann and Whitney 1947, exact). Elsewhere each has the one value of this run; how it would scatter over processes is
assumed (`BETWEEN_PROCESSES`), its interval is added, and the difference of the logarithms is compared with Student's t.

The backends that are not slower than the fastest for certain are its ties. The level is 5 % divided by the number of rivals,
so the backend that is fastest in truth is missing from the fastest and its ties in at most 5 % of the lines, however many
compete (subset selection, Gupta 1965, with Bonferroni's bound, which needs no equal variances).

Simulated with the scatter of earlier baselines of an H200 (up to 2.2 %) and all backends equally fast, it is missing in 2 to
3 % of the lines with one process each, in 3 to 5 % with ten. Of two backends 3 % apart the slower is found in 96 % of the
lines, of five in 84 %, of twenty 5 % apart in 94 %; with ten processes 1 % apart in 93, 88 and 78 %. On a CPU it takes 20 to
30 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

#: how often the backend that is fastest in truth may be missing from the fastest and its ties, for one line
ALPHA = 0.05
#: standard deviation of a p50 over processes, as a share, by kind of device; known as from so many degrees of freedom.
#: Of the pairs of processes in baselines/nvidia-h200.json (370 cases of 0.02 to 1.2 %), 5 % should seem to differ by t: with
#: 0.5 % 0.3 % do, with 0.3 % 1.4 %; of 113 earlier cases, of up to 2.2 %, 2 and 4 %. On two shared CPU cores: 0.9 to 2.7 %.
BETWEEN_PROCESSES = {"cuda": 0.005, "cpu": 0.03}
DEGREES = 4
#: by how much more launching may add to a call in one mode than in another, as a share. Measured: batches against what torch
#: replays up to 16 %, that against graphs in the device's memory up to 8 %, and up to 3 % the other way: see
#: docs/results/latency-h200.md
LONGER = {("batched", "replay"): 0.2, ("replay", "graph"): 0.1, ("batched", "graph"): 0.3, ("graph", "replay"): 0.05}
#: the fewest processes that are compared with one another
FEWEST_PROCESSES = 10


class Timed(NamedTuple):
    """A p50 in seconds, its interval in this process (low, high, confidence), and what a baseline of `date` recorded.

    processes: seconds, one p50 per process; empty where there is no baseline that still holds. mode: as `Latency.mode`: the
    host's clock scatters as on a CPU, and launching adds more in one mode than in another.
    """

    p50: float
    interval: tuple[float, float, float]
    processes: tuple[float, ...] = ()
    date: str = ""
    mode: str = ""


def share_processes(timed: Sequence[Timed]) -> bool:
    """Whether recorded processes of the same day can stand for all."""
    same_day = len({one.date for one in timed}) == 1
    return same_day and all(len(one.processes) >= FEWEST_PROCESSES for one in timed)


def is_slower(slow: Timed, fast: Timed, kind: str, rivals: int) -> bool:
    """Whether `slow` is slower for certain, at `ALPHA` divided by the number of rivals of the fastest. kind: of the device.

    What was launched in another mode than the fastest is given what that may have added: see `LONGER`.
    """
    slow = _shortened(slow, 1 + LONGER.get((slow.mode, fast.mode), 0.0))
    level = ALPHA / max(1, rivals)
    if share_processes((slow, fast)):
        return rank_sum_tail(slow.processes, fast.processes) <= level
    error = math.hypot(*(deviation(one) for one in (slow, fast) for deviation in (partial(_between, kind), _within)))
    return math.log(slow.p50 / fast.p50) > t4_quantile(level) * error


def _shortened(timed: Timed, share: float) -> Timed:
    low, high, confidence = timed.interval
    processes = tuple(one / share for one in timed.processes)
    return timed._replace(p50=timed.p50 / share, interval=(low / share, high / share, confidence), processes=processes)


def _between(kind: str, timed: Timed) -> float:
    return BETWEEN_PROCESSES.get("cpu" if timed.mode == "host" else kind, BETWEEN_PROCESSES["cpu"])


def _within(timed: Timed) -> float:
    """Return the standard error of log p50 within its process, from the interval of its block medians."""
    low, high, confidence = timed.interval
    width = math.log(high / low) / 2 if 0 < low < high else 0.0
    return width / NormalDist().inv_cdf(0.5 + max(confidence, 0.5) / 2)


def t4_quantile(tail: float) -> float:
    """Return the t with P(T > t) = `tail` for four degrees of freedom, tail in (0, 0.5] (Shaw 2006, in closed form)."""
    alpha = 4 * tail * (1 - tail)
    return 2 * math.sqrt(max(0.0, math.cos(math.acos(math.sqrt(alpha)) / 3) / math.sqrt(alpha) - 1))


def rank_sum_tail(high: Sequence[float], low: Sequence[float]) -> float:
    """Return the probability that chance alone lets `high` exceed `low` in as many pairs as it does; equal pairs do not."""
    m, n = len(high), len(low)
    exceeding = sum(h > value for h in high for value in low)
    counts = [1] + [0] * (m * n)  # of the orders in which so many pairs exceed: a Gaussian binomial coefficient
    for i in range(1, m + 1):
        for pairs in range(m * n, n + i - 1, -1):
            counts[pairs] -= counts[pairs - n - i]
        for pairs in range(i, m * n + 1):
            counts[pairs] += counts[pairs - i]
    return sum(counts[exceeding:]) / math.comb(m + n, m)
