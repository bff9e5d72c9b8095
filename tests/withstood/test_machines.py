"""Odd machines and odd options: a right, a wrong and a right kernel are told apart, and what was asked for is written."""

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from xml.etree import ElementTree

import attempts
import pytest

from pytest_attn.reports.records import read_records

TEST = """
import pytest
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

@pytest.mark.attention(Workload(32, heads=2, head_dim=32), device="cpu")
@pytest.mark.parametrize("factor", [1, 1.5, 1.0])
def test_kernel(attn, factor):
    attn.check(lambda q, k, v: sdpa(q, k, v) * factor)
"""
#: runs each test in a process forked for it, which hands back its reports, as --forked of pytest-forked does
FORKS = """
import os, pickle
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item):
    hook, config, (end, start) = item.ihook, item.config, os.pipe()
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if not (child := os.fork()):
        with open(start, "wb") as file:
            reports = runtestprotocol(item, log=False)
            pickle.dump([hook.pytest_report_to_serializable(config=config, report=one) for one in reports], file)
        os._exit(0)
    os.close(start)
    with open(end, "rb") as file: reports = pickle.load(file)
    os.waitpid(child, 0)
    for one in reports:
        hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=config, data=one))
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""
ALL = ["passed", "mismatch", "passed"]


class Row(NamedTuple):
    """What is odd. environment: None for what is not set. again: whether the options are given to a second run."""

    options: str = ""
    environment: Mapping[str, str | None] = MappingProxyType({})
    flags: str = ""
    expected: list[str] = ALL
    again: bool = False
    on_terminal: bool = False
    prefix: str = ""
    status: int = 1
    conftest: str = ""


#: each in an interpreter of its own
MACHINES = {
    "no HOME": Row(environment={"HOME": None}),
    "read-only HOME": Row(environment={"HOME": "/proc"}),
    "no TMPDIR": Row(environment={"TMPDIR": None}),
    "TMPDIR missing": Row(environment={"TMPDIR": "/no/such"}),
    "LANG=C": Row(environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "COLUMNS=20": Row(environment={"COLUMNS": "20"}),
    "COLUMNS=1": Row(environment={"COLUMNS": "1"}),
    "NO_COLOR": Row(environment={"NO_COLOR": "1"}),
    "FORCE_COLOR": Row(environment={"FORCE_COLOR": "1"}),
    "a terminal": Row(on_terminal=True),
    "no git": Row(environment={"PATH": "/no/such"}),
    "another user": Row(prefix="setpriv --reuid=65534 --regid=65534 --clear-groups"),
    "-O": Row(flags="-O"),
    "-OO": Row(flags="-OO"),
    "-W error": Row(flags="-W error"),
    "-X dev": Row(flags="-X dev"),
}
#: each forked from a process that has torch
OPTIONS = {
    **{f"--import-mode={mode}": Row(f"--import-mode={mode}") for mode in ("prepend", "append", "importlib")},
    **{
        f"-p no:{name}": Row(f"-p no:{name}")
        for name in (
            *("cacheprovider", "terminal", "benchmark", "xdist", "junitxml", "faulthandler", "logging", "warnings"),
            *("doctest", "unittest", "tmpdir", "pastebin", "stepwise", "setuponly", "unraisableexception"),
        )
    },
    **{
        f"-n 2 --dist {dist}": Row(f"-n 2 --dist {dist}")
        for dist in ("load", "loadscope", "loadfile", "loadgroup", "worksteal")
    },
    "-n 2 --dist each": Row("-n 2 --dist each", expected=ALL * 2),
    "-n 0": Row("-n 0"),
    "forked": Row(conftest=FORKS),
    "forked -n 2": Row("-n 2", conftest=FORKS),
    "--co": Row("--co", expected=[], status=0),
    "--lf": Row("--lf", expected=["mismatch"], again=True),
    "--ff": Row("--ff", expected=["mismatch", "passed", "passed"], again=True),
    "--sw": Row("--sw", expected=[*ALL[:2], "failed"], status=2),
    "-x": Row("-x", expected=ALL[:2]),
    **{option: Row(option) for option in ("--durations=0", "--junitxml=run.xml", "-q", "-vv", "-s", "--tb=no", "--tb=native")},
    **{f"--capture={way}": Row(f"--capture={way}") for way in ("sys", "tee-sys")},
}
PATHS = {"spaces": "a b  c", "umlauts": "Größe", "no UTF-8": b"f\xff", "a newline": "a\nb", "quotes": 'it\'s "a" `b`'}
WRITTEN = ("--attn-output=run.jsonl", "--attn-output=run.md")


def judged(folder, row, status, said):
    """Assert that each kernel got its verdict, and that the outputs are there."""
    assert "INTERNALERROR" not in said
    assert status == row.status, said
    assert sorted(one["verdict"] for one in read_records(folder / "run.jsonl")) == sorted(row.expected)
    if row.expected:
        assert ("1 wrong" if len(row.expected) < 6 else "2 wrong") in (folder / "run.md").read_text()
    if (folder / "run.xml").exists():
        assert ElementTree.parse(folder / "run.xml").getroot()[0].attrib["tests"] == "3"
    assert (attempts.left_in(folder), attempts.left_by_processes(folder, 5)) == ([], [])


@pytest.mark.one_in(17)
@pytest.mark.parametrize("name", MACHINES)
def test_a_machine(name, withstood):
    row = MACHINES[name]
    if row.prefix and (os.getuid() or shutil.which("setpriv") is None):
        pytest.skip("only root may be another user, by setpriv")
    with attempts.own_folder() as folder:
        (folder / "tmp").mkdir()
        (folder / "test_it.py").write_text(TEST)
        environment = {
            **os.environ,
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        } | row.environment
        command = [*row.prefix.split(), sys.executable, *row.flags.split(), "-m", "pytest", *attempts.ALWAYS, *WRITTEN]
        (folder / "tmp").chmod(0o777)
        with (folder / "output").open("wb") as output:
            main, terminal = pty.openpty()
            done = subprocess.run(
                command,
                cwd=folder,
                env={key: value for key, value in environment.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=terminal if row.on_terminal else output,
                stderr=subprocess.STDOUT,
                check=False,
            )
            os.close(main)
            os.close(terminal)
        judged(folder, row, done.returncode, (folder / "output").read_text(errors="replace"))
    withstood("odd machine", name, "right and wrong kernels", "told apart, written")


@pytest.mark.one_in(50)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(runs, name, withstood):
    row = OPTIONS[name]
    with attempts.own_folder() as folder:
        (folder / "test_it.py").write_text(TEST)
        if row.conftest:
            (folder / "conftest.py").write_text(row.conftest)
        options = [(), row.options.split()] if row.again else [row.options.split()]
        for some in options:
            status = runs.status(runs.start(folder, *WRITTEN, *some, always=attempts.ALWAYS[2:]))
        judged(folder, row, status, (folder / "output").read_text(errors="replace"))
    kind = re.split(r"[:=]|(?<=--dist) ", name)[0]
    withstood("options", f"`{kind}`", "right and wrong kernels", "told apart, written")


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in PATHS for options in ("", "-n 2") if (name, options) != ("no UTF-8", "-n 2")],
)  # which execnet cannot send
def test_a_path(runs, name, options, withstood):
    with attempts.own_folder() as base:
        folder = base / os.fsdecode(PATHS[name])
        folder.mkdir()
        (folder / "test_it.py").write_text(TEST)
        status = runs.status(runs.start(folder, *WRITTEN, *options.split()))
        judged(folder, Row(), status, (folder / "output").read_text(errors="replace"))
    withstood("paths", name, "right and wrong kernels, `-n 2` as well", "told apart, written")
