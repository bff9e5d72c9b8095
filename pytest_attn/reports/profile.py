"""The tables of --attn-profile: which kernels each case really launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_attn.messages.durations import duration
from pytest_attn.reports.columns import aligned
from pytest_attn.reports.records import Record
from pytest_attn.reports.terminal import Line

_HEADER = ("framework", "category", "arch", "operation", "calls", "time", "share")
_MOST_ROWS = 12
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
            for text in aligned([_HEADER, *_rows(profile)], right=(4, 5, 6), width=width, indent=_INDENT):
                yield text, {}
            yield f"{_INDENT}{_total(profile, record['subject'], baseline)}", {}
            yield "", {}


def _rows(profile: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row per operation, longest first; kernels with the same words are one operation."""
    operations: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for launch in profile["launches"]:
        words = tuple(launch[key] or "-" for key in ("framework", "category", "architecture", "operation"))
        operations.setdefault(words, []).append(launch)
    longest = sorted(operations.items(), key=lambda operation: -_seconds(operation[1]))
    for words, launches in longest[:_MOST_ROWS]:
        yield (*words, *_figures(launches, profile["seconds"]))
    rest = [launch for _, launches in longest[_MOST_ROWS:] for launch in launches]
    if rest:
        yield ("-", "-", "-", f"{len(longest) - _MOST_ROWS} more", *_figures(rest, profile["seconds"]))


def _figures(launches: Sequence[Mapping[str, Any]], total: float) -> tuple[str, str, str]:
    seconds = _seconds(launches)
    return str(sum(launch["calls"] for launch in launches)), duration(seconds, _MILLISECONDS_FROM), f"{seconds / total:.1%}"


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
