"""--attn-rank, --attn-rank-to and --attn-tune at the end of a run: print how backends stand, and write it."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_attn.reports.columns import room
from pytest_attn.reports.ranking import Ranking, rank
from pytest_attn.reports.ranking_output import nothing_timed, rank_summary, to_json, to_python
from pytest_attn.session.output import write_whole
from pytest_attn.session.session import AttentionSession


def report_ranking(session: AttentionSession, config: pytest.Config, reporter: Any) -> None:
    """Print the section, or one sentence where nothing was timed, and write the files that were asked for."""
    if session.worker is not None:
        return
    tuned = session.settings.tune
    ranking = rank(session.results.records, session.registrations.registry.canonical(tuned) if tuned else "")
    _print(ranking, session, config, reporter)
    stem = session.settings.rank_to
    if not stem:
        return
    if not ranking.timed:
        reporter.write_line(f"--attn-rank-to: nothing to write to {stem}.json and {stem}.py", yellow=True)
        return
    write_whole("--attn-rank-to", f"{stem}.json", lambda: to_json(ranking), reporter)
    write_whole("--attn-rank-to", f"{stem}.py", lambda: to_python(ranking), reporter)


def _print(ranking: Ranking, session: AttentionSession, config: pytest.Config, reporter: Any) -> None:
    if not ranking.timed and not ranking.lines:
        reporter.write_line(nothing_timed(ranking))
        return
    reporter.write_sep("=", "attention rank")
    for text, markup in rank_summary(ranking, config.get_verbosity() > 0, room(reporter.isatty)):
        reporter.write_line(text, **markup)
    if session.settings.gpu_per_worker and config.getoption("dist", "no") not in ("no", "loadgroup"):
        reporter.write_line(
            "rank: workers with GPUs of their own shared the cases of one workload; --dist loadgroup keeps them on one GPU",
            yellow=True,
        )
