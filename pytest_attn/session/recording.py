"""--attn-update-baselines: time every case of the run in ten fresh processes, then write them all, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.latency.baseline import BaselineError
from pytest_attn.latency.gate import FEWEST_RUNS
from pytest_attn.session.fresh import FreshError, fresh_runs
from pytest_attn.session.latency import Pending, recorded_on

if TYPE_CHECKING:
    from pytest_attn.session.store import AttentionSession


def record_baselines(session: AttentionSession, config: pytest.Config) -> None:
    """Record the pending cases; say what was written, or why nothing was. Cases that were not selected stay as they are."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    pending: list[Pending] = session.pending
    say = reporter.write_line if reporter else lambda text, **markup: None
    say("")
    problem = next((p for p in (recorded_on(session, one.device).problem for one in pending) if p), "")
    if problem:
        say(f"baselines: nothing recorded: {problem}", red=True)
        return
    names = list(dict.fromkeys(one.name for one in pending))
    try:
        runs = fresh_runs(config, names, FEWEST_RUNS, _progress(reporter, len(pending)))
    except (FreshError, KeyboardInterrupt) as error:
        say(f"baselines: nothing recorded: {str(error) or 'interrupted'}", red=True)
        return
    for path_of, cases in _by_file(session, pending, runs).items():
        file = recorded_on(session, path_of).file
        assert file is not None
        try:
            file.write(cases)
        except BaselineError as error:
            say(f"baselines: nothing recorded: {error}", red=True)
            return
        session.recorded |= cases
        say(f"baselines: {len(cases)} of {len(pending)} cases recorded in {file.path}")
    for one in pending:
        if one.key not in session.recorded:
            number = sum(run["key"] == one.key and not run["disturbances"] for run in runs)
            say(
                f"baselines: not recorded: {one.key}: {number} of {FEWEST_RUNS} fresh processes timed it undisturbed",
                yellow=True,
            )


def _by_file(session: AttentionSession, pending: list[Pending], runs: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Put each case's runs into its baseline; only those that every process timed, undisturbed and in one mode."""
    found: dict[Any, dict[str, Any]] = {}
    for one in pending:
        mine = [run for run in runs if run["key"] == one.key and not run["disturbances"]]
        if len(mine) < FEWEST_RUNS:
            continue
        anchors = {name: tuple(run["anchors"][name] for run in mine) for name in mine[0]["anchors"]}
        modes = [run["mode"] for run in mine]
        case = replace(
            one.baseline,
            p50=tuple(run["p50"] for run in mine),
            host=tuple(run["host"] for run in mine),
            anchors=anchors,
            mode=max(set(modes), key=modes.count),
        )
        found.setdefault(one.device, {})[one.key] = case
    return found


def _progress(reporter: Any, cases: int) -> Callable[[int], None]:
    """Return what prints how far the recording is, and how long it will take, on one line of a terminal."""
    begun = time.monotonic()

    def progress(done: int) -> None:
        if reporter is None:
            return
        left = (time.monotonic() - begun) / done * (FEWEST_RUNS - done) if done else None
        about = f", about {left // 60:.0f}:{left % 60:02.0f} left" if left else ""
        text = f"baselines: {cases} cases, fresh process {min(done + 1, FEWEST_RUNS)} of {FEWEST_RUNS}{about}"
        if reporter.isatty:
            reporter.rewrite(text, erase=True) if done < FEWEST_RUNS else reporter.rewrite("", erase=True)
        elif done == 0:
            reporter.write_line(text)

    return progress
