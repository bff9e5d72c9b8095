"""Other plugins, profilers and debuggers change no verdict; and this plugin changes nothing of suites that have no kernel.

`make neighbors` installs the plugins and runs this file, which has a name that no other run collects.
"""

import os
import pstats
import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from xml.etree import ElementTree

import attempts
import pytest
from fakes.timed import CLOCK, FORKED

from pytest_attn.reports.records import read_records

INSTALLED = Path(sys.prefix) / "neighbors"
STORY = """
import os, threading
import pytest
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

pytestmark = pytest.mark.attention(Workload(32, heads=2, head_dim=32), device="cpu")

def right(q, k, v):
    assert threading.current_thread() is threading.main_thread()
    return sdpa(q, k, v)

def slower(q, k, v): return sdpa(q, k, v)
def disturbed(q, k, v): return sdpa(q, k, v)
def wrong(q, k, v): return sdpa(q, k, v) * 1.5
def declines(q, k, v): raise NotImplementedError("no")

def test_right(attn): attn.check(right)
def test_wrong(attn): attn.check(wrong)
def test_declined(attn): attn.check(declines)
def test_invariants(attn): attn.check_invariants(right)
def test_broken(attn): attn.check_invariants(wrong)
def test_measured(attn): attn.measure(right)
def test_slower(attn, monkeypatch):
    monkeypatch.setenv("TIMES", os.environ["SLOWER"])
    attn.measure(slower)
def test_disturbed(attn, monkeypatch):
    monkeypatch.setenv("TIMES", os.environ["SLOWER"])
    monkeypatch.setenv("HOT", os.environ["DISTURBED"])
    attn.measure(disturbed)
"""
VERDICTS = {
    "right": ["passed"],
    "wrong": ["mismatch"],
    "declined": ["skipped"],
    "invariants": ["held"],
    "broken": ["broken"],
    "measured": ["passed", "passed"],
    "slower": ["passed", "regressed"],
    "disturbed": ["passed", "inconclusive"],
}
FAILS = ("wrong", "broken", "slower")


class Neighbor(NamedTuple):
    """What is asked of a neighbor: options, and a test that uses it, with its verdicts.

    times: how often it runs a test; times_failed: one that fails.
    """

    options: str = ""
    test: str = ""
    verdicts: tuple[str, ...] = ()
    times: int = 1
    times_failed: int = 1


NEIGHBORS = {
    "pytest-randomly": Neighbor("--randomly-seed=7"),
    "pytest-rerunfailures": Neighbor("--reruns=2", times_failed=3),
    "pytest-timeout": Neighbor("--timeout=300"),
    "pytest-cov": Neighbor("--cov=. --cov-branch --cov-report=xml"),
    "pytest-sugar": Neighbor("--force-sugar"),
    "pytest-asyncio": Neighbor("--asyncio-mode=auto", "async def test_used(attn): attn.check(right)", ("passed",)),
    "pytest-order": Neighbor("", "@pytest.mark.order(0)\ndef test_used(attn): attn.check(right)", ("passed",)),
    "pytest-repeat": Neighbor("--count=2", times=2, times_failed=2),
    "pytest-run-parallel": Neighbor("--parallel-threads=2"),
    "pytest-split": Neighbor("--splits=1 --group=1"),
    "pytest-html": Neighbor("--html=page.html --self-contained-html"),
    "pytest-json-report": Neighbor("--json-report"),
    "flaky": Neighbor("--force-flaky --max-runs=2"),  # reports the last run alone
    "pytest-subtests": Neighbor(
        "",
        "def test_used(attn, subtests):\n    for one in (right, wrong):\n        with subtests.test(): attn.check(one)",
        ("passed", "mismatch"),
    ),
    "allure-pytest": Neighbor("--alluredir=allure"),
    "syrupy": Neighbor(
        "--snapshot-update", "def test_used(attn, snapshot): assert attn.check(right).passed == snapshot", ("passed",)
    ),
    "pytest-mock": Neighbor("", "def test_used(attn, mocker): attn.check(mocker.Mock(side_effect=right))", ("passed",)),
    "anyio": Neighbor("", "@pytest.mark.anyio\nasync def test_used(attn): attn.check(right)", ("passed",)),
}


@pytest.fixture(scope="session")
def runs():
    made = attempts.Runs(INSTALLED / "bin" / "python")
    yield made
    made.close()


def without(*names):
    """Return the options that leave out all neighbors but the named, wherever they are installed."""
    (folder,) = INSTALLED.glob("lib/python*/site-packages")
    left_out = (one for one in metadata.distributions(path=[str(folder), *sys.path]) if one.name in {*NEIGHBORS} - {*names})
    entries = {entry.name for one in left_out for entry in one.entry_points if entry.group == "pytest11"}
    return [option for name in sorted(entries) for option in ("-p", f"no:{name}")]


def told(folder):
    """Return the verdicts of each test."""
    found = {}
    for one in read_records(folder / "run.jsonl"):
        name = one["test"].partition("::test_")[2].partition("[")[0]
        found.setdefault(name, []).append(one["verdict"])
    return found


#: times that new processes see as well
TIMES = MappingProxyType({"SLOWER": "200,200", "DISTURBED": "hot"})
RECORDED = MappingProxyType({"SLOWER": "100", "DISTURBED": ""})


@pytest.fixture(scope="module")
def story(runs):
    """Return a folder with the story and its baselines, recorded without neighbors."""
    with attempts.own_folder() as folder:
        (folder / "conftest.py").write_text(CLOCK + FORKED)
        (folder / "test_story.py").write_text(STORY)
        recording = ("--attn-update-baselines=why", "-k", "measured or slower or disturbed")
        assert runs.status(runs.start(folder, *without(), *recording, **RECORDED)) == 0, (folder / "output").read_text()
        yield folder


@pytest.fixture
def run(runs, story):
    """Run the story with neighbors, a further test and options; return its status, verdicts and output."""
    with attempts.own_folder() as folder:

        def run(names, *options, test="", conftest="", before=(), module="pytest"):
            for one, more in (("conftest.py", conftest), ("test_story.py", test)):
                (folder / one).write_text((story / one).read_text() + more)
            (folder / "baselines").symlink_to(story / "baselines")
            (folder / ".pdbrc").write_text("continue\n")  # whenever a debugger stops
            command = [*before, *without(*names), "--attn-output=run.jsonl", *options]
            status = runs.status(runs.start(folder, *command, module=module, **TIMES))
            return status, told(folder), (folder / "output").read_text()

        yield run
        assert attempts.left_by_processes(folder, 5) == []


@pytest.mark.parametrize("name", ["no neighbor", *NEIGHBORS])
def test_alone(run, name, withstood):
    one = NEIGHBORS.get(name, Neighbor())
    status, verdicts, said = run([name], *one.options.split(), test=one.test)
    expected = {test: given * (one.times_failed if test in FAILS else one.times) for test, given in VERDICTS.items()}
    if one.test:
        expected["used"] = [*one.verdicts]
    assert (status, verdicts) == (1, expected), said
    withstood("neighbors", "alone", "eight kernels", "no verdict changed")


#: of two that run failing tests again the first does
TOGETHER = [name for name in NEIGHBORS if name != "flaky"]


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "-n 2"])
def test_together(run, workers, withstood):
    options = [option for name in TOGETHER for option in NEIGHBORS[name].options.split()]
    used = {str(number): NEIGHBORS[name] for number, name in enumerate(TOGETHER) if NEIGHBORS[name].test}
    tests = [one.test.replace("test_used", f"test_{number}") for number, one in used.items()]
    status, verdicts, said = run(TOGETHER, *options, *workers, test="\n".join(tests))
    assert "INTERNALERROR" not in said
    expected = {**VERDICTS, **{number: [*one.verdicts] for number, one in used.items()}}
    if workers:
        expected |= {name: ["passed", "untimed"] for name in ("measured", "slower", "disturbed")}
    are_wrong = {name for name, given in expected.items() if {"mismatch", "broken", "regressed"} & {*given}}
    times = {name: 2 * (3 if name in are_wrong else 1) for name in expected}
    assert status == 1
    assert {name: sorted(given) for name, given in verdicts.items()} == {
        name: sorted(given * times[name]) for name, given in expected.items()
    }
    withstood("neighbors", "together", "eight kernels", "no verdict changed")


#: a kernel that is wrong, broken, slower the first time, and right after it
FLAKY = """
calls = []
def kernel(q, k, v): return (wrong if len(calls) == 1 else right)(q, k, v)
def test_slower(attn, monkeypatch):
    calls.append(1)
    {ask}
"""
AGAIN = {
    "check": ("attn.check(kernel)", ["mismatch", "passed"]),
    "check_invariants": ("attn.check_invariants(kernel)", ["broken", "held"]),
    "measure": (
        'monkeypatch.setenv("TIMES", os.environ["SLOWER"] if len(calls) == 1 else "100")\n    attn.measure(slower)',
        ["passed", "regressed", "passed", "passed"],
    ),
}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "-n 2"])
@pytest.mark.parametrize("ask", AGAIN)
@pytest.mark.parametrize("name", ["pytest-rerunfailures", "flaky"])
def test_a_rerun_judges_anew(run, name, ask, workers, withstood):
    body, expected = AGAIN[ask]
    if name == "flaky":  # which tells of the first time itself, and reports the last alone
        expected = expected[len(expected) // 2 :]
    if workers and ask == "measure":  # not timed
        return
    options = *NEIGHBORS[name].options.split(), "-k", "slower", *workers
    status, verdicts, said = run([name], *options, test=FLAKY.format(ask=body))
    assert (status, verdicts) == (0, {"slower": expected}), said
    assert ("1 rerun" if name == "pytest-rerunfailures" else "failed (1 runs remaining out of 2)") in said
    withstood("neighbors", "rerun", "eight kernels", "no verdict changed")


TAKES_5_MS = """
import time
def five(q, k, v):
    time.sleep(0.005)
    return sdpa(q, k, v)
def test_used(attn): attn.measure(five)
"""


def test_a_repetition_is_timed_each_time(runs, withstood):
    with attempts.own_folder() as folder:
        (folder / "test_it.py").write_text(STORY + TAKES_5_MS)
        options = (*without("pytest-repeat"), "--count=3", "-k", "used", "--attn-output=run.jsonl")
        assert runs.status(runs.start(folder, *options)) == 0, (folder / "output").read_text()
        times = [one["latency"]["p50"] for one in read_records(folder / "run.jsonl") if one["question"] == "latency"]
        assert len(times) == 3
        assert all(0.005 < one < 0.01 for one in times)
    withstood("neighbors", "repeated", "eight kernels", "no verdict changed")


SLEEPS = """
import time
@pytest.mark.timeout(2{method})
def test_used(attn):
    def never(q, k, v):
        {how}
    attn.{ask}(never)
def test_after(attn): attn.check(right)
"""
NEVER = {
    "sleeps": "time.sleep(60)",
    "loops": "while True: pass",
    "catches": "while True:\n            try: time.sleep(60)\n            except Exception: pass",
}


@pytest.mark.parametrize("how", NEVER)
@pytest.mark.parametrize("ask", ["check", "check_invariants", "measure"])
def test_a_timeout_ends_its_test_alone(run, ask, how, withstood):
    test = SLEEPS.format(method="", how=NEVER[how], ask=ask)
    status, verdicts, said = run(["pytest-timeout"], "-k", "used or after or wrong", test=test)
    assert status == 1, said
    assert {**verdicts, "used": 0} == {"wrong": ["mismatch"], "after": ["passed"], "used": 0}, said
    assert "Timeout" in said
    withstood("neighbors", "timeouts", "eight kernels", "no verdict changed")


def test_a_timeout_that_ends_a_worker(run, withstood):
    test = SLEEPS.format(method=", method='thread'", how=NEVER["sleeps"], ask="check")
    status, verdicts, said = run(["pytest-timeout"], "-n", "1", "-k", "used or after or wrong", test=test)
    assert (status, verdicts) == (1, {"wrong": ["mismatch"], "used": ["no result"], "after": ["passed"]}), said
    withstood("neighbors", "timeouts", "eight kernels", "no verdict changed")


TRACED = """
import sys, threading
def tracer(frame, event, argument): return tracer
sys.{set}(tracer)
threading.{set}(tracer)
"""
PROFILED = """
import pytest
@pytest.fixture(autouse=True)
def profiled():
    import torch
    with torch.profiler.profile(): yield
"""
#: what comes before pytest's options, a conftest, options, and the module that is run
PROFILERS = {
    "python -m cProfile": {"module": "cProfile", "before": ("-o", "profile", "-m", "pytest")},
    "python -m pdb": {"module": "pdb", "before": ("-m", "pytest")},
    "python -m trace": {
        "module": "trace",
        "before": ("--count", "--coverdir=counted", f"--ignore-dir={sys.base_prefix}:{sys.prefix}", "--module", "pytest"),
    },
    "coverage run": {"module": "coverage", "before": ("run", "--branch", "-m", "pytest")},
    "sys.settrace": {"conftest": TRACED.format(set="settrace")},
    "sys.setprofile": {"conftest": TRACED.format(set="setprofile")},
    "torch.profiler": {"conftest": PROFILED},
    "tracemalloc": {"conftest": "import tracemalloc\ntracemalloc.start(9)"},
    "--trace": {"options": ("--trace",)},
    "--pdb": {"options": ("--pdb",)},
    "faulthandler_timeout": {"options": ("-o", "faulthandler_timeout=1")},
    "coverage in Python": {
        "names": ["pytest-cov"],
        "options": ("--cov=.",),
        "conftest": "import os\nos.environ['COVERAGE_CORE'] = 'pytrace'",
    },
}


#: do not hand on an exit status, whatever they run
ENDS_WELL = ("python -m cProfile", "python -m pdb", "python -m trace")


@pytest.mark.parametrize("name", PROFILERS)
def test_a_profiler(run, name, withstood):
    row = {**PROFILERS[name]}
    status, verdicts, said = run(row.pop("names", []), *row.pop("options", ()), **row)
    assert verdicts == VERDICTS, said
    assert status == (0 if name in ENDS_WELL else 1), said
    withstood("neighbors", "profilers", "eight kernels", "no verdict changed")


#: public suites, of the sources that `make neighbors` has downloaded: the folder of their code, and their tests
SUITES = {"click": ("src", "tests"), "more-itertools": (".", "tests"), "packaging": ("src", "tests")}


#: lines that name plugins; pytest-benchmark's stands where a test takes `benchmark`
HEADER = ("plugins: ", "benchmark: ")


class Suite(NamedTuple):
    """What a run of a public suite has left: how many functions it called, outcomes, and all that was said beside the time."""

    calls: int
    outcomes: list[tuple[str, str]]
    said: list[str]


@pytest.mark.parametrize("name", SUITES)
def test_a_public_suite(tmp_path, name, withstood):
    """With the plugin a suite without kernels ends as without it, and calls at most 1 % more functions.

    These are counted, as seconds of the same run differ by more than that on shared cores.
    """
    (archive,) = INSTALLED.glob(f"sources/{name.replace('-', '_')}-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    alone, beside = (suite(root, *SUITES[name], *options) for options in (("-p", "no:attn"), ()))
    assert beside[1:] == alone[1:]
    ratio = beside.calls / alone.calls
    print(f"{name}: {ratio:.4f} of {alone.calls:,} calls")
    assert ratio <= 1.01
    tests, happened = f"{len(alone.outcomes):,} tests, calls x {ratio:.4f}", "outcomes, warnings as without"
    withstood("beside", archive.name.removesuffix(".tar.gz"), tests, happened)


def suite(root, code, tests, *options):
    """Run a suite; return what it has left."""
    profiled = [INSTALLED / "bin" / "python", "-m", "cProfile", "-o", "run.prof", "-m"]
    done = subprocess.run(
        [*profiled, "pytest", tests, *without(), "-p", "no:cacheprovider", "--junitxml=run.xml", *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{code}:{Path(__file__).parents[2]}", "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    cases = ElementTree.parse(root / "run.xml").iter("testcase")
    outcomes = [(f"{one.get('classname')}.{one.get('name')}", one[0].tag if len(one) else "passed") for one in cases]
    lines = (line for line in done.stdout.splitlines() if not line.startswith(HEADER))
    said = [re.sub(r"\d+\.\d+s.*|0x\w+|^=+", "", line) for line in lines]
    return Suite(pstats.Stats(str(root / "run.prof")).total_calls, outcomes, said)
