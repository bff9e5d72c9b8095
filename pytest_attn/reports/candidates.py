"""From records to what can be ranked: one candidate per backend or callable, what excludes it, its time and its error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pytest_attn.reports.records import Record, latency_of
from pytest_attn.reports.ties import Timed

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


class _Identity(NamedTuple):
    """Whose a record is. A backend is the same in every test, so it has no function; a callable belongs to its own test's."""

    name: str
    function: str


class _Measurement(NamedTuple):
    """What one candidate comes from: a backend, or the nth callable of one name that a test measured."""

    identity: _Identity
    number: int


def candidates_of(
    timed: Sequence[Record], judged: Sequence[Record], asked: Sequence[Record], direction: str
) -> Iterator[Candidate]:
    """Yield one candidate per backend, or callable of a test: those that were timed, then those that could not be.

    judged: the records of checks and invariants; asked: those of them whose tests measure this direction.
    """
    measurements = _measurements(timed)
    functions = defaultdict(set)
    for identity, _ in measurements:
        functions[identity.name].add(identity.function)
    for measurement, latencies in measurements.items():
        identity = measurement.identity
        mine = [r for r in judged if _identity(r) == identity]
        label = _label(measurement, is_ambiguous=len(functions[identity.name]) > 1)
        yield _candidate(label, latencies, mine, direction)
    known = {identity for identity, _ in measurements}
    for identity in dict.fromkeys(_identity(r) for r in asked if _identity(r) not in known):
        mine = [r for r in judged if _identity(r) == identity]
        excluded, reason = _flaw(mine, direction) or ("", "")
        if excluded and excluded != "unchecked" and identity.name not in ("-", "out"):
            yield Candidate(identity.name, mine[0].get("version", ""), excluded=excluded, reason=reason)


def _measurements(timed: Sequence[Record]) -> dict[_Measurement, list[Record]]:
    """Return the records of each measurement; of a backend, all are one."""
    found: dict[_Measurement, list[Record]] = {}
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for r in timed:
        counts[r["test"], r["subject"]] += 1
        number = counts[r["test"], r["subject"]] if _is_callable(r) else 1
        found.setdefault(_Measurement(_identity(r), number), []).append(r)
    return found


def _label(measurement: _Measurement, is_ambiguous: bool) -> str:
    """Return the name to show. is_ambiguous: whether callables of several tests have it."""
    (name, function), number = measurement
    label = f"{name} of {function.rpartition('::')[2]}" if is_ambiguous else name
    return label + (f" #{number}" if number > 1 else "")


def _candidate(name: str, latencies: Sequence[Record], judged: Sequence[Record], direction: str) -> Candidate:
    version = latencies[0].get("version", "")
    is_approximate = any(r.get("is_approximate") for r in judged)
    flaw = _flaw(judged, direction) or _doubt(latencies)
    if flaw:
        return Candidate(name, version, is_approximate=is_approximate, excluded=flaw[0], reason=flaw[1])
    good = sorted((r for r in latencies if not _doubt([r])), key=lambda r: float(latency_of(r)["p50"]))
    latency = latency_of(good[(len(good) - 1) // 2])
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
    failed = next((r for r in latencies if r["verdict"] in ("raised", "no result")), None)
    if failed:
        return "raised", f"cannot be timed: {failed['reason']}"
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


def function_of(record: Record) -> str:
    """Return the test without its case."""
    return str(record["test"]).partition("[")[0]


def _is_callable(record: Record) -> bool:
    return (record.get("tags") or {}).get("family") == "callable"


def _identity(record: Record) -> _Identity:
    return _Identity(record["subject"], function_of(record) if _is_callable(record) else "")
