"""The gate beside the rules of others, on the same processes: what each accuses without a slowdown, and finds of one.

    python benchmarks/peers.py SERIES.json [--disturbed SERIES.json ...] [--busy] [--cases 200] [--suites 300]
    python benchmarks/peers.py baselines/nvidia-h200.json [--suites 300]
    python benchmarks/peers.py SERIES.json --across [--suites 300]

A suite draws, for each of its cases, the processes that recorded it, the one that runs it and the fresh ones that confirm, all
different: of a series of benchmarks/noise.py ten, one and three, of the ten p50s per case in a file of baselines six, one and
three. Slowdowns are the extra work that noise.py put behind each call, and scaled times. Disturbed series are held against
baselines of the quiet one: they may be inconclusive, never regressed. --busy keeps the disturbed processes of a series: the
gate calls what they time inconclusive, and other rules do not know of it.

The rules, with the numbers of their sources; "-" where the data lacks what a rule looks at:

fixed 5 %: the run against the median of the recorded ones.
nvbench robust: NVIDIA/nvbench 66212f1 (2026-08-12), python/scripts/nvbench_compare_robust.py, default preset: SLOW where
    the intervals from minimum to third quartile of the samples of two runs lie 0.5 % and more apart, in time and in cycles.
    The clock here is that of the control, a product over zeros, run by run.
tokenspeed: lightseekorg/tokenspeed#1487 (2026-09-10), its comparison of base and candidate: medians apart by more than a
    share and more than microseconds, inconclusive where a relative MAD of the samples is above 5 %; 10 % and 0.5 us in its
    tests, 6 % and 0.5 us for decoding in #1692 (2026-09-21).
vLLM golden: ROCm/vllm#898, tests/kernels/quantization/test_hybrid_w4a16_perf.py: TFLOP/s within +-10 % of one recorded value
    (2026-05-05), +-8 % as merged (4b1e8761); faster fails too. Rounding to three digits is left out.
Helion: pytorch/helion ef091f4 (2026-08-22), .github/dashboard/build_dashboard_data.py: 10 % slower than the run before.
pytest-benchmark median:5%: its --benchmark-compare-fail, against one saved run.
asv: Mann-Whitney U with p < 0.002 and a factor of 1.1 between the samples of two runs.

--across: suites of a series of `noise.py --cpus`, each recorded in one of its conditions and run in another, or in the same
one at another hour; processes follow one another as they were taken. The whole decision is made, with a second round of new
processes. Where nothing is slower none may regress, and where all is 30 % slower none may pass.
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
from functools import partial
from pathlib import Path
from statistics import NormalDist, median
from typing import Any, NamedTuple

from pytest_attn.latency.baseline_file import Baseline, BaselineFile, Identity
from pytest_attn.latency.gate import FEWEST_RUNS, GateContext, Policy, decide, policy_for, screen, shared_prior
from pytest_attn.latency.protocol import protocol_of
from pytest_attn.latency.regression import DeviceBaselines, DisturbedError, Measured, SharedCpu, judge_latency
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Prior, Recording, Run, expected_sensitivity, fit, prior_of
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


class Seen(NamedTuple):
    """A case of a suite as a rule sees it; what: was put behind its calls now, factor: has scaled its times."""

    series: Series
    suite: Suite
    index: int
    what: str = "plain"
    factor: float = 1.0

    @property
    def draw(self) -> Draw:
        """Its processes."""
        return self.suite.draws[self.index]

    @property
    def recorded(self) -> list[float]:
        """The recorded p50s."""
        return [self.before(process).p50 for process in self.draw.baseline]

    def before(self, process: int) -> Run:
        """Return what a process has recorded."""
        return run_of(self.series, process, self.draw.key)

    def now(self, process: int) -> Run:
        """Return what a process has timed now."""
        return run_of(self.series, process, self.draw.key, self.what, self.factor)

    def samples(self) -> tuple[list[float], list[float]]:
        """Return the samples of one recorded run and of the present one."""
        runs, key = self.series["runs"], self.draw.key
        before, now = runs[self.draw.baseline[0]]["cases"][key]["plain"], runs[self.draw.screen]["cases"][key][self.what]
        return before["samples"], [sample * self.factor for sample in now["samples"]]


def read(path: Path, is_busy: bool) -> Series:
    """Read a series, without processes in which a case was disturbed, for which the gate takes others, unless it is_busy."""
    series: dict[str, Any] = json.loads(path.read_text())
    if "runs" not in series:
        return recorded_series(series)
    runs = [run for run in series["runs"] if is_busy or not any(kind["disturbances"] for kind in _measured(run))]
    if len(runs) < len(series["runs"]):
        print(f"{len(series['runs']) - len(runs)} of {len(series['runs'])} processes were disturbed, and are left out")
    if len(runs) < (fewest := FEWEST_RUNS + 1 + policy_for(kind_of(series)).runs):
        sys.exit(f"{len(runs)} processes, a suite is drawn from {fewest}: take more with noise.py")
    return {**series, "runs": runs}


def _measured(run: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for case in run["cases"].values():
        yield from (found for what, found in case.items() if what == "plain" or what.startswith("slower"))


def recorded_series(file: Mapping[str, Any]) -> Series:
    """Return the processes of a file of baselines, without samples."""
    runs: list[dict[str, Any]] = [{"cases": {}} for _ in range(FEWEST_RUNS)]
    for key, case in file["cases"].items():
        for process, run in enumerate(runs):
            anchors = {name: times[process] * 1e-9 for name, times in case["anchors_ns"].items()}
            timed = {"p50": case["p50_ns"][process] * 1e-9, "anchors": anchors}
            run["cases"][key] = {"plain": timed, "flops": case["flops"], "bytes": case["bytes"]}
    return {"device": file["machine"]["name"], "runs": runs}


def run_of(series: Series, process: int, key: str, what: str = "plain", factor: float = 1.0) -> Run:
    """Return one process's time of a case; factor scales it."""
    found = series["runs"][process]["cases"][key][what]
    return Run(found["p50"] * factor, found["anchors"])


def suites(series: Series, number: int, cases: int) -> Iterator[Suite]:
    """Draw suites. Cases that are drawn together share their processes, as the cases of one real run do."""
    generator = random.Random(0)
    keys, processes = list(series["runs"][0]["cases"]), range(len(series["runs"]))
    confirm = policy_for(kind_of(series)).runs
    record = min(FEWEST_RUNS, len(processes) - 1 - confirm)
    for _ in range(number):
        draws: list[Draw] = []
        while len(draws) < cases:
            order = generator.sample(processes, record + 1 + confirm)
            draws += [Draw(key, order[:record], order[record], order[record + 1 :]) for key in keys]
        draws = draws[:cases]
        fits = [_fit(series, draw) for draw in draws]
        yield Suite(draws, fits, prior_of([one.variance for one in fits], fits[0].degrees))


def _fit(series: Series, draw: Draw) -> Recording:
    case = series["runs"][draw.baseline[0]]["cases"][draw.key]
    runs = [run_of(series, process, draw.key) for process in draw.baseline]
    return fit(runs, expected_sensitivity(case["flops"], case["bytes"], median(r.p50 for r in runs)))


def kind_of(series: Series) -> str:
    """Return the type of device of a series."""
    return "cpu" if series["device"] == "CPU" else "cuda"


def judged(suite: Suite, index: int, policy: Policy, first: Run, fresh: Sequence[Run]) -> str:
    """Screen a case, and confirm where that is suspect, as attn.measure does; return the verdict."""
    context = GateContext(suite.fits[index], suite.prior, policy, len(suite.draws))
    decision, is_suspect = screen(first, context)
    return (decide(fresh, context) if is_suspect else decision).verdict


def upper_bound(alarms: int, number: int, confidence: float = 0.95) -> float:
    """Return the one-sided Clopper-Pearson bound of a rate of which `alarms` of `number` were seen."""
    low, high = alarms / number, 1.0
    for _ in range(60):
        middle = (low + high) / 2  # P(X <= alarms) = I_{1-p}(number - alarms, alarms + 1)
        low, high = (
            (middle, high) if incomplete_beta(number - alarms, alarms + 1, 1 - middle) > 1 - confidence else (low, middle)
        )
    return high


def disturbed(series: Series, other: Series, drawn: list[Suite]) -> None:
    """Print what becomes of runs on a disturbed device, held against baselines of the quiet one."""
    found: Counter[str] = Counter()
    policy = policy_for(kind_of(series))
    for number, suite in enumerate(drawn):
        generator = random.Random(number)
        for index, draw in enumerate(suite.draws):
            processes = [generator.randrange(len(other["runs"])) for _ in range(1 + policy.runs)]
            if any(other["runs"][p]["cases"][draw.key]["plain"]["disturbances"] for p in processes):
                found["inconclusive (seen by the guard)"] += 1
                continue
            first, *fresh = [run_of(other, process, draw.key) for process in processes]
            found[judged(suite, index, policy, first, fresh)] += 1
    total = sum(found.values())
    print(f"disturbed by {other['disturb']}: " + ", ".join(f"{n / total:.1%} {name}" for name, n in found.most_common()))


Rule = Callable[[Seen], bool]

# -- rules: whether one accuses a case -----------------------------------------------------------------------------------


def gate(seen: Seen) -> bool:
    """This project's, which says inconclusive where it has only disturbed processes."""
    processes = [seen.series["runs"][p]["cases"] for p in (*seen.draw.baseline, seen.draw.screen, *seen.draw.fresh)]
    if any(cases[seen.draw.key]["plain"].get("disturbances") for cases in processes):
        return False
    policy, fresh = policy_for(kind_of(seen.series)), [seen.now(process) for process in seen.draw.fresh]
    return judged(seen.suite, seen.index, policy, seen.now(seen.draw.screen), fresh) == "regressed"


def fixed(seen: Seen) -> bool:
    """The p50 against the median of the recorded ones."""
    return seen.now(seen.draw.screen).p50 > 1.05 * median(seen.recorded)


def run_before(seen: Seen, percent: float) -> bool:
    """The p50 against that of one recorded run: Helion's dashboard, pytest-benchmark."""
    return seen.now(seen.draw.screen).p50 > (1 + percent / 100) * seen.recorded[0]


def golden(seen: Seen, percent: float) -> bool:
    """The rate against that of one recorded run, on both sides."""
    return abs(seen.recorded[0] / seen.now(seen.draw.screen).p50 - 1) > percent / 100


def tokenspeed(seen: Seen, percent: float) -> bool:
    """Medians apart by a share and by microseconds, unless samples scatter."""
    before, now = seen.samples() if has_samples(seen.series) else ([seen.recorded[0]], [seen.now(seen.draw.screen).p50])
    if max(median(abs(s - median(one)) for s in one) / median(one) for one in (before, now)) > 0.05:
        return False
    return median(now) > (1 + percent / 100) * median(before) and median(now) - median(before) > 0.5e-6


def nvbench(seen: Seen) -> bool:
    """Intervals of samples apart by half a percent, in time and in cycles: SLOW."""
    intervals = [(min(samples), sorted(samples)[(75 * (len(samples) - 1) + 50) // 100]) for samples in seen.samples()]
    of_control = [run.anchors["compute"] for run in (seen.before(seen.draw.baseline[0]), seen.now(seen.draw.screen))]
    in_cycles = [(low / period, high / period) for (low, high), period in zip(intervals, of_control, strict=True)]
    return all(now[0] >= 1.005 * before[1] for before, now in (intervals, in_cycles))


def asv(seen: Seen) -> bool:
    """A rank test of the samples of two runs, and a factor."""
    before, now = seen.samples()
    return median(now) > 1.1 * median(before) and mann_whitney(before, now) < 0.002


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
    "fixed 5 %": fixed,
    "nvbench robust": nvbench,
    "tokenspeed 6 %, 0.5 us": partial(tokenspeed, percent=6),
    "tokenspeed 10 %, 0.5 us": partial(tokenspeed, percent=10),
    "vLLM golden +-8 %": partial(golden, percent=8),
    "vLLM golden +-10 %": partial(golden, percent=10),
    "Helion 10 %": partial(run_before, percent=10),
    "pytest-benchmark median:5%": partial(run_before, percent=5),
    "asv": asv,
}
#: which compare samples, not p50s
OF_SAMPLES = (nvbench, asv)
FACTORS = {"cuda": (1.02, 1.03, 1.05, 1.10, 1.15), "cpu": (1.10, 1.25, 1.50)}


def has_samples(series: Series) -> bool:
    """Return whether a series keeps what each process has sampled."""
    return all("samples" in case["plain"] for case in series["runs"][0]["cases"].values())


def table(series: Series, drawn: list[Suite], is_bounded: bool) -> None:
    """Print one row per rule: what it accuses of unchanged suites and cases, and finds of slower cases."""
    first, factors, few = series["runs"][0]["cases"], FACTORS[kind_of(series)], drawn[:20]
    real = list(dict.fromkeys(what for case in first.values() for what in case if what.startswith("slower")))
    injected = [("plain", factor) for factor in factors] + [(what, 1.0) for what in real]
    row("", "accused: suites", "cases", "found: " + " / ".join([f"x {factor:.2f}" for factor in factors] + real))
    for name, rule in RULES.items():
        if rule in OF_SAMPLES and not has_samples(series):
            row(name, "-", "-", "-")
            continue
        accused = [[rule(Seen(series, suite, index)) for index in range(len(suite.draws))] for suite in drawn]
        alarms = sum(map(any, accused))
        bound = f" (< {upper_bound(alarms, len(drawn)):.1%})" if is_bounded else ""
        found = [share(rule, series, few, what, factor) for what, factor in injected]
        cases = sum(map(sum, accused)) / sum(map(len, accused))
        row(name, f"{alarms / len(drawn):.1%}{bound}", f"{cases:.2%}", " ".join(f"{one:8.1%}" for one in found))


def row(rule: str, suites: str, cases: str, found: str) -> None:
    """Print one."""
    print(f"{rule:28}{suites:>18}{cases:>9}  {found}")


def share(rule: Rule, series: Series, drawn: list[Suite], what: str, factor: float) -> float:
    """Return which share of the cases a rule finds of those that were slowed so; the suite is as it was otherwise."""
    found = [
        rule(Seen(series, suite, index, what, factor))
        for suite in drawn
        for index, draw in enumerate(suite.draws)
        if what in series["runs"][0]["cases"][draw.key]
    ]
    return sum(found) / len(found)


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
    parser.add_argument("--cases", type=int, help="by default 200, or as many as the series has")
    parser.add_argument("--suites", type=int, default=300)
    parser.add_argument("--busy", action="store_true", help="keep processes that were disturbed")
    parser.add_argument("--across", action="store_true", help="recorded in one condition, run in another")
    options = parser.parse_args()
    if options.across:
        across(json.loads(options.series.read_text()), options.suites)
        return
    series = read(options.series, options.busy)
    cases = options.cases or max(200, len(series["runs"][0]["cases"]))
    drawn = list(suites(series, options.suites, cases))
    recorded = len(drawn[0].draws[0].baseline)
    runs = len(series["runs"])
    print(f"{series['device']}, {runs} processes; {options.suites} suites of {cases} cases, recorded by {recorded}")
    table(series, drawn, is_bounded=recorded == FEWEST_RUNS)
    for path in options.disturbed:
        disturbed(series, json.loads(path.read_text()), drawn[:20])


if __name__ == "__main__":
    main()
