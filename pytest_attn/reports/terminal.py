"""Text of the terminal: records in, lines out. Latencies are in latency_output.py."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from pytest_attn.backends.contexts import RAN_EAGERLY
from pytest_attn.reports.lines import aligned, count, duration, some, z_figure
from pytest_attn.reports.records import LEVELS, RUN, Record, failures, gathered, is_judged, verdict_of
from pytest_attn.reports.verdict import LONG_SUMS, Cause, Tone, Verdict
from pytest_attn.seam import each

#: subject of the record of a test that ended before it named one
_NO_SUBJECT = "-"
Line = tuple[str, dict[str, bool]]  # text and the terminal's markup

#: reasons that --attn-list prints, those of most cases first
_MOST_OBSTACLES = 20
#: seconds of a compilation below which it is not listed, as with pytest's own durations
_SHORTEST = 0.005
RED = {"red": True}
#: how a terminal shows the tone of a verdict
_MARKUP = {Tone.BAD: RED, Tone.DOUBT: {"yellow": True}, Tone.GOOD: {"green": True}, Tone.PLAIN: {}, Tone.NONE: {}}
#: in a closing sentence, what is right first
_COUNTED = (
    *(Verdict.PASSED, Verdict.APPROXIMATE, Verdict.HELD, Verdict.HELD_IN_PART, Verdict.MISMATCH, Verdict.BROKEN),
    *(Verdict.NO_RESULT, Verdict.RAISED, Verdict.FAILED, Verdict.KNOWN_DEFECT, Verdict.EXPECTED),
)  # pytest counts skips, those without a judgment too: one number, not two


def summary(
    records: Sequence[Record],
    verbose: bool,
    width: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Line]:
    """Yield the lines of the summary: a row per case if verbose, a line per problem, one closing sentence.

    width: what the rows of tables may have, in characters. options: of guests, with their values.
    """
    if verbose:
        yield from _rows(records, width)
        yield from _of_guests("lines", records, width)
    yield from _of_guests("tables", records, width)
    yield from _problems(records)
    if verbose:
        yield from _compilations(records)
    yield from _not_run(records)
    if verbose:
        yield from ((f"not applied   {line}", {}) for line in inapplicable(records))
    yield from ((f"untested      {line}", {}) for line in untested(records))
    for why in dict.fromkeys(r["reason"].partition(RAN_EAGERLY)[2] for r in records if RAN_EAGERLY in r["reason"]):
        yield f"note          {RAN_EAGERLY}{why}", {"yellow": True}
    text, markup = closing(records)
    yield f"{text}{counted_cases(records)}{_next(records, options)}", markup


def _of_guests(what: str, records: Sequence[Record], width: int | None) -> Iterator[Line]:
    return (line for lines in each(what) for line in lines(records, width))


def _rows(records: Sequence[Record], width: int | None) -> Iterator[Line]:
    ran = [r for r in records if r["z_element"] is not None]
    if not ran:
        return
    table: list[tuple[str, ...]] = [("verdict", "backend", "workload", "direction", "worst", "z", "row", "head")]
    table += [
        (
            r["verdict"] + (" approximate" if r["is_approximate"] else ""),
            r["subject"],
            r["workload"] + _sampled(r),
            "backward" if r["backward"] else "forward",
            f"{r['tensor']}/{r['distribution']}",
            *levels_of(r),
        )
        for r in ran
    ]
    yield from in_table(table, [RED if r["verdict"] == Verdict.MISMATCH else {} for r in ran], (5, 6, 7), width)


def in_table(
    table: Sequence[Sequence[str]],
    markups: Sequence[dict[str, bool]] = (),
    right: tuple[int, ...] = (),
    width: int | None = None,
) -> Iterator[Line]:
    """Yield the lines of a table, its titles bold. markups: of the other rows. right, width: as for `aligned`."""
    yield from zip_longest(aligned(table, right, width), [{"bold": True}, *markups], fillvalue={})


def _sampled(record: Record) -> str:
    """Say how many rows, and keys, of how many were compared, where only some were."""
    if not record["is_sampled"]:
        return ""
    counts = "; ".join(f"{some:,} of {every:,} {name}" for name, (some, every) in record["sampled"].items())
    return f" (sampled: {counts})" if counts else " (sampled)"


def levels_of(judged: Mapping[str, Any]) -> tuple[str, ...]:
    """Write z at its three levels; where elements are NaN or infinite and should not be, that is what is wrong."""
    if any(tensor.get("wrong_positions") for tensor in judged.get("tensors", ())):
        return "not finite", "-", "-"
    levels = (judged[name] for name in LEVELS)
    return tuple("-" if z is None else z_figure(z) for z in levels)


def _problems(records: Sequence[Record]) -> Iterator[Line]:
    """One line per case that is wrong or to be looked at, and per item of --attn-fuzz."""
    for r in records:
        case = f"{r['subject']} on {r['workload']}{' backward' if r['backward'] else ''}"
        verdict = verdict_of(r)
        if not is_judged(r):
            yield f"{r['verdict']:12}  {' '.join(filter(None, (r['test'], r['phase'])))}: {r['reason']}", RED
        elif verdict is Verdict.UNEXPECTED:
            yield f"unexpected    {case} passed: known defect {r['reason']}", {"yellow": True}
        elif verdict is not None and (verdict.is_wrong or verdict.is_doubtful):
            yield f"{r['verdict']:12}  {case}: {r['reason']}", _MARKUP[verdict.tone]
        elif r["source"] == "fuzz" and verdict is not None and verdict.tone is Tone.GOOD:
            yield f"fuzzed        {case}: {r['reason']}", {}


def _compilations(records: Sequence[Record]) -> Iterator[Line]:
    """One line per compiled backend: how long its first calls took, which no latency contains, and its graph breaks."""
    for name, cases in gathered((r["subject"], r) for r in records if r["compile_seconds"] is not None).items():
        seconds = sorted(r["compile_seconds"] or 0.0 for r in cases)
        breaks = max(r["graph_breaks"] for r in cases)
        times = f"{seconds[len(seconds) // 2]:.1f} s in the median, {seconds[-1]:.1f} s at most"
        yield f"compiled      {name}: {count(len(cases), 'case')}, {times}, {count(breaks, 'graph break')} at most", {}


def slowest_compilations(records: Sequence[Record], number: int) -> Iterator[Line]:
    """Yield by test what compilers took, the slowest first, as `pytest --durations=number` does; 0 for all."""
    seconds: dict[str, float] = {}
    for r in records:
        seconds[r["test"]] = seconds.get(r["test"], 0.0) + (r["compile_seconds"] or 0.0)
    for test, taken in sorted(seconds.items(), key=lambda one: -one[1])[: number or None]:
        if taken >= _SHORTEST:
            yield f"{taken:.2f}s compile  {test}", {}


def _not_run(records: Sequence[Record]) -> Iterator[Line]:
    """One line per reason for which nothing of a backend ran at all; refused workloads are only counted."""
    ran = {_NO_SUBJECT, *(r["subject"] for r in records if r["verdict"] != Verdict.SKIPPED)}
    shown: set[str] = set()
    for reason, names in gathered((r["reason"], r["subject"]) for r in records if r["subject"] not in ran).items():
        fresh = [name for name in dict.fromkeys(names) if name not in shown]
        shown.update(fresh)
        if fresh:
            yield f"not run       {', '.join(fresh)}: {reason}", {}


def untested(records: Sequence[Record]) -> Iterator[str]:
    """Say what the checks that passed could not see: options that change nothing, and sums in a low precision."""
    for option, names in gathered((option, r["workload"]) for r in records for option in r["untested"]).items():
        unjudged, _, why = option.partition(": ")
        if why:
            yield f"{unjudged} of {_some_of(names)}: not judged, {why}"
        elif option != LONG_SUMS:
            yield f"{option} of {_some_of(names)}: results without it are within every limit"
    yield from _untested_sums(records)


def inapplicable(records: Sequence[Record]) -> Iterator[str]:
    """Say which invariants did not apply, why, and to what."""
    found = ((one, f"{r['subject']} on {r['workload']}") for r in records for one in r["inapplicable"])
    cases = gathered(((one["invariant"], one["reason"]), named) for one, named in found)
    for (invariant, reason), names in cases.items():
        yield f"{invariant} of {_some_of(names)}: {reason}"


def _some_of(names: Sequence[str]) -> str:
    """Return the first few of names, of which each counts once."""
    return some(list(dict.fromkeys(names)), 3)


def _untested_sums(records: Sequence[Record]) -> Iterator[str]:
    """Say of which kernels every workload is too short to show a fault in sums of a low precision."""
    passed = (r for r in records if r["question"] == "check" and r["verdict"] == Verdict.PASSED)
    low = ("bfloat16", "float16")
    judged = gathered((r["subject"], r) for r in passed if r["shape"] and r["shape"]["dtype"] in low)  # not all have one
    short = {name: mine for name, mine in judged.items() if all(LONG_SUMS in r["untested"] for r in mine)}
    if short:
        whose = f"of {next(iter(short))}" if len(short) == 1 else f"of {len(short)} kernels"
        longest = max(r["shape"]["kv_len"] for mine in short.values() for r in mine)
        yield f"sums {whose} in low precision: faults in them show over about 2,000 keys, the longest workload has {longest:,}"


def _next(records: Sequence[Record], options: Mapping[str, Any]) -> str:
    """Say what to type next."""
    of_guests = (advice(records, options) for advice in each("advice"))
    reasons = "-rs lists the reasons of skips" if any(r["verdict"] == Verdict.SKIPPED for r in records) else ""
    said = next(filter(None, (*of_guests, reasons)), "")
    return said and f"; {said}"


def closing(records: Sequence[Record]) -> Line:
    """Return the sentence that says how it all went, of checks and invariants."""
    counts = Counter(_as_counted(r) for r in records if r["phase"] != RUN)
    text = ", ".join(f"{counts[v]:,} {v.counted}" for v in _COUNTED if counts[v]) or "nothing was judged"
    tones = {verdict.tone for verdict in counts if verdict is not None}
    tone = next((tone for tone in (Tone.BAD, Tone.GOOD) if tone in tones), Tone.NONE)
    return f"{text}{_kernels(records)}{_largest_z(records)}", _MARKUP[tone]


def ending(records: Sequence[Record]) -> Iterator[str]:
    """Yield in sentences how many tests failed, as pytest counts them, and whether the run was stopped; nothing else."""
    for stopped in (r for r in records if r["phase"] == RUN):
        yield f"The run was stopped: {stopped['reason']}."
    if failed := failures(records):
        yield f"{count(failed, 'test')} failed."


def _kernels(records: Sequence[Record]) -> str:
    ran = [r for r in records if is_judged(r) and r["verdict"] != Verdict.SKIPPED and r["subject"] != _NO_SUBJECT]
    kernels, workloads = ({r[of] for r in ran} for of in ("subject", "workload"))
    return f"; {count(len(kernels), 'kernel')} on {count(len(workloads), 'workload')}" if kernels else ""


def _largest_z(records: Sequence[Record]) -> str:
    exact = [r for r in records if r["verdict"] == Verdict.PASSED and not r["is_approximate"]]
    worst = max((r for r in exact if r["z_element"] is not None), key=lambda r: r["z_element"] or 0.0, default=None)
    if worst is None:
        return ""
    return f", largest passing z {worst['z_element']:.1f} ({worst['subject']}, {worst['tensor']}, {worst['workload']})"


#: said of cases whose tests raised before they had a kernel judged
_ENDED = "ended before a kernel was judged"


def counted_cases(records: Sequence[Record]) -> str:
    """Say how many cases were judged, of which some have several judgments, and how many were declined or skipped."""
    cases: dict[str, set[str]] = {}
    for r in filter(is_judged, records):
        asked = _ENDED if r["subject"] == _NO_SUBJECT else "judged"
        cases.setdefault(r["test"], set()).add(asked if r["verdict"] != Verdict.SKIPPED else r["cause"])
    first = [next((how for how in ("judged", _ENDED, Cause.DECLINED) if how in found), "skipped") for found in cases.values()]
    judged = first.count("judged")
    others = {_ENDED: first.count(_ENDED), "declined": first.count(Cause.DECLINED), "skipped": first.count("skipped")}
    said = f"; {count(judged, 'case')} judged" if judged else ""
    return said + "".join(f", {number} {how}" for how, number in others.items() if number)


def _as_counted(record: Record) -> Verdict | None:
    """Return the verdict as which a record counts: a defect that did not show has a line of its own."""
    verdict = verdict_of(record)
    if verdict is not Verdict.UNEXPECTED:
        return verdict
    return Verdict.APPROXIMATE if record["is_approximate"] else Verdict.PASSED


def listing(
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]],
    closing: str,
    width: int | None = None,
    obstacles: Mapping[str, Counter[str]] = MappingProxyType({}),
) -> Iterator[Line]:
    """Yield the tables of --attn-list, each a header and its rows, why cases would not run, and the closing sentence.

    obstacles: by reason, how many cases of each backend.
    """
    for title, rows in tables:
        yield from in_table([title, *rows], width=width)
        yield "", {}
    ranked = sorted(obstacles.items(), key=lambda reason: -sum(reason[1].values()))
    for reason, names in ranked[:_MOST_OBSTACLES]:
        yield f"not run       {count(sum(names.values()), 'case')} of {', '.join(names)}: {reason}", {}
    if len(ranked) > _MOST_OBSTACLES:
        yield f"... {len(ranked) - _MOST_OBSTACLES} more reasons", {}
    yield closing, {}


# -- --attn-profile: which kernels each case really launched -----------------------------------------------------------

_PROFILE = ("framework", "category", "arch", "operation", "calls", "time", "share")
_MOST_OPERATIONS = 12
_INDENT = "  "
_MILLISECONDS_FROM = 1e-3


def profile_tables(records: Sequence[Record], width: int | None = None) -> Iterator[Line]:
    """Yield a table per case and direction, and under it what the case amounts to, against the workload's first backend.

    width: what the rows of tables may have, in characters.
    """
    first: dict[tuple[str, str], tuple[str, float]] = {}
    shown: set[tuple[str, str, str]] = set()
    for record in records:
        for profile in record["profiles"]:
            place = (record["workload"], profile["direction"])
            if (record["subject"], *place) in shown:
                continue  # the forward pass of a test with gradients, beside that of one without
            shown.add((record["subject"], *place))
            baseline = first.setdefault(place, (record["subject"], profile["seconds"]))
            yield f"{record['subject']} on {record['workload']}, {profile['direction']}", {"bold": True}
            for text in aligned([_PROFILE, *_operations(profile)], right=(4, 5, 6), width=width, indent=_INDENT):
                yield text, {}
            yield f"{_INDENT}{_total(profile, record['subject'], baseline)}", {}
            yield "", {}


def _operations(profile: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row per operation, longest first; kernels with the same words are one operation."""
    shown = ("framework", "category", "architecture", "operation")
    operations = gathered((tuple(launch[key] or "-" for key in shown), launch) for launch in profile["launches"])
    longest = sorted(operations.items(), key=lambda operation: -_seconds(operation[1]))
    for words, launches in longest[:_MOST_OPERATIONS]:
        yield (*words, *_figures(launches, profile["seconds"]))
    rest = [launch for _, launches in longest[_MOST_OPERATIONS:] for launch in launches]
    if rest:
        yield ("-", "-", "-", f"{len(longest) - _MOST_OPERATIONS} more", *_figures(rest, profile["seconds"]))


def _figures(launches: Sequence[Mapping[str, Any]], total: float) -> tuple[str, str, str]:
    seconds = _seconds(launches)
    return (
        str(sum(launch["calls"] for launch in launches)),
        duration(seconds, _MILLISECONDS_FROM),
        f"{seconds / total:.1%}" if total else "-",
    )


def _seconds(launches: Sequence[Mapping[str, Any]]) -> float:
    return sum(float(launch["seconds"]) for launch in launches)


def _total(profile: Mapping[str, Any], subject: str, baseline: tuple[str, float]) -> str:
    seconds = profile["seconds"]
    if not seconds:
        return "no kernel was launched"
    parts = [f"total {duration(seconds, _MILLISECONDS_FROM)}"]
    copies = _seconds([launch for launch in profile["launches"] if launch["category"] == "copy"])
    if copies:
        parts.append(f"{copies / seconds:.0%} of it copies and transposes")
    if subject != baseline[0]:
        parts.append(f"{baseline[1] / seconds:.2f}x as fast as {baseline[0]}")
    if profile["peak_memory"] is not None:
        parts.append(f"peak memory {profile['peak_memory'] / 2**20:,.1f} MiB")
    parts.append(f"{profile['flops'] / seconds * 1e-12:,.2f} TFLOP/s")
    if profile["roofline"] is not None:
        parts.append(f"{profile['roofline'] / seconds:.0%} of the roofline")
    return ", ".join(parts)
