"""A `Ranking` for people, machines and models: lines of the terminal, JSON, and a Python module of tables.

The terminal gets one line of 80 columns per workload and direction, with -v a table of everything. The module imports nothing.
FORWARD, BACKWARD and TRAINING (forward and backward one after the other) map a workload's id to the name of a backend, or,
where configurations were tuned, to the options of the one to use: {} is the default.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_attn.backends.configured import options_of, split
from pytest_attn.guests.ranking.ranking import (
    ALPHA,
    BETWEEN_PROCESSES,
    DEGREES,
    FEWEST_PROCESSES,
    Candidate,
    Ranking,
    RankingLine,
    Standing,
)
from pytest_attn.reports.lines import aligned, count, duration_in_column
from pytest_attn.reports.records import gathered
from pytest_attn.reports.terminal import Line, in_table

# -- the terminal ------------------------------------------------------------------------------------------------------

WIDTH = 80
_PASSES = {"forward": "fwd", "backward": "bwd", "forward+backward": "f+b"}
_MOST_REASONS = 12
#: the order in which reasons are named: what is a fault of the backend comes first
_FAULTS = ("wrong", "raised", "known defect", "inconclusive", "untimed", "unchecked", "skipped")
_RED = {"red": True}
_INDENT = "  "


def rank_summary(ranking: Ranking, verbose: bool, width: int | None = None) -> Iterator[Line]:
    """Yield the lines of the section "attention rank"; one sentence where nothing was timed.

    width: what the rows of the tables of -v may have, in characters; others have 80.
    """
    if not ranking.timed:
        yield nothing_timed(ranking), {}
        yield from _reasons(ranking)
        return
    machines = list(dict.fromkeys(machine_name(line) for line in ranking.lines))
    for name in machines:
        lines = [line for line in ranking.lines if machine_name(line) == name]
        if len(machines) > 1:
            yield f"on {name}", {"bold": True}
        yield from _full(ranking, lines, width) if verbose else _short(ranking, lines)
    if not verbose:
        yield from _reasons(ranking)
    yield from _closing(ranking, verbose)


def nothing_timed(ranking: Ranking) -> str:
    """Say why there is nothing to rank, and what to type."""
    if ranking.untimed:
        return f"rank: nothing was timed: {ranking.untimed[0]}"
    if ranking.lines:
        why = Counter(one.excluded for line in ranking.lines for one in line.excluded)
        return f"rank: nothing can be ranked: {', '.join(f'{number} {word}' for word, number in why.most_common())}"
    what = f"--attn-tune={ranking.tuned}" if ranking.tuned else "--attn-rank"
    return (
        "rank: nothing was timed; call attn.measure(attn_backend) in a test, or type"
        f" pytest --pyargs pytest_attn.suite.test_latency {what}"
    )


def machine_name(line: RankingLine) -> str:
    """Return what distinguishes the machine of a line for a reader."""
    return f"{line.machine.get('name', '?')} ({line.machine.get('device', '?')}, torch {line.machine.get('torch', '?')})"


# -- without -v --------------------------------------------------------------------------------------------------------


def _short(ranking: Ranking, lines: Sequence[RankingLine]) -> Iterator[Line]:
    gain = "gain" if ranking.tuned else "ahead"
    first = "configuration" if ranking.tuned else "fastest"
    table: list[tuple[str, ...]] = [("workload", "", first, "p50", "+-", gain, "ties", "front")]
    for line in lines:
        has_faults = any(one.excluded != "skipped" for one in line.excluded)
        if line.exact.fastest or (not line.approximate.fastest and has_faults):
            table.append(_short_row(ranking, line, line.exact))
        if line.approximate.fastest:
            table.append(_short_row(ranking, line, line.approximate))
    yield from in_table(_fitted(table), [_RED if row[2] == _NONE else {} for row in table[1:]], right=(3, 4, 5))


_NONE = "none is right"


def _short_row(ranking: Ranking, line: RankingLine, standing: Standing) -> tuple[str, ...]:
    fastest = standing.fastest
    where = (line.workload, _PASSES[line.direction])
    if fastest is None or fastest.timed is None:
        return (*where, _NONE, "", "", "", "", "")
    shown = [_shown(one, ranking) for one in (fastest, *standing.ties)]
    return (
        *where,
        shown[0] + (" approx." if fastest.is_approximate else ""),
        duration_in_column(fastest.timed.p50),
        f"{fastest.timed.half_interval:.1%}",
        _gain(ranking, standing) if ranking.tuned else _factor(standing.ahead),
        ", ".join(shown[1:]) or "-",
        ", ".join(_shown(one, ranking) for one in standing.pareto) or "-",
    )


def _shown(one: Candidate, ranking: Ranking) -> str:
    if not ranking.tuned:
        return one.name
    return split(one.name)[1] or "default"


def _gain(ranking: Ranking, standing: Standing) -> str:
    """Say what the fastest configuration gains over the default: "tie" where that is not certain."""
    default = next((one for one in standing.ranked if one.name == ranking.tuned), None)
    if default is None or default is standing.fastest:
        return "-"
    return _factor(standing.times_as_long(default)) if default in standing.slower else "tie"


def _factor(times: float | None) -> str:
    if times is None:
        return "-"
    return f"{times - 1:+.1%}" if times < 1.1 else f"x{times:.2f}"


#: columns that may be cut, and to how many letters, in the order in which they give way
_CUTS = ((7, 17), (6, 14), (0, 24), (7, 5), (6, 4), (0, 14), (2, 24), (0, 8), (2, 13))


def _fitted(table: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Cut cells until a row fits the width."""
    rows = [list(row) for row in table]
    for column, least in _CUTS:
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        if excess > 0:
            limit = max(least, widths[column] - excess)
            for row in rows[1:]:
                row[column] = _cut_list(row[column], limit) if column in (6, 7) else _cut(row[column], limit)
    return [tuple(row) for row in rows]


def _cut(text: str, limit: int) -> str:
    """Leave out the middle: ids and configurations differ at both ends."""
    if len(text) <= limit:
        return text
    head = (limit - 2 + 1) // 2
    return f"{text[:head]}..{text[len(text) - (limit - 2 - head) :]}"


def _cut_list(text: str, limit: int) -> str:
    """Leave out names at the end, and say how many: "a, b +3"."""
    names = text.split(", ")
    for kept in range(len(names), 0, -1):
        shown = ", ".join(names[:kept]) + (f" +{len(names) - kept}" if kept < len(names) else "")
        if len(shown) <= limit:
            return shown
    return f"+{len(names)}"


def _reasons(ranking: Ranking) -> Iterator[Line]:
    """One line per reason for which candidates are not ranked, the backends' faults first."""
    excluded = (one for line in ranking.lines for one in line.excluded)
    found = gathered(((one.excluded, re.sub(r"\d+", "", one.reason)), one) for one in excluded)
    order = sorted(found.values(), key=lambda alike: _FAULTS.index(alike[0].excluded))
    for alike in order[:_MOST_REASONS]:
        kind, reason, names = alike[0].excluded, alike[0].reason, [_shown(one, ranking) for one in alike]
        text = f"{kind:12}  {_cut_list(', '.join(dict.fromkeys(names)), 24)}: {reason}"
        yield (text if len(text) <= WIDTH else f"{text[: WIDTH - 2]}.."), _markup(kind)
    if len(order) > _MOST_REASONS:
        yield f"... {len(order) - _MOST_REASONS} more reasons with -v", {}


def _markup(excluded: str) -> dict[str, bool]:
    return _RED if excluded in ("wrong", "raised") else {}


# -- with -v -----------------------------------------------------------------------------------------------------------


def _full(ranking: Ranking, lines: Sequence[RankingLine], width: int | None) -> Iterator[Line]:
    what = "configuration" if ranking.tuned else "backend"
    head = ("", what, "p50", "+-", "takes", "relative L2", "memory", "front", "")
    for line in lines:
        condition = ", ".join(filter(None, (line.l2, count(line.threads, "thread") if line.threads else "")))
        yield f"{line.workload} {line.direction}" + (f" ({condition})" if condition else ""), {"bold": True}
        rows = [*_rows(ranking, line.exact), *_rows(ranking, line.approximate)]
        for text in aligned([head, *rows], right=(2, 3, 4, 5, 6), width=width, indent=_INDENT) if rows else ():
            yield text, {}
        for one in line.excluded:
            yield f"{_INDENT}{one.excluded}: {_shown(one, ranking)}: {one.reason}", _markup(one.excluded)


def _rows(ranking: Ranking, standing: Standing) -> Iterator[tuple[str, ...]]:
    for one in standing.ranked:
        assert one.timed is not None
        place = "fastest" if one is standing.fastest else "tie" if one in standing.ties else "slower"
        processes = len(one.timed.processes)
        yield (
            place,
            _shown(one, ranking),
            duration_in_column(one.timed.p50),
            f"{one.timed.half_interval:.1%}",
            "-" if one is standing.fastest else _factor(standing.times_as_long(one)),
            "-" if one.error is None else f"{one.error:.1e}",
            "-" if one.memory is None else f"{one.memory / 2**20:,.1f} MiB",
            "front" if one in standing.pareto or one is standing.fastest else "",
            "approximate" if one.is_approximate else f"of {processes} processes" if standing.by_processes else "",
        )


def _closing(ranking: Ranking, verbose: bool) -> Iterator[Line]:
    """Say who is fastest how often, and what a tie is."""
    counts = Counter(_shown(one, ranking) for line in ranking.timed if (one := line.exact.fastest))
    winners = ", ".join(f"{name} {number}" for name, number in counts.most_common())
    what = f"{count(len(ranking.timed), 'workload and direction', 'workloads and directions')} ranked"
    fastest = f"; fastest: {winners if verbose else _cut_list(winners, 30)}" if winners else ""
    yield f"rank: {what}{fastest}", {"green": True}
    if doubtful := [line for line in ranking.timed if line.exact.fastest and line.rivals_in_doubt]:
        rivals = ", ".join(dict.fromkeys(_shown(one, ranking) for line in doubtful for one in line.rivals_in_doubt))
        where = count(len(doubtful), "line leaves", "lines leave")
        yield f"rank: {where} out what may be faster, as its time was disturbed: {rivals}; run again", {"yellow": True}
    yield "rank: ties do not differ from the fastest (95 %)" + ("" if verbose else "; -v shows every time and error"), {}


# -- files -------------------------------------------------------------------------------------------------------------

#: of the JSON; a field may be added without a new version, never changed or left out
SCHEMA = 1
TABLES = {"forward": "FORWARD", "backward": "BACKWARD", "forward+backward": "TRAINING"}
_SHOWN = ("name", "device", "kind", "architecture", "memory", "torch", "python", "pytest_attn")


def to_json(ranking: Ranking) -> str:
    """Return a ranking as JSON; times in seconds, memory in bytes."""
    versions = {one.name: one.version for line in ranking.lines for one in line.candidates if one.version}
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
    what, which = "which attention backend", "Exact ones only: approximate ones are in the JSON beside this file."
    if ranking.tuned:
        what = "which configuration of BACKEND"
        which = "{} is the backend's default, also where nothing is faster for certain."
    parts = [
        f'"""For each workload {what} is fastest and right; written by pytest-attn.\n\n{which}\n"""\n',
        "".join(f"{_doubt(line)}\n" for line in ranking.timed if line.rivals_in_doubt),
        _assignment("MACHINE", {**{name: first.get(name) for name in _SHOWN}, "date": ranking.date}),
        _assignment("BACKEND", ranking.tuned) if ranking.tuned else "",
        *(_assignment(name, table) for name, table in _tables(ranking, first).items()),
    ]
    if others := [m for m in machines if m is not first]:
        tables = {tuple(str(m.get(name)) for name in ("name", "device", "torch")): _tables(ranking, m) for m in others}
        parts += ["# by (name, device, torch) of a machine\n", _assignment("OTHER_MACHINES", tables)]
    return "\n".join(filter(None, parts))


def _tables(ranking: Ranking, machine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: _table(ranking, direction, machine) for direction, name in TABLES.items()}


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
    machines = [line.machine for line in ranking.lines]
    return [one for at, one in enumerate(machines) if one not in machines[:at]]


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
