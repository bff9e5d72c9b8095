"""--attn-shard: the part of a run that this process runs, and what it says of it in the file of records.

The tests are divided after -k, -m and --deselect, which say the same everywhere, and before anything that asks this machine:
its cache (--lf), and which backends it lacks.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pytest_attn.reports.parts import PartFacts, stable_id, to_part_line
from pytest_attn.session.launchers import Shard, shard_of
from pytest_attn.session.machines import Machines
from pytest_attn.session.settings import Settings
from pytest_attn.version import __version__

#: under which a worker of xdist tells the controller what it knows, and gets its part
OF_WORKER = "attn_part"
_SKIPS_FILES = "lfplugin-collwrapper"  # of --lf: leaves out files by this machine's cache, while it collects


class Part:
    """The part of this run: a plugin of pytest that divides the tests, and counts those that have run."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        """Find out which part this is. Raises pytest.UsageError where nobody says, or an option does not go with it."""
        self._config, self._settings = config, settings
        told = getattr(config, "workerinput", {}).get(OF_WORKER, settings.shard or "auto")
        try:
            self.shard: Shard = shard_of(told, os.environ)
        except ValueError as error:
            raise pytest.UsageError(f"--attn-shard: {error}") from None
        try:
            self._known = _known(config.rootpath, settings.shard_durations)
        except ValueError as error:
            raise pytest.UsageError(f"--attn-shard-durations: {error}") from None
        _refuse_what_does_not_divide(config, settings)
        if wrapper := config.pluginmanager.get_plugin(_SKIPS_FILES):
            config.pluginmanager.unregister(wrapper)  # then --lf chooses among this part's tests, once they are collected
        self._divided: PartFacts = {}
        self._ran: set[str] = set()
        self._uncollected: set[str] = set()

    # -- dividing ----------------------------------------------------------------------------------------------------------

    def keep_mine(self, items: list[pytest.Item]) -> None:
        """Deselect the tests of the other parts."""
        from pytest_attn.session.costs import costs_of, names_of
        from pytest_attn.session.splitting import assign, digest

        stable = {item: stable_id(item.nodeid) for item in items}
        named = names_of(items, stable)
        found = assign(costs_of(named, self._known, self._settings.fuzz), self.shard.parts)
        mine = [item for item in items if found[stable[item]] == self.shard.number]
        others = [item for item in items if found[stable[item]] != self.shard.number]
        self._divided = {
            "collection": digest(named),
            "split": digest(f"{name} {number}" for name, number in found.items()),
            "total": len(items),
            "tests": len(mine),
        }
        if others:
            self._config.hook.pytest_deselected(items=others)
            items[:] = mine

    def settle(self, items: list[pytest.Item], machines: Machines | None) -> None:
        """Take note of what is left and, where attention is tested, of the device; tell the controller of this worker."""
        self._divided["tests"] = len({item.nodeid for item in items})
        if machines is not None:
            with suppress(Exception):  # of a device that is not there: the tests say so
                machine = machines.machine()
                # the model of a hosted runner's CPU is another each time, and says nothing
                self._divided["device"] = machine.kind if machine.kind == "cpu" else machine.name
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            output[OF_WORKER] = dict(self._divided)

    # -- what it says ------------------------------------------------------------------------------------------------------

    def begun(self) -> str:
        """Return the first line of the file of records."""
        return to_part_line({"state": "begun", **self._identity()})

    def ended(self, exit_code: int) -> str:
        """Return its last line. A run that was killed has none."""
        facts: PartFacts = {"state": "ended", **self._identity(), "total": 0, "tests": 0, **self._divided}
        return to_part_line({**facts, "ran": len(self._ran), "uncollected": len(self._uncollected), "exit": exit_code})

    def _identity(self) -> PartFacts:
        options = self._settings.as_options()
        return {
            "number": self.shard.number,
            "parts": self.shard.parts,
            "commit": commit_of(self._config.rootpath),
            "options": re.sub(r"--attn-device=\S+ ?", "", options).strip(),
            "pytest_attn": __version__,
            "python": platform.python_version(),
        }

    # -- hooks -------------------------------------------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        """Say which part this is, ready to paste, and who says so."""
        return f"attn: --attn-shard={self.shard}" + (f" (from {self.shard.source})" if self.shard.source else "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count tests that have run to their end, and those that ended their worker."""
        if report.when not in ("setup", "call"):
            self._ran.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count what could not be collected: what it has is in no part."""
        if report.failed:
            self._uncollected.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Learn from a worker of xdist how the tests were divided."""
        self._divided = getattr(node, "workeroutput", {}).get(OF_WORKER) or self._divided

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Count a part without tests as a success where other parts have some."""
        is_empty = self._divided.get("total") and not self._divided["tests"]
        if is_empty and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how much of everything this part was."""
        has_run = not self._config.option.collectonly and not self._settings.list_only
        if self._divided and has_run and self._config.get_verbosity() >= 0:
            mine, total = self._divided["tests"], self._divided["total"]
            terminalreporter.write_line(
                f"--attn-shard: part {self.shard.number} of {self.shard.parts} ran {len(self._ran):,} of its {mine:,} tests;"
                f" {total:,} in all, divided as {self._divided['split']}"
            )


def _known(rootpath: Path, path: str) -> dict[str, int]:
    if not path:
        return {}
    from pytest_attn.session.costs import known_durations

    return known_durations(rootpath / path)


def _refuse_what_does_not_divide(config: pytest.Config, settings: Settings) -> None:
    """Raise pytest.UsageError for options whose answer is about all tests together, or about this machine's last run."""
    if any(config.getoption(name, False) for name in ("stepwise", "stepwise_skip", "stepwise_reset")):
        raise pytest.UsageError(
            "--attn-shard: --stepwise goes on where this machine stopped, so hosts would divide different tests; leave it out"
        )
    if settings.mutants:
        raise pytest.UsageError("--attn-shard: --attn-mutants counts over all tests together; leave one of them out")
    if settings.update_baselines is not None:
        raise pytest.UsageError(
            "--attn-shard: --attn-update-baselines records on one machine, in one file; leave one of them out"
        )


def commit_of(folder: Path) -> str:
    """Return the commit of a repository, and where files differ from it, a mark that says how; "" where git has none."""
    commit = _git(folder, "rev-parse", "HEAD").decode().strip()
    changes = _git(folder, "diff", "HEAD") if commit else b""
    return f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def _git(folder: Path, *words: str) -> bytes:
    """Return what git prints, nothing where it fails or takes too long."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return b"" if done.returncode else done.stdout
