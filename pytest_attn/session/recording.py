"""--attn-update-baselines: time every case of the run in ten fresh processes, then write them all, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.latency.baseline import Baseline, BaselineError
from pytest_attn.latency.gate import FEWEST_RUNS
from pytest_attn.reports.terminal import count
from pytest_attn.session.fresh import FreshError, Runs, fresh_runs, is_lacking, undisturbed
from pytest_attn.session.latency import Pending, recorded_on
from pytest_attn.session.sharing import device_lock

if TYPE_CHECKING:
    from pytest_attn.session.store import AttentionSession


def record_baselines(session: AttentionSession, config: pytest.Config) -> bool:
    """Record the pending cases; return whether all were. Says what was written, or why nothing was.

    Cases that were not selected stay as they are.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    pending = _once_each(session.pending)
    say = reporter.write_line if reporter else lambda text, **markup: None
    say("")
    problem = ""
    try:
        for device in {one.device for one in pending}:
            store = recorded_on(session, device)
            if store.problem or store.file is None:
                raise BaselineError(store.problem)
            store.file.require_writable()
        what = f"baselines: {count(len(pending), 'case')}, fresh process"
        if not session.progress.line.is_watched:
            say(f"{what} 1 of {FEWEST_RUNS}")
        with session.progress.counting(what, FEWEST_RUNS) as progress:
            runs = _runs_of(pending, config, progress)
        for device, cases in _by_device(pending, runs).items():
            file = recorded_on(session, device).file
            assert file is not None
            file.write(cases)
            session.recorded |= cases
            say(f"baselines: {len(cases)} of {len(pending)} cases recorded in {file.path}")
    except (BaselineError, FreshError, KeyboardInterrupt) as error:
        problem = str(error) or "interrupted"
        say(f"baselines: nothing recorded: {problem}", red=True)
    missed = {one.key: problem or _missing(one, runs) for one in pending if one.key not in session.recorded}
    for key, reason in missed.items() if not problem else ():
        say(f"baselines: not {key}: {reason}", yellow=True)
    _name_the_missed(session, missed)
    return not missed


def _once_each(pending: list[Pending]) -> list[Pending]:
    """Return one of each case: a backend may be measured by several tests, whose largest residuals are kept."""
    found: dict[str, Pending] = {}
    for one in pending:
        first = found.setdefault(one.key, one)
        ours, theirs = first.baseline.z, one.baseline.z
        if ours and theirs and first.baseline.check == one.baseline.check:
            z = (max(ours[0], theirs[0]), max(ours[1], theirs[1]), max(ours[2], theirs[2]))
            found[one.key] = replace(first, baseline=replace(first.baseline, z=z))
    return list(found.values())


def _runs_of(pending: list[Pending], config: pytest.Config, progress: Callable[[int], None]) -> Runs:
    """Time all cases in as many processes as a baseline needs, and those that were disturbed in a few more."""
    with ExitStack() as stack:
        for device in {one.device for one in pending}:
            stack.enter_context(device_lock(device))
        modes = {one.key: one.baseline.mode for one in pending}

        def lacking(runs: Runs) -> list[str]:
            return [one.name for one in pending if is_lacking(runs, one.key, FEWEST_RUNS)]

        return fresh_runs(config, [one.name for one in pending], FEWEST_RUNS, progress, modes, lacking)


def _missing(one: Pending, runs: Runs) -> str:
    """Say what a recording lacks, and what disturbed most of its runs."""
    text = f"{len(undisturbed(runs, one.key, FEWEST_RUNS))} fresh processes timed it undisturbed, {FEWEST_RUNS} are needed"
    disturbances = Counter(words for run in runs if run["key"] == one.key for words in run["disturbances"])
    return f"{text}; mostly: {disturbances.most_common(1)[0][0]}" if disturbances else text


def _by_device(pending: list[Pending], runs: Runs) -> dict[Any, dict[str, Baseline]]:
    """Put each case's runs into its baseline, where there are enough."""
    found: dict[Any, dict[str, Baseline]] = {}
    for one in pending:
        mine = undisturbed(runs, one.key, FEWEST_RUNS)
        if len(mine) < FEWEST_RUNS:
            continue
        modes = [run["mode"] for run in mine]
        found.setdefault(one.device, {})[one.key] = replace(
            one.baseline,
            p50=tuple(run["p50"] for run in mine),
            host=tuple(run["host"] for run in mine),
            anchors={name: tuple(run["anchors"][name] for run in mine) for name in mine[0]["anchors"]},
            mode=max(set(modes), key=modes.count),
        )
    return found


def _name_the_missed(session: AttentionSession, reasons: dict[str, str]) -> None:
    """Change the verdict of cases that were to be recorded and were not, by their keys."""
    for record in session.records:
        if record["verdict"] == "recorded" and record["latency"] and (key := record["latency"].get("key")) in reasons:
            record |= {"verdict": "unrecorded", "reason": reasons[key]}
