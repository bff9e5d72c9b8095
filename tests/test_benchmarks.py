"""Each script under benchmarks/ lives: it takes its arguments, and runs on its smallest input as far as a CPU can."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_attn.workloads import distributions

pytestmark = pytest.mark.usefixtures("no_worker")
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))

#: the smallest input of each that a CPU takes
SMALLEST = {
    "calibrate": "--device cpu --backends math --seeds 0 --seconds 5 --distributions randn --dtypes bfloat16",
    "cheats": "mean_of_v --length 64",
    "long": "--device cpu --tokens 512 --sample 128 --no-strides",
    "mutation": "--kernels mutants,honest --groups smoke --names one-tile --judges ours",
    "profiles": "one-tile --groups smoke,features-cached",
    "tf32": "--device cpu --groups smoke,features",
    "diagnosis": "--classes masks --cases 1 --names none",
    "features": "",
    "honest_models": "--device cpu --calls 1 --seconds 1",
    "isolated": "--kernels plain",
    "models": "--device cpu --small --seconds 1 --depth 1",
    "ranks": "",
    "cost": "--device cpu --small",
    "model_faults": "--only llama --faults window",
    "startup": "--cases 10 --runs 1",
    "wait": "--rows suite --pytest --attn-backends=math --attn-workloads=smoke-full",
}

#: of each rule in peers.py: slowdowns of 100 us that it lets pass and accuses
RULES = {
    "pytest-attn": (1.015, 1.03),
    "fixed 5 %": (1.049, 1.051),
    "nvbench robust": (1.004, 1.006),
    "tokenspeed 6 %, 0.5 us": (1.059, 1.061),
    "tokenspeed 10 %, 0.5 us": (1.099, 1.101),
    "vLLM golden +-8 %": (1.08, 1.09),
    "vLLM golden +-10 %": (1.11, 1.12),
    "Helion 10 %": (1.099, 1.101),
    "pytest-benchmark median:5%": (1.049, 1.051),
    "asv": (1.09, 1.11),
}


def imported(script, monkeypatch):
    if script == "model_faults":
        pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for known in (distributions.DISTRIBUTIONS, distributions._DRAWN_BY):  # to which a script may add its own
        for name in ("rand", "uniform-10"):
            monkeypatch.setitem(known, name, None)
    return runpy.run_path(str(FOLDER / f"{script}.py"), run_name="script")


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_takes_its_arguments(script, monkeypatch, capsys):
    main = imported(script, monkeypatch)["main"]
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, "usage:" in capsys.readouterr().out) == (0, True)


def test_they_are_few():
    assert len(SCRIPTS) <= 18
    assert {*SMALLEST, "noise", "peers"} == {*SCRIPTS}, "each has its smallest input"


def printed(script, *arguments):
    command = [sys.executable, str(FOLDER / f"{script}.py"), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow("a process for each, and torch compiles")
@pytest.mark.parametrize("script", SMALLEST)
def test_it_runs_on_its_smallest_input(script):
    if script == "model_faults":
        pytest.importorskip("transformers")
    assert printed(script, *SMALLEST[script].split())


@pytest.fixture
def seen(monkeypatch):
    """Return a function: a rule of peers.py, and a case of one suite that fourteen processes have timed."""
    peers = imported("peers", monkeypatch)

    def of(rule, factor, p50=1e-4, clock=1.0, spread=0.0):
        samples = [p50 * (1 + spread * (number % 2)) for number in range(20)]
        case = {"p50": p50, "samples": samples, "anchors": {"compute": 1e-4, "memory": 1e-4}, "disturbances": []}
        now = {**case, "anchors": {"compute": 1e-4 * clock, "memory": 1e-4}}
        runs = [{"cases": {"one": {"plain": case, "now": now, "flops": 10**9, "bytes": 10**6}}} for _ in range(14)]
        series = {"device": "NVIDIA H200", "runs": runs}
        (suite,) = peers["suites"](series, 1, 1)
        return peers["RULES"][rule](peers["Seen"](series, suite, 0, "now", factor))

    return of


@pytest.mark.parametrize(("rule", "limits"), RULES.items())
def test_a_rule_accuses_from_where_its_source_says(seen, rule, limits):
    assert [seen(rule, factor) for factor in (1.0, *limits)] == [False, False, True]


def test_rules_know_what_their_sources_know(seen):
    assert not seen("nvbench robust", 1.05, clock=1.05), "as slow in time, no slower in cycles"
    assert not seen("nvbench robust", 1.05, spread=0.1), "intervals overlap"
    assert not seen("tokenspeed 6 %, 0.5 us", 1.08, p50=5e-6), "by 0.4 us"
    assert not seen("tokenspeed 6 %, 0.5 us", 1.2, spread=0.2), "samples scatter"
    assert seen("vLLM golden +-8 %", 0.9), "faster fails too"


@pytest.mark.slow("times six kernels in a new process")
def test_the_series_of_a_process_is_resampled(tmp_path):
    file = tmp_path / "series.json"
    assert "1 new processes" in printed("noise", "--out", file, "--processes", 1, "--device", "cpu", "--plain")
    series = json.loads(file.read_text())
    for case in series["runs"][0]["cases"].values():
        case["plain"]["disturbances"] = []
    file.write_text(json.dumps({**series, "runs": series["runs"] * 20}))
    found = printed("peers", file, "--cases", 6, "--suites", 2)
    assert len(re.findall(r"^.{28} +0\.0% \(< 77\.6%\) +0\.00%", found, re.M)) == len(RULES), found
    again = [{**run, "condition": "quiet", "visit": visit} for run in series["runs"] * 17 for visit in range(2)]
    file.write_text(json.dumps({**series, "runs": again}))
    found = printed("peers", file, "--across", "--suites", 3)
    assert "x 1.0: of 3 suites 0 have a case that regresses, 3 one that passes" in found
    assert "x 1.3: of 3 suites 3 have a case that regresses, 0 one that passes" in found
