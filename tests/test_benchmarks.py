"""Each script under benchmarks/ lives: it takes its arguments, and runs on its smallest input as far as a CPU can."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_attn.workloads import distributions

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
#: what others import, and no script
MODULES = ("rules",)
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in MODULES)

#: the smallest input of each that a CPU takes; the others read the file of noise.py, or need libraries, a GPU or minutes
SMALLEST = {
    "calibrate": "--device cpu --backends math --seeds 0 --seconds 5 --distributions randn --dtypes bfloat16",
    "cheats": "mean_of_v --length 64",
    "long": "--device cpu --tokens 512 --sample 128 --no-strides",
    "mutation": "--kernels mutants,honest --groups smoke --names none",
    "profiles": "one-tile --groups smoke,features-cached",
    "tf32": "--device cpu --groups smoke,features",
    "diagnosis": "--classes masks --cases 1 --names none",
    "features": "",
    "honest_models": "--device cpu --calls 1 --seconds 1",
    "isolated": "--kernels plain",
    "models": "--device cpu --small --seconds 1 --depth 1",
    "ranks": "",
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


@pytest.mark.slow("a process for each, and torch compiles")
@pytest.mark.parametrize("script", SMALLEST)
def test_it_runs_on_its_smallest_input(script):
    command = [sys.executable, str(FOLDER / f"{script}.py"), *SMALLEST[script].split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
