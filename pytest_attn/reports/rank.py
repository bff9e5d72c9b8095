"""Which backend to use: for each workload and direction the fastest that is right, its ties, and what else is worth a look.

`rank` takes records (reports/records.py), of this run or of a file, and says how backends stand; reports/rank_lines.py prints
that and reports/rank_files.py writes it. Exact and approximate backends are ranked apart: what quantisation itself loses is in
no error of an approximate one (`Backend.dequantised`), so the two cannot be weighed against one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from pytest_attn.backends.configured import split
from pytest_attn.reports.records import Record
from pytest_attn.reports.ties import Timed, is_slower, share_processes

DIRECTIONS = ("forward", "backward", "forward+backward")
#: which results of a check say how accurate a direction is. An error is the largest relative L2 of these: z is in units of
#: each backend's own budget, so it cannot be compared between backends that declare another rounding
_RESULTS_OF = {"forward": ("out",), "backward": ("dq", "dk", "dv"), "forward+backward": ("out", "dq", "dk", "dv")}
_WRONG = {
    "mismatch": ("wrong", ""),
    "expected": ("wrong", "as expected: "),
    "broken": ("wrong", "breaks "),
    "raised": ("raised", ""),
    "known defect": ("known defect", ""),
}


class Candidate(NamedTuple):
    """One backend or callable on one line.

    excluded: why it is not ranked, in a word ("wrong", "skipped", ...); "" where it is. error: relative L2 of its results,
    memory: bytes at the peak of a call; None where unknown.
    """

    name: str
    version: str = ""
    timed: Timed | None = None
    error: float | None = None
    memory: int | None = None
    is_approximate: bool = False
    excluded: str = ""
    reason: str = ""

    @property
    def p50(self) -> float:
        """Seconds; of a ranked candidate."""
        assert self.timed is not None
        return self.timed.p50


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
        """How many times as long the first takes that is no tie; None where there is none."""
        return self.times_as_long(self.slower[0]) if self.slower else None

    def times_as_long(self, other: Candidate) -> float:
        """How many times as long as the fastest another candidate takes."""
        return self.value(other) / self.value(self.ranked[0])

    def is_told_from_fastest(self, other: Candidate) -> bool:
        """Whether another candidate is slower for certain."""
        return other in self.slower

    def value(self, one: Candidate) -> float:
        """Return the seconds by which candidates are ordered: this run's p50, or the median of the recorded processes."""
        assert one.timed is not None
        return median(one.timed.processes) if self.by_processes else one.timed.p50


@dataclass(frozen=True)
class Line:
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
    def rivals_in_doubt(self) -> tuple[Candidate, ...]:
        """Exact candidates whose time was disturbed: one of them may be the fastest."""
        return tuple(one for one in self.excluded if one.excluded == "inconclusive" and not one.is_approximate)


@dataclass(frozen=True)
class Ranking:
    """What `rank` found. tuned: the backend whose configurations compete, "" where backends do. date: of the last record.

    untimed: reasons for which what was to be timed was not.
    """

    lines: tuple[Line, ...] = ()
    tuned: str = ""
    date: str = ""
    untimed: tuple[str, ...] = ()

    @property
    def timed(self) -> tuple[Line, ...]:
        """The lines on which something is ranked."""
        return tuple(line for line in self.lines if line.exact.ranked or line.approximate.ranked)

    def chosen(self, standing: Standing) -> Candidate | None:
        """Return what a table should name: the fastest; of configurations the default, unless one is faster for certain."""
        default = next((one for one in standing.ranked if one.name == self.tuned), None)
        return standing.fastest if default is None or standing.is_told_from_fastest(default) else default


class _Place(NamedTuple):
    """Where times are comparable, but for the conditions that only timed records have."""

    machine: tuple[str, str, str]
    workload: str
    shape: str


def rank(records: Iterable[Record], tuned: str = "") -> Ranking:
    """Rank every backend that was checked and timed. tuned: only this backend and its configurations.

    One process is one value: of a backend that several tests measured on one line, the middle measurement counts. Callables
    are told apart by their tests. A record of another device, torch or shape belongs to another line.
    """
    kept = [r for r in records if not tuned or split(r["subject"])[0] == tuned]
    latencies = [r for r in kept if r["question"] == "latency"]
    directions = defaultdict(set)
    for r in latencies:
        directions[_function(r)].add(r["direction"])
    places: dict[_Place, list[Record]] = {}
    for r in kept:
        places.setdefault(_place(r), []).append(r)
    lines = [line for place, mine in places.items() for line in _lines_at(place, mine, directions)]
    untimed = [r["reason"] for r in latencies if r["verdict"] == "untimed"]
    return Ranking(
        tuple(lines),
        tuned,
        max((r.get("date", "") for r in kept), default=""),
        tuple(dict.fromkeys(untimed)),
    )


def _lines_at(place: _Place, records: Sequence[Record], directions: Mapping[str, set[str]]) -> Iterator[Line]:
    latencies = [r for r in records if r["question"] == "latency"]
    for direction in DIRECTIONS:
        timed = [r for r in latencies if r["direction"] == direction]
        judged = [r for r in records if r["question"] != "latency"]
        asked = [r for r in judged if direction in directions.get(_function(r), ())]
        conditions = list(dict.fromkeys(_conditions(r) for r in timed if r["latency"].get("p50")))
        for l2, threads in conditions or [("", None)]:
            here = [r for r in timed if not r["latency"].get("p50") or _conditions(r) == (l2, threads)]
            candidates = list(_candidates(here, judged, asked, direction))
            if not candidates:
                continue
            ranked = [one for one in candidates if not one.excluded]
            yield Line(
                place.workload,
                place.shape,
                direction,
                next((r["machine"] for r in records if r.get("machine")), {}),
                l2,
                threads,
                _stand([one for one in ranked if not one.is_approximate], _kind(records)),
                _stand([one for one in ranked if one.is_approximate], _kind(records)),
                tuple(one for one in candidates if one.excluded),
            )


def _stand(candidates: Sequence[Candidate], kind: str) -> Standing:
    """Order candidates that are right and timed."""
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


# -- from records to candidates ----------------------------------------------------------------------------------------


def _candidates(
    timed: Sequence[Record], judged: Sequence[Record], asked: Sequence[Record], direction: str
) -> Iterator[Candidate]:
    """Yield one candidate per backend, or callable of a test: those that were timed, then those that could not be."""
    measured: dict[tuple[str, str, int], list[Record]] = {}
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for r in timed:
        counts[r["test"], r["subject"]] += 1
        number = counts[r["test"], r["subject"]] if _is_callable(r) else 1
        measured.setdefault((*_identity(r), number), []).append(r)
    functions = defaultdict(set)
    for name, function, _ in measured:
        functions[name].add(function)
    known = {(name, function) for name, function, _ in measured}
    for (name, function, number), records in measured.items():
        mine = [r for r in judged if _identity(r) == (name, function)]
        label = f"{name} of {function.rpartition('::')[2]}" if len(functions[name]) > 1 else name
        label += f" #{number}" if number > 1 else ""
        yield _candidate(label, records, mine, direction)
    for identity in dict.fromkeys(_identity(r) for r in asked if _identity(r) not in known):
        mine = [r for r in judged if _identity(r) == identity]
        excluded, reason = _flaw(mine, direction) or ("", "")
        if excluded and excluded != "unchecked" and identity[0] not in ("-", "out"):
            yield Candidate(identity[0], mine[0].get("version", ""), excluded=excluded, reason=reason)


def _candidate(name: str, latencies: Sequence[Record], judged: Sequence[Record], direction: str) -> Candidate:
    version = latencies[0].get("version", "")
    is_approximate = any(r.get("is_approximate") for r in judged)
    flaw = _flaw(judged, direction) or _doubt(latencies)
    if flaw:
        return Candidate(name, version, is_approximate=is_approximate, excluded=flaw[0], reason=flaw[1])
    good = sorted((r for r in latencies if not _doubt([r])), key=lambda r: float(r["latency"]["p50"]))
    latency = good[(len(good) - 1) // 2]["latency"]
    return Candidate(
        name,
        version,
        _timed(good[(len(good) - 1) // 2]),
        _error(judged, direction),
        latency.get("memory"),
        is_approximate,
    )


def _timed(record: Record) -> Timed:
    """Return a p50, with the processes of its baseline where the gate finds that these still hold."""
    latency = record["latency"]
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
            return kind, before + (r["reason"].removeprefix("known defect ") or r["verdict"])
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
    raised = next((r for r in latencies if r["verdict"] == "raised"), None)
    if raised:
        return "raised", f"cannot be timed: {raised['reason']}"
    found = None
    for r in latencies:
        if not r["latency"].get("p50"):
            found = found or ("untimed", r["reason"])
        elif r["verdict"] == "inconclusive":
            found = found or ("inconclusive", r["reason"])
        elif r["latency"].get("disturbances"):
            found = found or ("inconclusive", f"disturbed: {'; '.join(r['latency']['disturbances'])}")
        else:
            return None
    return found


def _error(judged: Sequence[Record], direction: str) -> float | None:
    checks = [r for r in judged if r["question"] == "check" and r["verdict"] == "passed" and _covers(r, direction)]
    tensors = [t for r in checks for t in r.get("tensors", ()) if t["name"] in _RESULTS_OF[direction]]
    return max((float(t["relative_l2"]) for t in tensors), default=None)


def _place(record: Record) -> _Place:
    machine = record.get("machine") or {}
    where = (machine.get("name", ""), machine.get("device", ""), machine.get("torch", ""))
    return _Place(where, record["workload"], (record.get("shape") or {}).get("id", ""))


def _kind(records: Sequence[Record]) -> str:
    return next((str(r["machine"].get("kind", "")) for r in records if r.get("machine")), "")


def _conditions(record: Record) -> tuple[str, int | None]:
    return record["latency"].get("l2", ""), record["latency"].get("threads")


def _function(record: Record) -> str:
    """Return the test without its case."""
    return str(record["test"]).partition("[")[0]


def _is_callable(record: Record) -> bool:
    return (record.get("tags") or {}).get("family") == "callable"


def _identity(record: Record) -> tuple[str, str]:
    """A backend is the same in every test, a callable belongs to its own."""
    return record["subject"], _function(record) if _is_callable(record) else ""
