"""A run that ranks: the kernels of `--attn-tune`, and what is printed and written at its end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from pytest_attn.backends.configured import joined, split
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current
from pytest_attn.guests.ranking.ranking import rank
from pytest_attn.guests.ranking.ranking_output import nothing_timed, rank_summary, to_json, to_python
from pytest_attn.reports.lines import room
from pytest_attn.reports.merging import add_on_records
from pytest_attn.reports.records import Record
from pytest_attn.session.devices import Machines
from pytest_attn.session.kinds import CaseParameter
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.options import Settings
from pytest_attn.session.output import print_section, write_whole
from pytest_attn.session.pytest_versions import verbosity_of
from pytest_attn.session.registrations import Registrations
from pytest_attn.session.selection import SelectedKernels
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.workload import Workload


class Configurations(SelectedKernels):
    """The backend of --attn-tune, as it is and under each of its configurations."""

    are_configurations = True

    @classmethod
    def require(cls, config: pytest.Config, settings: Settings, registrations: Registrations) -> None:
        if config.getoption("attn_backends") is not None:
            raise pytest.UsageError("--attn-tune: chooses the backends itself; leave out --attn-backends")
        try:
            registrations.registry.require_tunable(settings.more["tune"])
        except ValueError as error:
            raise pytest.UsageError(f"--attn-tune: {error}") from None

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
        super().__init__(settings, registrations, machines)
        self._name = registrations.registry.canonical(settings.more["tune"])

    def cases(self, mark: AttentionMark, takes_backend: bool) -> list[CaseParameter]:
        plain = self.plain_cases(mark, takes_backend=False)
        if not takes_backend:
            return plain
        found = [CaseParameter(one.workload, name) for one in plain for name in self._tuned(mark, one.workload)]
        return [case for case in found if mark.backends is None or split(case.backend or "")[0] in mark.backends]

    def _tuned(self, mark: AttentionMark, workload: Workload) -> list[str]:
        """Return the backend, then its configurations for a workload; it alone where it cannot take that.

        Raises ValueError, with its words, where the backend cannot say which configurations it has.
        """
        registry, name, machine = self.registrations.registry, self._name, self.machines.machine(mark.device)
        try:
            if registry[name].obstacle(workload, machine, mark.backward):
                return [name]  # the case is skipped with its reason
            with quiet(), current(machine.device):
                options = registry[name.partition("+")[0]].configurations(workload, machine, mark.backward)
            return list(dict.fromkeys([name, *(joined(name, one) for one in options)]))
        except Exception as error:
            raise ValueError(
                f"--attn-tune={name}: no configurations for {workload.id}: {type(error).__name__}: {error}"
            ) from error


def report_ranking(session: AttentionSession, config: pytest.Config, reporter: Any) -> None:
    """Print the section, or one sentence where nothing was timed, and write the files that were asked for."""
    if session.worker is not None:
        return
    tuned = session.settings.more["tune"]
    ranking = rank(session.results.records, session.registrations.registry.canonical(tuned) if tuned else "")
    if not ranking.timed and not ranking.lines:
        reporter.write_line(nothing_timed(ranking))
    else:
        print_section(reporter, rank_summary(ranking, verbosity_of(config) > 0, room(reporter.isatty)), "attention rank")
        if session.settings.gpu_per_worker and config.getoption("dist", "no") not in ("no", "loadgroup"):
            reporter.write_line(
                "rank: workers with GPUs of their own shared the cases of one workload;"
                " --dist loadgroup keeps them on one GPU",
                yellow=True,
            )
    stem = session.settings.more["rank_to"]
    if not stem:
        return
    if not ranking.timed:
        reporter.write_line(f"--attn-rank-to: nothing to write to {stem}.json and {stem}.py", yellow=True)
        return
    write_whole(session, f"{stem}.json", lambda: to_json(ranking), reporter, "--attn-rank-to")
    write_whole(session, f"{stem}.py", lambda: to_python(ranking), reporter, "--attn-rank-to")


def add_rank(commands: Any) -> None:
    """Declare the command of `python -m pytest_attn`."""
    add_on_records(commands, "rank", "Print which backend is fastest and right, as --attn-rank does.", _print_ranking)


def _print_ranking(records: Sequence[Record], given: argparse.Namespace) -> None:
    for text, _ in rank_summary(rank(records), verbose=False, width=room(sys.stdout.isatty())):
        print(text)
