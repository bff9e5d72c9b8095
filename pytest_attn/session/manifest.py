"""The fate of each test, for the last line of the .jsonl file of --attn-output: collected, left out, run.

By this line merge proves a run whole. pytest-split, -k of a script, or any other plugin may take tests away to divide
them, so all are noted before that. Under xdist each worker notes what is collected, and the controller what ran.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.reports.records import Record, RecordWriter, is_judged
from pytest_attn.reports.runs import LAST_FAILED, RunFacts, stable_id, to_run_line
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.repository import commit_of, imported_of, own_digest, sources_of, top_of
from pytest_attn.version import __version__

if TYPE_CHECKING:
    from pytest_attn.session.devices import Machines
    from pytest_attn.session.options import Settings

#: under which a worker of xdist hands over what it has noted
_NOTED = "attn_manifest"
#: pytest's own plugins that leave out what a user does not choose: -k and -m, --deselect
_CHOOSERS = ("mark", "main")
#: of --lf, once it leaves out what did not fail before while it collects
_NARROWS = "lfplugin-collskip"
#: what becomes of a test: it is to run here, one skipped test stands for it, or somebody took it away
_FATES = ("selected", "absent", "left_out", "unchosen")


class Manifest:
    """A plugin of pytest that notes what becomes of each test."""

    def __init__(self, config: pytest.Config, settings: Settings, machines: Machines) -> None:
        self._config, self._machines, self._seed = config, machines, settings.seed
        self._options = re.sub(r"--attn-device=\S+ ?", "", settings.as_options()).strip()
        self._top = top_of(config.rootpath)
        self._commit = "" if hasattr(config, "workerinput") else commit_of(config.rootpath)
        self.collected: list[pytest.Item] = []  # all tests, before any is taken away
        self.absent: list[pytest.Item] = []  # tests that one skipped test stands for, as this machine lacks their backend
        self._noted: dict[str, Any] = {"collected": 0, "device": "", "is_narrowed": False, "imported": {}}
        self._noted |= {name: [] for name in _FATES}
        self._ran: set[str] = set()
        self._skipped: set[str] = set()
        self._uncollected: set[str] = set()

    def closing_line(self, exit_code: int, records: Sequence[Record], lines: RecordWriter) -> str:
        """Return what the run says of itself when it is over. lines: what has written its records."""
        noted = self._noted
        ran = self._ran.union(noted["absent"])
        judged = {stable_id(one["test"]) for one in records if is_judged(one) and one["verdict"] != Verdict.SKIPPED}
        group, splits = (self._config.getoption(name, None) for name in ("group", "splits"))  # of pytest-split
        facts: RunFacts = {
            "command": shlex.join(["pytest", *map(str, self._config.invocation_params.args)]),
            "choice": self._choice(),
            "group": f"{group}/{splits}" if group and splits else "",
            "commit": self._commit,
            "sources": sources_of(self._top, noted["imported"]) if self._top else {},
            "options": self._options,
            "seed": self._seed,
            "pytest_attn": __version__,
            "plugin": own_digest(),
            "python": platform.python_version(),
            "device": noted["device"],
            "records": len(records),
            "uncollected": len(self._uncollected),
            "exit": exit_code,
            "collected": noted["collected"],
            "selected": len(ran.union(noted["selected"])),
            "judged": len(judged),
            "skipped": len(self._skipped.union(noted["absent"])),
            "ran": frozenset(ran),
            "unfinished": frozenset(noted["selected"]).difference(ran),
            "left_out": frozenset(noted["left_out"]),
            "unchosen": frozenset(noted["unchosen"]),
            "digest": "",
        }
        return to_run_line(facts, lines.written)

    def _choice(self) -> str:
        option = self._config.option
        given = {"-k": [option.keyword], "-m": [option.markexpr], "--deselect": option.deselect or []}
        words = [f"{flag} {shlex.quote(text)}" for flag, texts in given.items() for text in texts if text]
        return " ".join([*words, *([LAST_FAILED] if self._noted["is_narrowed"] else [])])

    # -- hooks -------------------------------------------------------------------------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which tests are left, and who took the others away."""
        kept = {stable_id(item.nodeid) for item in (*session.items, *self.absent)}
        removed = [item for item in self.collected if stable_id(item.nodeid) not in kept]
        chosen = set(left_in(self._config, removed))
        self._noted |= {
            "is_narrowed": self._config.pluginmanager.has_plugin(_NARROWS),
            "collected": len({stable_id(item.nodeid) for item in self.collected}),
            "selected": sorted(kept),
            "absent": [stable_id(item.nodeid) for item in self.absent],
            "left_out": [stable_id(item.nodeid) for item in removed if item in chosen],
            "unchosen": [stable_id(item.nodeid) for item in removed if item not in chosen],
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count tests that have run to their end, those that ended their worker, and those that were skipped."""
        if report.when not in ("setup", "call"):
            self._ran.add(stable_id(report.nodeid))
        elif report.skipped and not hasattr(report, "wasxfail"):
            self._skipped.add(stable_id(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count what could not be collected: nobody knows its tests."""
        if report.failed:
            self._uncollected.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Note the device, if a test has asked for it, and what was imported; hand over what a worker of xdist knows."""
        if machine := self._machines.known_default:
            # the model of a hosted runner's CPU is another each time, and says nothing
            self._noted["device"] = machine.kind if machine.kind == "cpu" else machine.name
        if self._top:
            self._noted["imported"] |= imported_of(self._top)
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            output[_NOTED] = self._noted

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of xdist has noted; not every worker has asked for the device."""
        if noted := getattr(node, "workeroutput", {}).get(_NOTED):
            imported = {**self._noted["imported"], **noted["imported"]}
            self._noted = {**noted, "device": noted["device"] or self._noted["device"], "imported": imported}


def left_in(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return those of some tests that -k, -m and --deselect leave in, as pytest's own plugins say."""

    class Asking:
        """The configuration for these plugins, which report to nobody what they leave out."""

        hook = SimpleNamespace(pytest_deselected=lambda items: None)

        def __getattr__(self, name: str) -> Any:
            return getattr(config, name)

    found = list(items)
    for name in _CHOOSERS:
        config.pluginmanager.get_plugin(name).pytest_collection_modifyitems(items=found, config=Asking())  # type: ignore[union-attr]
    return found
