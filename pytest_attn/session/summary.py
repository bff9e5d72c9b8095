"""What a run prints at its end: profiles, the summary of checks, the table of latencies, or the mutation score."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pytest_attn.backends.configured import split
from pytest_attn.reports.columns import room
from pytest_attn.reports.latency import is_notable, latency_summary
from pytest_attn.reports.records import verdict_of
from pytest_attn.reports.terminal import Line, mutation_summary, profile_tables, summary
from pytest_attn.session.output import place_of
from pytest_attn.session.session import AttentionSession


def print_summary(session: AttentionSession, reporter: Any, verbosity: int) -> None:
    """Print the profiles that were asked for, then the summary: nothing more under -q unless something is wrong."""
    results, settings = session.results, session.settings
    if results.mutants:
        print_section(reporter, mutation_summary(results.mutants, verbosity > 0), "attention mutants")
        return
    width = room(reporter.isatty)
    if settings.profile:
        ordered = sorted(results.records, key=place_of(session))
        print_section(reporter, profile_tables(ordered, width), "attention kernels")
    judged = [record for record in results.records if record["latency"] is None]
    timed = [record for record in results.records if record["latency"] is not None]
    if settings.tune:  # configurations have no baselines: how they stand is what --attn-tune prints
        timed = [record for record in timed if not split(record["subject"])[1]]
    is_wrong = any(verdict is not None and verdict.is_wrong for verdict in map(verdict_of, judged))
    if judged and (verbosity >= 0 or is_wrong):
        print_section(reporter, summary(judged, verbosity > 0, width, bool(settings.save_failures)))
    if timed and (verbosity >= 0 or any(map(is_notable, timed))):
        print_section(reporter, latency_summary(timed, verbosity > 0, width), "attention latency")


def print_section(reporter: Any, lines: Iterable[Line], title: str = "attention") -> None:
    """Print lines below a title."""
    reporter.write_sep("=", title)
    for text, markup in lines:
        reporter.write_line(text, **markup)
