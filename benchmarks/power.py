"""How often the gate alarms falsely, and how often it finds a slowdown, by resampling the processes of benchmarks/noise.py.

    python benchmarks/power.py SERIES.json [--disturbed SERIES.json ...] [--cases 200] [--suites 400] [--peers]
    python benchmarks/power.py SERIES.json --across [--suites 300]

A suite draws, for each of its cases, ten processes for the baseline, one for the screen and the fresh ones that confirm, all
different. A/A suites have no slowdown: the share with an alarm is the false-alarm rate, with its Clopper-Pearson bound.
Slowdowns are the extra work that noise.py put behind each call, and scaled p50s. Disturbed series are held against baselines
of the quiet one: they may be inconclusive, never regressed.

--across: suites of a series of `noise.py --cpus`, each recorded in one of its conditions and run in another, or in the same
one at another hour; processes follow one another as they were taken. The whole decision is made, with a second round of new
processes. Where nothing is slower none may regress, and where all is 30 % slower none may pass.

--peers: the rules of others on the same suites. fixed +5 %: one run against the median of ten. median:5%: pytest-benchmark's
--benchmark-compare-fail, one run's samples against one saved run's. asv: Mann-Whitney U with p < 0.002 and a factor of 1.1,
likewise. nvbench: intervals from the minimum to the third quartile that lie apart by 0.5 % and more, likewise.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, median, quantiles
from typing import Any, NamedTuple

from pytest_attn.latency.baseline_file import Baseline, BaselineFile, Identity
from pytest_attn.latency.gate import FEWEST_RUNS, GateContext, Policy, decide, policy_for, screen, shared_prior
from pytest_attn.latency.protocol import protocol_of
from pytest_attn.latency.regression import DeviceBaselines, DisturbedError, Measured, SharedCpu, judge_latency
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Prior, Recording, Run, expected_sensitivity, fit
from pytest_attn.reports.student import incomplete_beta
from pytest_attn.session.worker_pool import MORE_PROCESSES, Runs, undisturbed

Series = Mapping[str, Any]


class Draw(NamedTuple):
    """One case of one suite: which processes recorded it, screened it, and confirmed."""

    key: str
    baseline: list[int]
    screen: int
    fresh: list[int]


class Suite(NamedTuple):
    """Cases that are decided together, with the fits and the prior of their baselines."""

    draws: list[Draw]
    fits: list[Recording]
    prior: Prior


Rule = Callable[[Series, Suite, int, str, float], bool]


def quiet(path: Path) -> Series:
    """Read a series, without the processes in which a case was disturbed: the gate has others in their place."""
    series: dict[str, Any] = json.loads(path.read_text())
    runs = [run for run in series["runs"] if not any(kind["disturbances"] for kind in _measured(run))]
    if len(runs) < len(series["runs"]):
        print(f"{len(series['runs']) - len(runs)} of {len(series['runs'])} processes were disturbed, and are left out")
    if len(runs) < (fewest := FEWEST_RUNS + 1 + policy_for(kind_of(series)).runs):
        sys.exit(f"{len(runs)} undisturbed processes, a suite is drawn from {fewest}: take more with noise.py")
    return {**series, "runs": runs}


def _measured(run: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for case in run["cases"].values():
        yield from (found for what, found in case.items() if what == "plain" or what.startswith("slower"))


def run_of(series: Series, process: int, key: str, what: str = "plain", factor: float = 1.0) -> Run:
    """Return one process's time of a case; factor scales it."""
    found = series["runs"][process]["cases"][key][what]
    return Run(found["p50"] * factor, found["anchors"])


def suites(series: Series, number: int, cases: int, policy: Policy) -> Iterator[Suite]:
    """Draw suites. Cases that are drawn together share their processes, as the cases of one real run do."""
    generator = random.Random(0)
    keys = list(series["runs"][0]["cases"])
    for _ in range(number):
        draws: list[Draw] = []
        while len(draws) < cases:
            order = generator.sample(range(len(series["runs"])), FEWEST_RUNS + 1 + policy.runs)
            baseline, first, fresh = order[:FEWEST_RUNS], order[FEWEST_RUNS], order[FEWEST_RUNS + 1 :]
            draws += [Draw(key, baseline, first, fresh) for key in keys]
        draws = draws[:cases]
        fits = [_fit(series, draw) for draw in draws]
        yield Suite(draws, fits, shared_prior(fits, kind_of(series)))


def _fit(series: Series, draw: Draw) -> Recording:
    case = series["runs"][draw.baseline[0]]["cases"][draw.key]
    runs = [run_of(series, process, draw.key) for process in draw.baseline]
    return fit(runs, expected_sensitivity(case["flops"], case["bytes"], median(r.p50 for r in runs)))


def kind_of(series: Series) -> str:
    """Return the type of device of a series."""
    return "cpu" if series["device"] == "CPU" else "cuda"


def scaled(series: Series) -> tuple[float, ...]:
    """Return the factors by which p50s are made larger."""
    return (1.03, 1.05, 1.10) if kind_of(series) == "cuda" else (1.10, 1.25, 1.5)


def judged(
    recorded: Recording, prior: Prior, policy: Policy, cases: int, draw: Draw, take: Callable[[int], Run]
) -> tuple[str, bool]:
    """Screen, and confirm where that is suspect, as attn.measure does; return the verdict and whether it was confirmed.

    take: the run of a process.
    """
    context = GateContext(recorded, prior, policy, cases)
    decision, is_suspect = screen(take(draw.screen), context)
    if is_suspect:
        decision = decide([take(process) for process in draw.fresh], context)
    return decision.verdict, is_suspect


def upper_bound(alarms: int, number: int, confidence: float = 0.95) -> float:
    """Return the one-sided Clopper-Pearson bound of a rate of which `alarms` of `number` were seen."""
    low, high = alarms / number, 1.0
    for _ in range(60):
        middle = (low + high) / 2  # P(X <= alarms) = I_{1-p}(number - alarms, alarms + 1)
        low, high = (
            (middle, high) if incomplete_beta(number - alarms, alarms + 1, 1 - middle) > 1 - confidence else (low, middle)
        )
    return high


def false_alarms(series: Series, drawn: list[Suite], policy: Policy, cases: int) -> None:
    """Print how many suites without a slowdown alarm, and how many of their cases new processes looked at."""
    alarms, suspects, verdicts, by_case = 0, 0, Counter[str](), Counter[str]()
    for suite in drawn:
        found = []
        for draw, recorded in zip(suite.draws, suite.fits, strict=True):
            verdict, is_suspect = judged(
                recorded, suite.prior, policy, cases, draw, lambda p, k=draw.key: run_of(series, p, k)
            )
            found.append(verdict)
            suspects += is_suspect
            by_case[draw.key] += verdict == "regressed"
        alarms += "regressed" in found
        verdicts.update(found)
    total = sum(verdicts.values())
    shares = ", ".join(f"{count / total:.2%} {name}" for name, count in verdicts.most_common())
    bound = upper_bound(alarms, len(drawn))
    print(
        f"A/A: {alarms} of {len(drawn)} suites of {cases} cases alarm ({alarms / len(drawn):.2%}, below {bound:.2%} at 95 %)"
    )
    print(f"     cases: {shares}; {suspects / total:.2%} confirmed in new processes")
    for key, count in by_case.items():
        if count:
            print(f"     {count} alarms of {key}")


def power(series: Series, drawn: list[Suite], policy: Policy, cases: int) -> None:
    """Print which share of slowed cases is found, case by case."""
    slower = [name for name in _slowdowns(series) if name.startswith("slower")]
    factors = scaled(series)
    print(
        f"{'case':38}", *(f"{'real ' + n.split()[1]:>16}" for n in slower), *(f"{'x ' + format(f, '.2f'):>9}" for f in factors)
    )
    overall: dict[str, list[bool]] = {}
    for key in series["runs"][0]["cases"]:
        cells = []
        for name in slower:
            if name not in series["runs"][0]["cases"][key]:
                cells.append(f"{'-':>16}")
                continue
            hits = [is_found(series, s, d, f, policy, cases, name) for s, d, f in _of(drawn, key)]
            truly = median(
                run_of(series, p, key, name).p50 / run_of(series, p, key).p50 - 1 for p in range(len(series["runs"]))
            )
            cells.append(f"{sum(hits) / len(hits):7.1%} ({truly:+.1%})".rjust(16))
            overall.setdefault(name, []).extend(hits)
        for factor in factors:
            hits = [is_found(series, s, d, f, policy, cases, "plain", factor) for s, d, f in _of(drawn, key)]
            cells.append(f"{sum(hits) / len(hits):9.1%}")
            overall.setdefault(f"x {factor}", []).extend(hits)
        print(f"{key:38}", *cells)
    print("all:", ", ".join(f"{name} {sum(hits) / len(hits):.1%}" for name, hits in overall.items()))


def _slowdowns(series: Series) -> list[str]:
    return list(dict.fromkeys(name for case in series["runs"][0]["cases"].values() for name in case))


def _of(drawn: list[Suite], key: str) -> Iterator[tuple[Suite, Draw, Recording]]:
    for suite in drawn:
        draw, recorded = next(pair for pair in zip(suite.draws, suite.fits, strict=True) if pair[0].key == key)
        yield suite, draw, recorded


def is_found(
    series: Series, suite: Suite, draw: Draw, recorded: Recording, policy: Policy, cases: int, what: str, factor: float = 1.0
) -> bool:
    """Whether the gate calls a case regressed that was slowed, really (what) or by a factor."""
    verdict, _ = judged(recorded, suite.prior, policy, cases, draw, lambda p: run_of(series, p, draw.key, what, factor))
    return verdict == "regressed"


def disturbed(series: Series, other: Series, drawn: list[Suite], policy: Policy, cases: int) -> None:
    """Print what becomes of runs on a disturbed device, held against baselines of the quiet one."""
    found: Counter[str] = Counter()
    number = len(other["runs"])
    for index, suite in enumerate(drawn):
        generator = random.Random(index)
        for draw, recorded in zip(suite.draws, suite.fits, strict=True):
            processes = [generator.randrange(number) for _ in range(1 + policy.runs)]
            if any(other["runs"][p]["cases"][draw.key]["plain"]["disturbances"] for p in processes):
                found["inconclusive (seen by the guard)"] += 1
                continue
            moved = Draw(draw.key, draw.baseline, processes[0], processes[1:])
            verdict, _ = judged(recorded, suite.prior, policy, cases, moved, lambda p, k=draw.key: run_of(other, p, k))
            found[verdict] += 1
    total = sum(found.values())
    print(f"disturbed by {other['disturb']}: " + ", ".join(f"{n / total:.1%} {name}" for name, n in found.most_common()))


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


PEERS: dict[str, Rule] = {
    "pytest-attn": gate,
    "fixed +5 %": fixed,
    "pytest-benchmark median:5%": pytest_benchmark,
    "asv": asv,
    "nvbench": nvbench,
}


def peers(series: Series, drawn: list[Suite], cases: int) -> None:
    """Print one row per rule."""
    few = drawn[:20]
    print(f"{'rule':28} {'suites that alarm falsely':>28}", *(f"{'finds x ' + format(f, '.2f'):>14}" for f in scaled(series)))
    for name, rule in PEERS.items():
        alarms = sum(any(rule(series, s, i, "plain", 1.0) for i in range(len(s.draws))) for s in drawn)
        found = [
            sum(rule(series, s, i, "plain", factor) for s in few for i in range(len(s.draws))) / len(few) / cases
            for factor in scaled(series)
        ]
        bound = upper_bound(alarms, len(drawn))
        print(f"{name:28} {alarms / len(drawn):>14.1%} (< {bound:6.1%})", *(f"{share:14.1%}" for share in found))


# -- recorded in one condition, run in another ---------------------------------------------------------------------------


def across(series: Series, number: int) -> None:
    """Print what becomes of suites that are recorded in one condition and run in another."""
    visits: dict[int, list[Any]] = {}
    for run in series["runs"]:
        visits.setdefault(run["visit"], []).append(run)
    baselines = {at: found for at, visit in visits.items() if (found := baselines_of(visit))}
    busy = [at for at in baselines if visits[at][0]["condition"] != "quiet"]
    print(f"{len(visits)} conditions, one after the other; recorded in {len(baselines)}, of which {len(busy)} beside others")
    generator = random.Random(0)
    drawn = [pair for at in baselines for other in visits if other != at for pair in [(at, other)]]
    drawn = [generator.choice(drawn) for _ in range(number)]
    for factor in (1.0, 1.3):
        verdicts: dict[str, Counter[str]] = {}
        suites_with: Counter[str] = Counter()
        for at, other in drawn:
            runs, offset = visits[other], generator.randrange(len(visits[other]))
            found = {
                key: judged_across(baselines[at], [*runs[offset:], *runs[:offset]], key, factor)
                for key in baselines[at].fits or ()
            }
            conditions = [visits[one][0]["condition"] for one in (at, other)]
            which = " -> ".join("quiet" if one == "quiet" else "busy" for one in conditions)
            verdicts.setdefault(which, Counter()).update(found.values())
            suites_with.update(set(found.values()))
            if wrong := [key for key, verdict in found.items() if verdict == ("regressed" if factor == 1.0 else "passed")]:
                print(f"  wrong, x {factor}: {' -> '.join(conditions)}: {', '.join(wrong)}")
        regressed, passed = (suites_with[verdict] for verdict in ("regressed", "passed"))
        print(f"x {factor}: of {number} suites {regressed} have a case that regresses, {passed} one that passes; of cases")
        for which, counts in sorted(verdicts.items()):
            total = sum(counts.values())
            print(f"  {which:15} {total:6}: " + ", ".join(f"{n / total:.1%} {verdict}" for verdict, n in counts.most_common()))


def as_runs(runs: Sequence[Any], key: str, factor: float = 1.0) -> Runs:
    """Return what new processes would have returned of a case that is slower by a factor."""
    found = []
    for number, run in enumerate(runs):
        plain = run["cases"][key]["plain"]
        found.append({**plain, "key": key, "process": number, "p50": plain["p50"] * factor})
    return found


def baselines_of(runs: Sequence[Any]) -> DeviceBaselines | None:
    """Return the recording that these processes make, without cases of which too few were undisturbed; None without any."""
    cases = {}
    for key, case in runs[0]["cases"].items():
        mine = undisturbed(as_runs(runs, key), key, FEWEST_RUNS)
        if len(mine) == FEWEST_RUNS:
            p50, anchors = (
                tuple(run["p50"] for run in mine),
                {n: tuple(run["anchors"][n] for run in mine) for n in mine[0]["anchors"]},
            )
            cases[key] = Baseline(
                *(key, "host", p50, (0.0,) * FEWEST_RUNS, anchors, case["flops"], case["bytes"], "", "", protocol_of("cpu"))
            )
    fits = {key: case.fit() for key, case in cases.items()}
    file = BaselineFile(Path("cpu.json"), Identity("cpu", "", 0), {}, cases)
    return DeviceBaselines(file, fits, shared_prior(list(fits.values()), "cpu")) if cases else None


def judged_across(baselines: DeviceBaselines, runs: Sequence[Any], key: str, factor: float) -> str:
    """Return the verdict on a case whose processes come one after the other, the first of which is not a new one."""
    policy, (first, *others) = replace(policy_for("cpu"), pause=0.0), as_runs(runs, key, factor)

    def fresh_runs() -> list[Run]:
        taken = []
        while len(undisturbed(taken, key, policy.runs)) < policy.runs:
            if not others or len(taken) == policy.runs + MORE_PROCESSES:
                raise DisturbedError("too few undisturbed processes")
            taken.append(others.pop(0))
        return [Run(run["p50"], run["anchors"]) for run in undisturbed(taken, key, policy.runs)]

    none: Any = None
    p50, disturbances = first["p50"], tuple(first["disturbances"])
    latency = Latency(
        key, "", "forward", p50, none, (), 0, "host", 1, "warm", p50, first["anchors"], disturbances=disturbances
    )
    measured = Measured(latency, key, key, "", "", None, {}, "", "cpu", Path())
    return judge_latency(measured, baselines, policy, len(runs[0]["cases"]), fresh_runs, SharedCpu()).verdict


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", type=Path)
    parser.add_argument("--disturbed", type=Path, nargs="*", default=[])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--suites", type=int, default=400)
    parser.add_argument("--across", action="store_true", help="recorded in one condition, run in another")
    parser.add_argument("--peers", action="store_true", help="the rules of others too")
    options = parser.parse_args()
    if options.across:
        across(json.loads(options.series.read_text()), options.suites)
        return
    series = quiet(options.series)
    policy = policy_for(kind_of(series))
    drawn = list(suites(series, options.suites, options.cases, policy))
    print(f"{series['device']}, {len(series['runs'])} processes, {options.suites} suites of {options.cases} cases")
    false_alarms(series, drawn, policy, options.cases)
    power(series, drawn[:100], policy, options.cases)
    for path in options.disturbed:
        disturbed(series, json.loads(path.read_text()), drawn[:20], policy, options.cases)
    if options.peers:
        peers(series, drawn, options.cases)


if __name__ == "__main__":
    main()
