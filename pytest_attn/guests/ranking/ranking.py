"""Ranking of backends: for each workload and direction the fastest that is right, its ties, and what else is worth a look.

`rank` takes records (reports/records.py), of this run or of a file, makes candidates of them and says how they stand;
ranking_output.py prints and writes that. Exact and approximate backends are ranked apart: what quantization itself
loses is in no error of an approximate one (`Backend.dequantized`), so the two cannot be weighed against one another.

Whether one backend is slower than another, or only seems to be: one process is one value.

Samples within a process agree far better than processes do (docs/results/latency.md), so an interval of samples says
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

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, median
from typing import Any, NamedTuple

from pytest_attn.backends.configured import split
from pytest_attn.reports.records import Record, function_of, gathered, latency_of
from pytest_attn.reports.student import t_quantile

# -- whether one is slower than another, or only seems to be -----------------------------------------------------------

#: how often the backend that is fastest in truth may be missing from the fastest and its ties, for one line
ALPHA = 0.05
#: standard deviation of a p50 over processes, as a share, by kind of device; known as from so many degrees of freedom.
#: Of the pairs of processes in baselines/nvidia-h200.json (370 cases of 0.02 to 1.2 %), 5 % should seem to differ by t: with
#: 0.5 % 0.3 % do, with 0.3 % 1.4 %; of 113 earlier cases, of up to 2.2 %, 2 and 4 %. On two shared CPU cores: 0.9 to 2.7 %.
BETWEEN_PROCESSES = {"cuda": 0.005, "cpu": 0.03}
DEGREES = 4
#: by how much more launching may add to a call in one mode than in another, as a share. Measured: batches against what torch
#: replays up to 16 %, that against graphs in the device's memory up to 8 %, and up to 3 % the other way: see
#: docs/results/latency.md
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

    @property
    def half_interval(self) -> float:
        """Half of its interval, as a share."""
        low, high, _ = self.interval
        return (high - low) / 2 / self.p50


def share_processes(timed: Sequence[Timed]) -> bool:
    """Return whether recorded processes of the same day can stand for all."""
    same_day = len({one.date for one in timed}) == 1
    return same_day and all(len(one.processes) >= FEWEST_PROCESSES for one in timed)


def is_slower(slow: Timed, fast: Timed, kind: str, rivals: int) -> bool:
    """Return whether `slow` is slower for certain, at `ALPHA` divided by the number of rivals of the fastest.

    What was launched in another mode than the fastest is given what that may have added: see `LONGER`. kind: of the device.
    """
    slow = _shortened(slow, 1 + LONGER.get((slow.mode, fast.mode), 0.0))
    level = ALPHA / max(1, rivals)
    if share_processes((slow, fast)):
        return rank_sum_tail(slow.processes, fast.processes) <= level
    error = math.hypot(*_deviations(slow, kind), *_deviations(fast, kind))
    return math.log(slow.p50 / fast.p50) > t_quantile(level, DEGREES) * error


def _shortened(timed: Timed, share: float) -> Timed:
    low, high, confidence = timed.interval
    processes = tuple(one / share for one in timed.processes)
    return timed._replace(p50=timed.p50 / share, interval=(low / share, high / share, confidence), processes=processes)


def _deviations(timed: Timed, kind: str) -> tuple[float, float]:
    """Return standard errors of log p50: between processes, and within its own, from the interval of its block medians."""
    low, high, confidence = timed.interval
    width = math.log(high / low) / 2 if 0 < low < high else 0.0
    between = BETWEEN_PROCESSES.get("cpu" if timed.mode == "host" else kind, BETWEEN_PROCESSES["cpu"])
    return between, width / NormalDist().inv_cdf(0.5 + max(confidence, 0.5) / 2)


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


# -- from records to candidates ----------------------------------------------------------------------------------------

#: which results of a check say how accurate a direction is. An error is the largest relative L2 of these: z is in units of
#: each backend's own budget, so it cannot be compared between backends that declare another rounding
_RESULTS_OF = {"forward": ("out",), "backward": ("dq", "dk", "dv"), "forward+backward": ("out", "dq", "dk", "dv")}
_WRONG = {
    "mismatch": ("wrong", ""),
    "expected": ("wrong", "as expected: "),
    "broken": ("wrong", "breaks "),
    "no result": ("raised", ""),
    "raised": ("raised", ""),
    "known defect": ("known defect", ""),
}


class Candidate(NamedTuple):
    """One backend or callable on one line."""

    name: str
    version: str = ""
    timed: Timed | None = None
    error: float | None = None  # relative L2 of its results
    memory: int | None = None  # bytes at the peak of a call
    is_approximate: bool = False
    excluded: str = ""  # why it is not ranked, in a word ("wrong", "skipped", ...)
    reason: str = ""  # and in a sentence


class _Origin(NamedTuple):
    """Origin of one candidate: a backend, or the nth callable of one name that a test measured; of its records the first."""

    name: str
    function: str  # of a callable's test; a backend is the same in every test
    number: int = 1


def candidates_of(
    timed: Sequence[Record], judged: Sequence[Record], asked: Sequence[Record], direction: str
) -> Iterator[Candidate]:
    """Yield one candidate per backend, or callable of a test: those that were timed, then those that could not be.

    judged: the records of checks and invariants; asked: those of them whose tests measure this direction.
    """
    origins, judgments = _origins(timed), gathered((_origin_of(r), r) for r in judged)
    tests_of = Counter(name for name, _ in {(origin.name, origin.function) for origin in origins})
    for origin, latencies in origins.items():
        label = f"{origin.name} of {origin.function.rpartition('::')[2]}" if tests_of[origin.name] > 1 else origin.name
        label += f" #{origin.number}" if origin.number > 1 else ""
        yield _candidate(label, latencies, judgments.get(origin._replace(number=1), []), direction)
    timed_ones = {origin._replace(number=1) for origin in origins}
    for other in dict.fromkeys(origin for r in asked if (origin := _origin_of(r)) not in timed_ones):
        mine = judgments[other]
        excluded, reason = _flaw(mine, direction) or ("", "")
        if excluded not in ("", "unchecked") and other.name not in ("-", "out"):
            yield Candidate(other.name, mine[0]["version"], excluded=excluded, reason=reason)


def _origins(timed: Sequence[Record]) -> dict[_Origin, list[Record]]:
    """Return the records of each measurement; of a backend, all are one."""
    of_tests = gathered(((r["test"], r["subject"]), r) for r in timed).values()
    numbered = ((number if _is_callable(r) else 1, r) for of_test in of_tests for number, r in enumerate(of_test, 1))
    return gathered((_origin_of(r)._replace(number=number), r) for number, r in numbered)


def _candidate(name: str, latencies: Sequence[Record], judged: Sequence[Record], direction: str) -> Candidate:
    version, is_approximate = latencies[0]["version"], any(r["is_approximate"] for r in judged)
    flaw = _flaw(judged, direction) or _doubt(latencies)
    if flaw:
        return Candidate(name, version, is_approximate=is_approximate, excluded=flaw[0], reason=flaw[1])
    good = sorted((r for r in latencies if not _doubt([r])), key=lambda r: float(latency_of(r)["p50"]))
    middle = good[(len(good) - 1) // 2]
    return Candidate(
        name, version, _timed(middle), _error(judged, direction), latency_of(middle).get("memory"), is_approximate
    )


def _timed(record: Record) -> Timed:
    """Return a p50, with the processes of its baseline where the gate finds that these still hold."""
    latency = latency_of(record)
    low, high, confidence = latency["interval"]
    still_holds = record["verdict"] == "passed" and not (latency.get("decision") or {}).get("is_faster")
    baseline, mode = (latency.get("baseline") or {}) if still_holds else {}, latency.get("mode", "")
    return Timed(latency["p50"], (low, high, confidence), tuple(baseline.get("p50", ())), baseline.get("date", ""), mode)


def _flaw(judged: Sequence[Record], direction: str) -> tuple[str, str] | None:
    """Say why a backend is not right in a direction, in a word and in a sentence; None where it is.

    What concerns gradients only says nothing of the forward pass.
    """
    is_right = any(r["question"] == "check" and r["verdict"] == "passed" and _covers(r, direction) for r in judged)
    bad = [r for r in judged if r["verdict"] in _WRONG]
    for r in bad:
        if not is_right or _concerns(r, direction):
            kind, before = _WRONG[r["verdict"]]
            return kind, before + (r["reason"] or r["verdict"])
    if is_right:
        return None
    skipped = next((r for r in judged if r["verdict"] == "skipped"), None)
    return ("skipped", skipped["reason"]) if skipped else ("unchecked", "no check of it in these records")


def _covers(record: Record, direction: str) -> bool:
    return direction == "forward" or bool(record["backward"])


def _concerns(record: Record, direction: str) -> bool:
    if direction != "forward" or not record["backward"]:
        return True
    return any(not t["passed"] and t["name"] in ("out", "lse") for t in record.get("tensors", ()))


def _doubt(latencies: Sequence[Record]) -> tuple[str, str] | None:
    """Say why none of these measurements is a time to be ranked; None where one is."""
    failed = next((r for r in latencies if r["verdict"] in ("mismatch", "raised", "no result")), None)
    if failed:
        return _WRONG[failed["verdict"]][0], f"cannot be timed: {failed['reason']}"
    found = None
    for r in latencies:
        if not latency_of(r).get("p50"):
            found = found or ("untimed", r["reason"])
        elif r["verdict"] == "inconclusive":
            found = found or ("inconclusive", r["reason"])
        elif latency_of(r).get("disturbances"):
            found = found or ("inconclusive", f"disturbed: {'; '.join(latency_of(r)['disturbances'])}")
        else:
            return None
    return found


def _error(judged: Sequence[Record], direction: str) -> float | None:
    checks = [r for r in judged if r["question"] == "check" and r["verdict"] == "passed" and _covers(r, direction)]
    tensors = [t for r in checks for t in r.get("tensors", ()) if t["name"] in _RESULTS_OF[direction]]
    return max((float(t["relative_l2"]) for t in tensors), default=None)


def _is_callable(record: Record) -> bool:
    return (record.get("tags") or {}).get("family") == "callable"


def _origin_of(record: Record) -> _Origin:
    return _Origin(record["subject"], function_of(record) if _is_callable(record) else "")


# -- how candidates stand ----------------------------------------------------------------------------------------------

DIRECTIONS = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Standing:
    """Candidates in order: the fastest with its ties, then the slower ones. pareto: on the front, besides the fastest.

    The front is that of p50, error and memory; the ties of the fastest count as equally fast, errors as equal where two digits
    are, memory where three are. by_processes: whether all were compared by the processes of their baselines.
    """

    ranked: tuple[Candidate, ...] = ()
    ties: tuple[Candidate, ...] = ()
    slower: tuple[Candidate, ...] = ()
    pareto: tuple[Candidate, ...] = ()
    by_processes: bool = False

    @property
    def fastest(self) -> Candidate | None:
        """The smallest p50; None where none is ranked."""
        return self.ranked[0] if self.ranked else None

    @property
    def ahead(self) -> float | None:
        """Factor by which the first that does not tie takes longer; None where there is none."""
        return self.times_as_long(self.slower[0]) if self.slower else None

    def times_as_long(self, other: Candidate) -> float:
        """Return the factor by which another candidate takes longer than the fastest."""
        return self.value(other) / self.value(self.ranked[0])

    def value(self, one: Candidate) -> float:
        """Return the seconds by which candidates are ordered: this run's p50, or the median of the recorded processes."""
        assert one.timed is not None
        return median(one.timed.processes) if self.by_processes else one.timed.p50


@dataclass(frozen=True)
class RankingLine:
    """One workload in one direction, on one device and under one condition. machine: as in a record."""

    workload: str
    shape: str
    direction: str
    machine: Mapping[str, Any]
    l2: str = ""
    threads: int | None = None
    exact: Standing = field(default_factory=Standing)
    approximate: Standing = field(default_factory=Standing)
    excluded: tuple[Candidate, ...] = ()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All of them: those that are ranked first."""
        return (*self.exact.ranked, *self.approximate.ranked, *self.excluded)

    @property
    def rivals_in_doubt(self) -> tuple[Candidate, ...]:
        """Exact candidates whose time was disturbed: one of them may be the fastest."""
        return tuple(one for one in self.excluded if one.excluded == "inconclusive" and not one.is_approximate)


@dataclass(frozen=True)
class Ranking:
    """Result of `rank`. tuned: the backend whose configurations compete, "" where backends do. date: of the last record.

    untimed: reasons for which what was to be timed was not.
    """

    lines: tuple[RankingLine, ...] = ()
    tuned: str = ""
    date: str = ""
    untimed: tuple[str, ...] = ()

    @property
    def timed(self) -> tuple[RankingLine, ...]:
        """The lines on which something is ranked."""
        return tuple(line for line in self.lines if line.exact.ranked or line.approximate.ranked)

    def chosen(self, standing: Standing) -> Candidate | None:
        """Return what a table should name: the fastest; of configurations the default, unless one is faster for certain."""
        default = next((one for one in standing.ranked if one.name == self.tuned), None)
        return standing.fastest if default is None or default in standing.slower else default


class _Scope(NamedTuple):
    """Bounds of what is comparable, but for the conditions that only timed records have. shape: without one the test."""

    machine: tuple[str, str, str]
    workload: str
    shape: str


def rank(records: Iterable[Record], tuned: str = "") -> Ranking:
    """Rank every backend that was checked and timed. tuned: only this backend and its configurations.

    One process is one value: of a backend that several tests measured on one line, the middle measurement counts. Callables
    are distinguished by their tests. A record of another device, torch or shape belongs to another line.
    """
    kept = [r for r in records if not tuned or split(r["subject"])[0] == tuned]
    latencies = [r for r in kept if r["question"] == "latency"]
    directions = defaultdict(set)
    for r in latencies:
        directions[function_of(r)].add(r["direction"])
    scopes = gathered((_scope_of(r), r) for r in kept)
    lines = [line for scope, mine in scopes.items() for line in _lines_at(scope, mine, directions)]
    untimed = [r["reason"] for r in latencies if r["verdict"] == "untimed"]
    return Ranking(
        lines=tuple(lines),
        tuned=tuned,
        date=max((r.get("date", "") for r in kept), default=""),
        untimed=tuple(dict.fromkeys(untimed)),
    )


def _lines_at(scope: _Scope, records: Sequence[Record], directions: Mapping[str, set[str]]) -> Iterator[RankingLine]:
    machine = next(filter(None, (r["machine"] for r in records)), {})
    latencies = gathered((r["direction"], r) for r in records if r["question"] == "latency")
    judged = [r for r in records if r["question"] != "latency"]
    for direction in DIRECTIONS:
        timed = latencies.get(direction, [])
        asked = [r for r in judged if direction in directions.get(function_of(r), ())]
        known = dict.fromkeys(map(_conditions, filter(_is_timed, timed)))  # L2 state and threads
        for conditions in known or [("", None)]:
            here = [r for r in timed if not _is_timed(r) or _conditions(r) == conditions]
            if candidates := list(candidates_of(here, judged, asked, direction)):
                yield _line(RankingLine(scope.workload, scope.shape, direction, machine, *conditions), candidates)


def _is_timed(record: Record) -> bool:
    return bool(latency_of(record).get("p50"))


def _line(empty: RankingLine, candidates: Sequence[Candidate]) -> RankingLine:
    kind, ranked = str(empty.machine.get("kind", "")), [one for one in candidates if not one.excluded]
    return replace(
        empty,
        exact=_stand([one for one in ranked if not one.is_approximate], kind),
        approximate=_stand([one for one in ranked if one.is_approximate], kind),
        excluded=tuple(one for one in candidates if one.excluded),
    )


def _stand(candidates: Sequence[Candidate], kind: str) -> Standing:
    if not candidates:
        return Standing()
    timed = [one.timed for one in candidates if one.timed is not None]
    by_processes = share_processes(timed)
    ranked = sorted(candidates, key=Standing(by_processes=by_processes).value)
    fastest, *others = ranked
    assert fastest.timed is not None
    certain = [one for one in others if one.timed and is_slower(one.timed, fastest.timed, kind, len(others))]
    ties = [one for one in others if one not in certain]
    standing = Standing(tuple(ranked), tuple(ties), tuple(certain), by_processes=by_processes)
    return replace(standing, pareto=tuple(_front(standing)))


def _front(standing: Standing) -> Iterator[Candidate]:
    """Yield what no other candidate beats in p50, error and memory, unless it is as good as the fastest in all three."""
    everyone = standing.ranked
    knows_error = all(one.error is not None for one in everyone)
    knows_memory = all(one.memory is not None for one in everyone)

    def key(one: Candidate) -> tuple[float, float, float]:
        return (
            standing.value(everyone[0] if one in standing.ties else one),
            float(f"{one.error:.1e}") if knows_error and one.error is not None else 0.0,
            float(f"{one.memory:.2e}") if knows_memory and one.memory is not None else 0.0,
        )

    keys = [key(one) for one in everyone]
    for one in everyone[1:]:
        mine = key(one)
        beaten = any(theirs != mine and all(t <= m for t, m in zip(theirs, mine, strict=True)) for theirs in keys)
        if not beaten and mine != keys[0]:
            yield one


def _scope_of(record: Record) -> _Scope:
    machine = record.get("machine") or {}
    where = (machine.get("name", ""), machine.get("device", ""), machine.get("torch", ""))
    if record.get("model"):  # a guest's: two of one class are two problems, whatever they ask
        test = str(record["test"]).replace(record["subject"], "").replace("[]", "")
        return _Scope(where, record["workload"], test)
    return _Scope(where, record["workload"], (record.get("shape") or {}).get("id", ""))


def _conditions(record: Record) -> tuple[str, int | None]:
    return latency_of(record).get("l2", ""), latency_of(record).get("threads")
