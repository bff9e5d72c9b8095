"""Which backend to use: for each workload and direction the fastest that is right, its ties, and what else is worth a look.

`rank` takes records (reports/records.py), of this run or of a file, makes candidates of them (reports/candidates.py) and says
how they stand; reports/rank_lines.py prints that and reports/rank_files.py writes it. Exact and approximate backends are
ranked apart: what quantization itself loses is in no error of an approximate one (`Backend.dequantized`), so the two cannot
be weighed against one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from pytest_attn.backends.configured import split
from pytest_attn.reports.candidates import Candidate, candidates_of, function_of
from pytest_attn.reports.records import Record, latency_of
from pytest_attn.reports.ties import is_slower, share_processes

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
        """How many times as long the first takes that does not tie; None where there is none."""
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
    def rivals_in_doubt(self) -> tuple[Candidate, ...]:
        """Exact candidates whose time was disturbed: one of them may be the fastest."""
        return tuple(one for one in self.excluded if one.excluded == "inconclusive" and not one.is_approximate)


@dataclass(frozen=True)
class Ranking:
    """What `rank` found. tuned: the backend whose configurations compete, "" where backends do. date: of the last record.

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
        return standing.fastest if default is None or standing.is_told_from_fastest(default) else default


class _Place(NamedTuple):
    """Where times are comparable, but for the conditions that only timed records have. shape: of a model its test."""

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
    places: dict[_Place, list[Record]] = {}
    for r in kept:
        places.setdefault(_place(r), []).append(r)
    lines = [line for place, mine in places.items() for line in _lines_at(place, mine, directions)]
    untimed = [r["reason"] for r in latencies if r["verdict"] == "untimed"]
    return Ranking(
        lines=tuple(lines),
        tuned=tuned,
        date=max((r.get("date", "") for r in kept), default=""),
        untimed=tuple(dict.fromkeys(untimed)),
    )


def _lines_at(place: _Place, records: Sequence[Record], directions: Mapping[str, set[str]]) -> Iterator[RankingLine]:
    latencies = [r for r in records if r["question"] == "latency"]
    for direction in DIRECTIONS:
        timed = [r for r in latencies if r["direction"] == direction]
        judged = [r for r in records if r["question"] != "latency"]
        asked = [r for r in judged if direction in directions.get(function_of(r), ())]
        conditions = list(dict.fromkeys(_conditions(r) for r in timed if latency_of(r).get("p50")))
        for l2, threads in conditions or [("", None)]:
            here = [r for r in timed if not latency_of(r).get("p50") or _conditions(r) == (l2, threads)]
            candidates = list(candidates_of(here, judged, asked, direction))
            if not candidates:
                continue
            ranked = [one for one in candidates if not one.excluded]
            yield RankingLine(
                workload=place.workload,
                shape=place.shape,
                direction=direction,
                machine=next((r["machine"] for r in records if r.get("machine")), {}),
                l2=l2,
                threads=threads,
                exact=_stand([one for one in ranked if not one.is_approximate], _kind(records)),
                approximate=_stand([one for one in ranked if one.is_approximate], _kind(records)),
                excluded=tuple(one for one in candidates if one.excluded),
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


def _place(record: Record) -> _Place:
    machine = record.get("machine") or {}
    where = (machine.get("name", ""), machine.get("device", ""), machine.get("torch", ""))
    if record.get("model"):  # two models of one class are two problems, whatever their calls ask
        test = str(record["test"]).replace(record["subject"], "").replace("[]", "")
        return _Place(where, record["workload"], test)
    return _Place(where, record["workload"], (record.get("shape") or {}).get("id", ""))


def _kind(records: Sequence[Record]) -> str:
    return next((str(r["machine"].get("kind", "")) for r in records if r.get("machine")), "")


def _conditions(record: Record) -> tuple[str, int | None]:
    return latency_of(record).get("l2", ""), latency_of(record).get("threads")
