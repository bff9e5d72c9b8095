"""What was tried, and what happened: the table of docs/results/withstood.md, which a run with ATTN_WITHSTOOD=1 writes.

A run of some of the tests replaces the rows that it has, and leaves the others.
"""

import datetime
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import attempts
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "results" / "withstood.md"
_tried = []


@pytest.fixture(scope="session")
def runs():
    """A process that forks runs."""
    made = attempts.Runs()
    yield made
    made.close()


@pytest.fixture
def withstood(request):
    """Note what was tried, of which row, on what, and what happened, once a test has seen it."""

    def note(row, what, on, happened):
        request.node.user_properties.append(("withstood", (row, what, on, happened)))

    return note


def pytest_runtest_logreport(report):
    if report.when == "call":
        _tried.extend(value for name, value in report.user_properties if name == "withstood" and report.passed)
    if report.failed:
        _tried.append(("open", report.nodeid.rpartition("/")[2], "-", "failed"))


def pytest_sessionfinish(session):
    if os.environ.get("ATTN_WITHSTOOD") and _tried:
        before = _rows(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
        before.pop("open", None)
        PAGE.write_text(page({**before, **rows(_tried)}, session.config.rootpath), encoding="utf-8")


def rows(tried):
    """Return the rows of a table: by their names what was tried, how often, on what, and what happened."""
    found = {}
    for row in dict.fromkeys(one[0] for one in tried):
        mine = [one for one in tried if one[0] == row]
        happened = Counter(ended for *_, ended in mine)
        ends = (f"{ended} ({times})" if len(happened) > 1 else ended for ended, times in happened.items())
        whats, ons = (", ".join(dict.fromkeys(one[column] for one in mine)) for column in (1, 2))
        found[row] = whats, len(mine), ons, "; ".join(ends)
    return found


def _rows(text):
    lines = (re.fullmatch(r"\| (.+?): (.+) \| ([\d,]+) \| (.+) \| (.+) \|", line) for line in text.splitlines())
    return {row[1]: (row[2], int(row[3].replace(",", "")), row[4], row[5]) for row in lines if row}


def page(table, root):
    """Return the text of the page."""
    times = sum(row[1] for name, row in table.items() if name != "open")
    failed = table.get("open", (0, 0))[1]
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    lines = [
        "# What it withstands",
        "",
        "`ATTN_WITHSTOOD=1 ATTN_TESTS=all pytest tests/withstood` writes this page, and `make neighbors`;",
        f"{today}, commit {commit.stdout.strip()}, two shared CPU cores. {times:,} attempts, {failed} open.",
        "",
        "| what was done | how often | on what | what happened |",
        "| --- | ---: | --- | --- |",
        *(f"| {name}: {what} | {often:,} | {on} | {happened} |" for name, (what, often, on, happened) in table.items()),
    ]
    return "\n".join(lines) + "\n"
