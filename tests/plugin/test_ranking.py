"""--attn-rank and --attn-tune as a user sees them. Times come from a clock of the tests, one for each backend's name."""

import itertools
import json

import pytest
from fakes.timed import CLOCK

#: times by the names of backends
CLOCK_BY_NAME = """
import json
TIMES = json.loads(os.environ.get("TIMES", "{}"))

def measure(self, work, workload, subject, mode=None, seconds=None):
    place = "/fresh" if WorkerContext.of_this_process() is not None else ""
    p50 = TIMES.get(subject + place, TIMES.get(subject, 100)) * 1e-6
    interval = median_interval([p50 * 0.999, p50 * 1.001] * 3)
    return Latency(workload, subject, work.direction, p50, interval, samples=(p50,) * 6, blocks=6, mode="host", calls=1,
                   l2="warm", launch=p50, anchors={"compute": 1e-3, "memory": 2e-3}, memory=1000, threads=1)

Stopwatch.measure = measure
"""
BACKENDS = """
from torch.nn.functional import scaled_dot_product_attention as sdpa

def fast(q, k, v, workload):
    return sdpa(q, k, v)

def bad(q, k, v, workload):
    return 1.1 * sdpa(q, k, v)

def tiled(q, k, v, workload, BLOCK=0, warps=4):
    out = sdpa(q, k, v)
    return 1.1 * out if BLOCK == 48 else out

def pytest_attn_backends(registry):
    registry.add_function("fast", fast)
    registry.add_function("same", fast)
    registry.add_function("slow", fast)
    registry.add_function("bad", bad)
    registry.add_function("refused", fast, unsupported_because=lambda workload: ["takes nothing"])
    registry.add_function("tiled", tiled, configurations={"BLOCK": [16, 32, 48]})
    registry.add_function("broken", fast, configurations=lambda workload: 1 / 0)
"""
TEST = """
import pytest
from pytest_attn import Workload

@pytest.mark.attention(Workload(32, heads=2, head_dim=32, name="tiny"), device="cpu", backward=True)
def test_both(attn, attn_backend):
    attn.measure(attn_backend)
    if attn.backend.name != "slow":
        attn.measure(attn_backend, backward=True)

@pytest.mark.attention("smoke-full", device="cpu", dtypes="fp32", backends=("fast", "slow", "tiled"))
def test_named(attn, attn_backend):
    attn.check(attn_backend)
"""
NAMES = "--attn-backends=fast,same,slow,bad,refused,int8_dynamic"
TIMES = {"fast": 100, "same": 102, "slow": 200, "int8_dynamic": 50}


@pytest.fixture
def project(pytester, monkeypatch, clock_of_a_conftest):
    """A folder with backends, a test and a clock; returns a function that runs pytest there."""
    pytester.makeconftest(CLOCK + CLOCK_BY_NAME + BACKENDS)
    pytester.makepyfile(test_it=TEST)

    def run(*args, **times):
        monkeypatch.setenv("TIMES", json.dumps({**TIMES, **times}))
        start = pytester.runpytest_subprocess if "-n" in args else pytester.runpytest_inprocess
        return start("-p", "no:cacheprovider", *args)

    return run


def section(result, title):
    start = next(i for i, line in enumerate(result.outlines) if f" {title} " in line)
    return list(itertools.takewhile(lambda line: not line.startswith("==="), result.outlines[start + 1 :]))


def test_backends_are_ranked_printed_and_written(project, pytester):
    result = project(NAMES, f"--attn-rank-to={pytester.path / 'best'}")
    lines = section(result, "attention rank")
    assert [line.split() for line in lines[:4]] == [
        ["workload", "fastest", "p50", "+-", "ahead", "ties", "front"],
        ["tiny", "fwd", "fast", "100.00", "us", "0.1%", "x2.00", "same", "-"],
        ["tiny", "bwd", "fast", "100.00", "us", "0.1%", "-", "same", "-"],
        lines[3].split(),
    ]
    assert lines[3].startswith("wrong         bad: out z ")
    assert any(line.startswith("skipped       refused: takes nothing") for line in lines)
    assert any(line.startswith("skipped       int8_dynamic: ") for line in lines)
    assert max(len(line) for line in lines if "written to" not in line) <= 80
    found = {}
    exec((pytester.path / "best.py").read_text(), found)
    assert (found["FORWARD"], found["BACKWARD"], found["TRAINING"]) == ({"tiny": "fast"}, {"tiny": "fast"}, {})
    content = json.loads((pytester.path / "best.json").read_text())
    assert [(line["workload"], line["direction"], line["exact"]["ties"]) for line in content["lines"]] == [
        ("tiny", "forward", ["same"]),
        ("tiny", "backward", ["same"]),
    ]
    assert not list(pytester.path.glob("*.part"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attn-tune=nobody"], "--attn-tune: unknown backend 'nobody'"),
        (["--attn-tune=tiled@BLOCK=16"], "'tiled@BLOCK=16' is one configuration; name the backend alone: tiled"),
        (["--attn-tune=flex", "--attn-backends=math"], "--attn-tune: chooses the backends itself; leave out --attn-backends"),
        (["--attn-tune=fast"], "backend 'fast' declares no configurations; those that do: flex, "),
        (["--attn-backends=tiled@WIDTH=16"], "--attn-backends: backend 'tiled' has no option 'WIDTH'; known: BLOCK"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_ranked_is_refused_before_anything_runs(pytester, monkeypatch, arguments, words):
    pytester.makeconftest(BACKENDS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()


TUNED = {"tiled": 100, "tiled@BLOCK=16": 60, "tiled@BLOCK=32": 180, "tiled@BLOCK=48": 10}


def test_configurations_are_checked_timed_and_written(project, pytester):
    result = project("--attn-tune=tiled", f"--attn-rank-to={pytester.path / 'tuned'}", **TUNED)
    result.assert_outcomes(passed=6, failed=2)  # of both tests, the configuration that is wrong
    lines = section(result, "attention rank")
    assert [line.split() for line in lines[:3]] == [
        ["workload", "configuration", "p50", "+-", "gain", "ties", "front"],
        ["tiny", "fwd", "BLOCK=16", "60.00", "us", "0.1%", "x1.67", "-", "-"],
        ["tiny", "bwd", "BLOCK=16", "60.00", "us", "0.1%", "x1.67", "-", "-"],
    ]
    assert lines[3].startswith("wrong         BLOCK=48: out z ")
    assert [line for line in result.outlines if "no baseline" in line and "@" in line] == []
    found = {}
    exec((pytester.path / "tuned.py").read_text(), found)
    assert (found["BACKEND"], found["FORWARD"]) == ("tiled", {"tiny": {"BLOCK": 16}})
    (command,) = {
        line.split("reproduce", 1)[1].strip() for line in result.outlines if "reproduce" in line and "test_both" in line
    }
    assert command.endswith("--attn-backends=tiled@BLOCK=48 --attn-device=cpu")
    arguments = command.replace("'", "").split()[1:]
    again = project(*arguments, **TUNED)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["E * mismatch: out of tiled@BLOCK=48: *"])
    named = project("--attn-backends=tiled@BLOCK=16", "-k", "test_named")  # whose marker names the backend
    named.assert_outcomes(passed=1, deselected=1)


def test_a_backend_that_cannot_list_its_configurations_says_so(project):
    result = project("--attn-tune=broken")
    result.stdout.fnmatch_lines(["*--attn-tune=broken: no configurations for tiny: ZeroDivisionError: division by zero*"])
