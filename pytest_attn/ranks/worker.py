"""pytest in a rank: it collects and runs the one test that the judge names, again and again, and reports nothing itself.

`-p pytest_attn.ranks.worker`, which ranks/launching.py puts on the command line of each rank. PYTEST_DONT_REWRITE: a forked
rank has it imported before pytest would rewrite its assertions, and where warnings are errors that would end it.
"""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol

from pytest_attn.ranks.rank import Rank

#: the rank that this process is; not there in any other
RANK = pytest.StashKey[Rank]()


def rank_of(config: pytest.Config) -> Rank | None:
    """Return the rank that this process is, None where it is none."""
    return config.stash.get(RANK, None)


def pytest_configure(config: pytest.Config) -> None:
    """Meet the judge and the other ranks."""
    rank = config.stash[RANK] = Rank()
    rank.join_group()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> object:
    """Collect nothing yet."""
    del session
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Run what the judge names."""
    rank = session.config.stash[RANK]
    while (name := rank.next_case()) is not None:
        rank.end_case(*_run(session, rank, name))
    return True


def _run(session: pytest.Session, rank: Rank, name: str) -> tuple[str, str]:
    """Run one test; return how it ended, and what is to be told of that."""
    try:
        items = session.perform_collect([name])
    except pytest.UsageError as error:
        return "failed", f"it cannot be collected: {error}"
    if len(items) != 1:
        return "failed", f"it cannot be collected: {len(items)} tests have this name"
    for report in runtestprotocol(items[0], log=False, nextitem=None):
        is_expected = report.when == "call" and rank.is_over
        if report.outcome != "passed" and not is_expected:
            return report.outcome, report.longreprtext
    return "passed", ""
