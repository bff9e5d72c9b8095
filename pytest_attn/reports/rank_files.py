"""A `Ranking` as files: JSON with everything that is printed, and a Python module with tables that a model can load.

The module imports nothing. FORWARD, BACKWARD and TRAINING (forward and backward one after the other) map a workload's id to
the name of a backend, or, where configurations were tuned, to the options of the one to use: {} is the default.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_attn.backends.configured import options_of, split
from pytest_attn.reports.candidates import Candidate
from pytest_attn.reports.rank import Ranking, RankingLine, Standing
from pytest_attn.reports.ties import ALPHA, BETWEEN_PROCESSES, DEGREES, FEWEST_PROCESSES

#: of the JSON; a field may be added without a new version, never changed or left out
SCHEMA = 1
TABLES = {"forward": "FORWARD", "backward": "BACKWARD", "forward+backward": "TRAINING"}
_SHOWN = ("name", "device", "kind", "architecture", "memory", "torch", "python", "pytest_attn")


def to_json(ranking: Ranking) -> str:
    """Return a ranking as JSON; times in seconds, memory in bytes."""
    versions = {one.name: one.version for line in ranking.lines for one in (*_all(line), *line.excluded) if one.version}
    content = {
        "schema": SCHEMA,
        "kind": "tune" if ranking.tuned else "rank",
        "tuned": ranking.tuned,
        "date": ranking.date,
        "machines": [dict(machine) for machine in _machines(ranking)],
        "versions": versions,
        "rule": {
            "alpha": ALPHA,
            "between_processes": BETWEEN_PROCESSES,
            "degrees": DEGREES,
            "fewest_processes": FEWEST_PROCESSES,
        },
        "lines": [_line(line, ranking) for line in ranking.lines],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def to_python(ranking: Ranking) -> str:
    """Return a ranking as a Python module; of several machines, FORWARD, ... are the first GPU's, or the first one's."""
    machines = _machines(ranking)
    first = next((m for m in machines if m.get("kind") != "cpu"), machines[0] if machines else {})
    what, which = ("which attention backend", "Exact ones only: approximate ones are in the JSON beside this file.")
    if ranking.tuned:
        what, which = (
            "which configuration of BACKEND",
            "{} is the backend's default, also where nothing is faster for certain.",
        )
    doubts = [_doubt(line) for line in ranking.timed if line.rivals_in_doubt]
    parts = [
        f'"""For each workload {what} is fastest and right; written by pytest-attn.\n\n{which}\n"""\n',
        *(["\n".join(doubts) + "\n"] if doubts else []),
        _assignment("MACHINE", {**{name: first.get(name) for name in _SHOWN}, "date": ranking.date}),
        *([_assignment("BACKEND", ranking.tuned)] if ranking.tuned else []),
        *(_assignment(name, _table(ranking, direction, first)) for direction, name in TABLES.items()),
    ]
    others = [m for m in machines if m is not first]
    if others:
        tables = {
            (str(m.get("name")), str(m.get("device")), str(m.get("torch"))): {
                name: _table(ranking, direction, m) for direction, name in TABLES.items()
            }
            for m in others
        }
        parts += ["# by (name, device, torch) of a machine\n", _assignment("OTHER_MACHINES", tables)]
    return "\n".join(parts)


def _doubt(line: RankingLine) -> str:
    """Write a comment; ascii(), as for constants, so that no name ends its line."""
    names = ", ".join(one.name for one in line.rivals_in_doubt)
    return "# " + ascii(f"{line.workload} {line.direction}: not compared, as disturbed: {names}")[1:-1]


def _assignment(name: str, value: Any) -> str:
    """Write a constant; ascii() of names, so that whatever an id contains is valid in any encoding."""
    if not isinstance(value, Mapping) or not value:
        return f"{name} = {value!a}\n"
    return f"{name} = {{\n" + "".join(f"    {key!a}: {one!a},\n" for key, one in value.items()) + "}\n"


def _table(ranking: Ranking, direction: str, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to use for each workload: by its id, or by its shape where one id means several workloads.

    Where one workload was timed under several conditions (cold and warm L2, threads), the first counts.
    """
    lines = [line for line in ranking.lines if line.direction == direction and line.machine == machine]
    shapes = Counter(workload for workload, _ in {(line.workload, line.shape) for line in lines})
    found: dict[str, Any] = {}
    for line in lines:
        standing = line.exact if line.exact.ranked or not ranking.tuned else line.approximate
        if chosen := ranking.chosen(standing):
            key = line.workload if shapes[line.workload] == 1 else line.shape
            found.setdefault(key, options_of(split(chosen.name)[1]) if ranking.tuned else chosen.name)
    return dict(sorted(found.items()))


def _machines(ranking: Ranking) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for line in ranking.lines:
        if line.machine not in found:
            found.append(line.machine)
    return found


def _all(line: RankingLine) -> Sequence[Candidate]:
    return (*line.exact.ranked, *line.approximate.ranked)


def _line(line: RankingLine, ranking: Ranking) -> dict[str, Any]:
    return {
        "workload": line.workload,
        "shape": line.shape,
        "direction": line.direction,
        "machine": {name: line.machine.get(name) for name in ("name", "device", "torch")},
        "l2": line.l2,
        "threads": line.threads,
        "exact": _standing(line.exact, ranking),
        "approximate": _standing(line.approximate, ranking),
        "excluded": [{"name": one.name, "why": one.excluded, "reason": one.reason} for one in line.excluded],
    }


def _standing(standing: Standing, ranking: Ranking) -> dict[str, Any]:
    chosen = ranking.chosen(standing)
    default = next((one for one in standing.ranked if one.name == ranking.tuned), None)
    return {
        "chosen": chosen.name if chosen else None,
        "fastest": standing.fastest.name if standing.fastest else None,
        "ties": [one.name for one in standing.ties],
        "ahead": standing.ahead,
        "gain": standing.times_as_long(default) if ranking.tuned and default else None,
        "pareto": [one.name for one in standing.pareto],
        "compared_by": "processes of the baselines" if standing.by_processes else "this run",
        "ranked": [_candidate(one) for one in standing.ranked],
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    assert one.timed is not None
    return {
        "name": one.name,
        "options": options_of(split(one.name)[1]),
        "p50": one.timed.p50,
        "interval": list(one.timed.interval),
        "processes": list(one.timed.processes),
        "relative_l2": one.error,
        "memory": one.memory,
    }
