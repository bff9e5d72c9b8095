"""The rules of others on the same data: false alarms of a suite, and slowdowns found, beside the gate's.

    python benchmarks/peers.py SERIES.json [--cases 200] [--suites 200]

fixed +5 %: one run against the median of ten. median:5%: pytest-benchmark's --benchmark-compare-fail, one run's samples
against one saved run's. asv: Mann-Whitney U with p < 0.002 and a factor of 1.1, likewise. nvbench: intervals from the
minimum to the third quartile that lie apart by 0.5 % and more, likewise. Data: benchmarks/noise.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, median, quantiles

from power import Draw, Series, Suite, is_found, kind_of, run_of, suites, undisturbed, upper_bound

from pytest_attn.latency.gate import policy_for

Rule = Callable[[Series, Suite, int, str, float], bool]


def samples_of(series: Series, process: int, key: str, what: str, factor: float = 1.0) -> list[float]:
    """Return the seconds of one process's blocks, which these rules take for samples: blocks depend on one another less."""
    return [block * factor for block in series["runs"][process]["cases"][key][what]["blocks"]]


def gate(series: Series, suite: Suite, index: int, what: str, factor: float) -> bool:
    """This project's."""
    draw, recorded = suite.draws[index], suite.fits[index]
    return is_found(series, suite, draw, recorded, policy_for(kind_of(series)), len(suite.draws), what, factor)


def fixed(series: Series, suite: Suite, index: int, what: str, factor: float) -> bool:
    """Five percent above the median of the recorded runs."""
    draw = suite.draws[index]
    before = median(run_of(series, process, draw.key).p50 for process in draw.baseline)
    return run_of(series, draw.screen, draw.key, what, factor).p50 > 1.05 * before


def pytest_benchmark(series: Series, suite: Suite, index: int, what: str, factor: float) -> bool:
    """The median of one run's samples, five percent above that of one saved run."""
    before, now = pair(series, suite.draws[index], what, factor)
    return median(now) > 1.05 * median(before)


def asv(series: Series, suite: Suite, index: int, what: str, factor: float) -> bool:
    """A rank test of the samples of two runs, and a factor."""
    before, now = pair(series, suite.draws[index], what, factor)
    return median(now) > 1.1 * median(before) and mann_whitney(before, now) < 0.002


def nvbench(series: Series, suite: Suite, index: int, what: str, factor: float) -> bool:
    """Intervals [minimum, third quartile] of the samples of two runs, apart by half a percent."""
    before, now = pair(series, suite.draws[index], what, factor)
    return min(now) > 1.005 * quantiles(before, n=4)[2]


def pair(series: Series, draw: Draw, what: str, factor: float) -> tuple[list[float], list[float]]:
    """Return the samples of one recorded run and of the present one."""
    return samples_of(series, draw.baseline[0], draw.key, "plain"), samples_of(series, draw.screen, draw.key, what, factor)


def mann_whitney(before: list[float], now: list[float]) -> float:
    """Return the two-sided p of the rank test, by its normal approximation with ties corrected."""
    n, m = len(before), len(now)
    ordered = sorted([(v, 0) for v in before] + [(v, 1) for v in now])
    ranks, ties, at = 0.0, 0.0, 0
    while at < n + m:
        end = at
        while end < n + m and ordered[end][0] == ordered[at][0]:
            end += 1
        ranks += sum(group for _, group in ordered[at:end]) * (at + end + 1) / 2
        ties += (end - at) ** 3 - (end - at)
        at = end
    u = ranks - m * (m + 1) / 2
    variance = n * m / 12 * (n + m + 1 - ties / ((n + m) * (n + m - 1)))
    return 2 * (1 - NormalDist().cdf(abs(u - n * m / 2) / math.sqrt(variance))) if variance else 1.0


RULES: dict[str, Rule] = {
    "pytest-attn": gate,
    "fixed +5 %": fixed,
    "pytest-benchmark median:5%": pytest_benchmark,
    "asv": asv,
    "nvbench": nvbench,
}


def main() -> None:
    """Print one row per rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", type=Path)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--suites", type=int, default=200)
    options = parser.parse_args()
    series = undisturbed(options.series)
    drawn = list(suites(series, options.suites, options.cases, policy_for(kind_of(series))))
    few = drawn[:20]
    factors = (1.03, 1.05, 1.10) if kind_of(series) == "cuda" else (1.10, 1.25, 1.5)
    print(f"{series['device']}, {len(series['runs'])} processes; suites of {options.cases} cases")
    print(f"{'rule':28} {'suites that alarm falsely':>28}", *(f"{'finds x ' + format(f, '.2f'):>14}" for f in factors))
    for name, rule in RULES.items():
        alarms = sum(any(rule(series, s, i, "plain", 1.0) for i in range(len(s.draws))) for s in drawn)
        found = [
            sum(rule(series, s, i, "plain", factor) for s in few for i in range(len(s.draws))) / len(few) / options.cases
            for factor in factors
        ]
        bound = upper_bound(alarms, len(drawn))
        print(f"{name:28} {alarms / len(drawn):>14.1%} (< {bound:6.1%})", *(f"{share:14.1%}" for share in found))


if __name__ == "__main__":
    main()
