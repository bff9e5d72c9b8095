"""Every story can be told twice: in this process, and through an xdist worker in another.

The second takes seconds each, so only those that are marked `twice` always are. `make test-all` tells all of them, and those
that are marked slow.
"""

import functools
import getpass
import json
import os
import pkgutil
import platform
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_benchmark.utils
from fakes.benchmark import CONFTEST
from fakes.timed import CLOCK, KERNEL
from lasting_server import lasting_servers

import pytest_attn
from pytest_attn.backends import library
from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.registry import Registry
from pytest_attn.cases import latency as recording
from pytest_attn.latency import disturbance, gate, protocol
from pytest_attn.processes import fork_server, launcher
from pytest_attn.processes import worker as this_process
from pytest_attn.processes.channel import Channel
from pytest_attn.session import worker_pool

_architecture = functools.cache(platform.architecture)

# Runs in this process forget the modules that they loaded. torch's C extensions cannot be loaded again, and a second
# Workload class would not be an instance of the first: so everything is loaded here, once.
for module in pkgutil.walk_packages(pytest_attn.__path__, "pytest_attn."):
    if ".suite." not in module.name:
        import_module(module.name)
for name in (registry := Registry()).names:
    registry[name].unavailable_because(machine_of(resolve_device("cpu")))

#: what the server of a story imports ahead: not all of torch and altair that these tests have loaded
AHEAD = fork_server.modules_ahead(name for name in sys.modules if name.startswith("pytest_attn.") and "html" not in name)


@pytest.fixture(scope="session")
def _serving():
    """Return what starts the server of a run: for ranks and isolated functions the one that an earlier story has started.

    New processes that time need one that was started in their folder.
    """
    with lasting_servers() as lasting:
        yield lambda like, modules: (fork_server.ForkServer if modules == AHEAD else lasting)(like, modules)


@pytest.fixture(autouse=True)
def _soon(no_worker, monkeypatch):
    """Let a story that times by the real clock neither time for long nor wait for those who share its core."""
    monkeypatch.setitem(protocol.SECONDS, "cpu", 0.1)
    monkeypatch.setattr(disturbance, "_MOST_LOST_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def _own_processes(request, monkeypatch):
    """Let the processes that a story starts wait for nothing that is not theirs.

    Hypothesis is imported by its plugin at the end of every run; the lock of a device, in the folder of temporary files, may
    be another story's. In each run pytest-benchmark starts git, hg and file, to say what is known here.
    """
    if "pytester" in request.fixturenames:
        pytester = request.getfixturevalue("pytester")  # which forgets the options of these tests' own run
        if request.path.name != "test_fuzz.py":
            monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
        compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled))
        monkeypatch.setattr(launcher, "ForkServer", request.getfixturevalue("_serving"))
        for owner in ("pytest_attn.guests.ranks.pool", "pytest_attn.session.worker_pool"):
            if find_spec("pytest_attn.guests") or "guests" not in owner:
                monkeypatch.setattr(f"{owner}.modules_ahead", lambda: AHEAD)
        monkeypatch.setattr(platform, "architecture", _architecture)
        monkeypatch.setattr(pytest_benchmark.utils, "get_project_name", lambda: Path.cwd().name)  # as where no repository is
        imported = library._folder()  # so that what can be imported is tried once, and not by each story
        monkeypatch.setattr(library, "_folder", lambda: imported)
        own = str(pytester.path.parent / f"{pytester.path.name}-tmp")
        os.mkdir(own)
        monkeypatch.setenv("TMPDIR", own)
        monkeypatch.setattr(tempfile, "tempdir", own)


@pytest.fixture(params=["serial", "xdist"])
def run(request, pytester):
    """Run pytest on the files of `pytester` and return the result."""

    def run_it(*args):
        if request.param == "serial":
            return pytester.runpytest_inprocess("-p", "no:cacheprovider", *args)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "1", *args)

    run_it.is_serial = request.param == "serial"
    return run_it


def module_of(body, marker='Workload(32, heads=2, head_dim=32), device="cpu"', fixtures="attn", before="", after=""):
    """Return a module with a test of one kernel: its body, the marker's arguments, the fixtures it takes."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"""
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from pytest_attn import Workload, Window, Pages
{before}

@pytest.mark.attention({marker})
def test_kernel({fixtures}):
{lines}

{after}"""


@pytest.fixture
def kernel_test(pytester):
    """Write a test of one kernel."""
    return lambda *args, **kwargs: pytester.makepyfile(module_of(*args, **kwargs))


@pytest.fixture
def tell(run, pytester):
    """Tell stories of one test each in one run, and assert how each ends and what it, or the summary, says of it.

    A story, by its name: the body of the test, its outcome, parts of lines that are said (fnmatch), and what else `module_of`
    takes.
    """

    def together(stories, *options, **other_outcomes):
        stories = {name: (*story, *((), {})[len(story) - 2 :]) for name, story in stories.items()}
        pytester.makepyfile(
            **{f"test_{number}": module_of(body, **how) for number, (body, _, _, how) in enumerate(stories.values())}
        )
        result = run("-rs", *options)
        shown = result.stdout.str()
        reports = result.reprec.getreports("pytest_runtest_logreport") if run.is_serial else []
        texts = [(one.nodeid.partition(".py")[0], one.outcome, one.longreprtext) for one in reports]
        of_all = set(shown.splitlines()).difference(*(text.splitlines() for *_, text in texts))
        found = {}
        for number, (name, (_, outcome, said, _)) in enumerate(stories.items()):
            own = [(outcome, text) for test, outcome, text in texts if test == f"test_{number}"]
            lines = of_all.union(*(text.splitlines() for _, text in own))
            unsaid = [words for words in said if not any(fnmatch(line, f"*{words}*") for line in lines)]
            ended = outcome in [ended for ended, _ in own] and (outcome != "passed" or len({end for end, _ in own}) == 1)
            if unsaid or (own and not ended):
                found[name] = [end for end, _ in own], unsaid
        assert found == {}
        if not run.is_serial:
            other_outcomes.pop("deselected", None)  # which xdist does not count
        result.assert_outcomes(**{**Counter(outcome for _, outcome, *_ in stories.values()), **other_outcomes})
        assert "INTERNALERROR" not in shown
        return result

    return together


#: what the conftest of a story changes in the package
CHANGED = (
    *((protocol.Stopwatch, name) for name in ("measure", "__init__")),
    *((recording, "FEWEST_RUNS"), (recording, "fresh_runs")),
)


@pytest.fixture
def _fresh_processes(pytester, monkeypatch):
    """Let the new processes of a story be runs in this one, which take a tenth of the time.

    They are given the command line, the environment, the folder and the channel of a process, and what they import of the
    story is imported anew.
    """

    def run(self, command, seconds, is_forked):
        own = [
            name
            for name, module in sys.modules.items()
            if (getattr(module, "__file__", "") or "").startswith(str(pytester.path))
        ]
        mine, theirs = Channel.pair()
        mine.send(**command.told)
        with monkeypatch.context() as patch:
            patch.setattr(this_process, "_this", this_process.Worker(theirs))
            for owner, name in CHANGED:  # which a conftest changes there, and not in the process that waits
                patch.setattr(owner, name, getattr(owner, name))
            for name in own:
                patch.delitem(sys.modules, name)
            for name in os.environ.keys() - command.environment.keys():
                patch.delenv(name)
            for name, value in command.environment.items():
                patch.setenv(name, value)
            patch.chdir(command.folder)
            done = pytester.runpytest_inprocess(*command.arguments)
        theirs.close()
        messages = [one for one in iter(mine.recv, None) if one != this_process.FINISHED]
        return launcher.Ended(done.ret, f"{done.stdout}\n{done.stderr}", messages, is_finished=True)

    monkeypatch.setattr(worker_pool.WorkerPool, "run", run)


@pytest.fixture
def clock_of_a_conftest(monkeypatch, _fresh_processes):
    """Put back what a story's conftest changes in the package, so that times are what it says."""
    policies = dict(gate.POLICIES)
    for owner, name in CHANGED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    protocol.stopwatch_of.cache_clear()
    yield
    gate.POLICIES.update(policies)
    protocol.stopwatch_of.cache_clear()


@pytest.fixture
def project(pytester, monkeypatch, clock_of_a_conftest):
    """A folder with a kernel's test and a clock; returns a function that runs pytest there with another time."""
    pytester.makeconftest(CLOCK)
    pytester.makepyfile(test_mine=KERNEL)
    for name in ("TIMES", "ANCHOR", "MEMORY", "HOT", "HOT_IN", "MODES"):
        monkeypatch.delenv(name, raising=False)

    def run(*args, in_process=True, **environment):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            start = pytester.runpytest_inprocess if in_process and "-n" not in args else pytester.runpytest_subprocess
            return start("-p", "no:cacheprovider", *args)

    return run


#: the text of each file that was recorded, by its name
_RECORDED: dict[str, str] = {}


@pytest.fixture
def recorded(project, pytester):
    """The same, after baselines were recorded at 100 us."""
    folder = pytester.path / "baselines"
    if not _RECORDED:  # once, for all stories
        project("--attn-update-baselines=first recording").assert_outcomes(passed=1)
        _RECORDED.update({path.name: path.read_text() for path in folder.iterdir()})
    folder.mkdir(exist_ok=True)
    for name, text in _RECORDED.items():
        (folder / name).write_text(text)
    return project


@pytest.fixture
def baseline_file(pytester):
    """Return a function that finds the one file of baselines."""

    def find():
        (path,) = (pytester.path / "baselines").iterdir()
        return path

    return find


#: of pytest-benchmark 4
UNCLOSED = "ignore:unclosed file .*out.json:ResourceWarning"


@pytest.fixture
def bench(pytester, monkeypatch):
    """Write a test file, and run it without pytest-attn itself; a warning is an error, and so is one in the summary."""
    pytester.makeini(f"[pytest]\nfilterwarnings =\n    error\n    {UNCLOSED}\naddopts = --strict-markers\n")
    pytester.makeconftest(CONFTEST)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # machine_info's own tests give it one

    def run(*args, source=None, in_process=True, rc=0, **outcomes):
        if source is not None:
            pytester.makepyfile(source)
        start = pytester.runpytest_inprocess if in_process else pytester.runpytest_subprocess
        result = start("-p", "no:attn", "-p", "no:cacheprovider", *args)
        assert result.ret == rc
        result.assert_outcomes(**{"warnings": 0, "deselected": 0, **outcomes})
        return result

    return run


@pytest.fixture
def report(bench, pytester):
    """Run a test file with --benchmark-json, and return what it says, by the test's name."""

    def run(source, *args, **outcomes):
        bench("--benchmark-json=out.json", *args, source=source, **outcomes)
        return {b["name"]: b for b in json.loads((pytester.path / "out.json").read_text())["benchmarks"]}

    return run
