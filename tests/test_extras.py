"""Each extra in an environment of its own: it has what the extra declares, and what that needs, and nothing else.

Nothing is downloaded: the environment links to the libraries that are installed beside these tests.
"""

import json
import os
import subprocess
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
TEST = """
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa

@pytest.mark.attention("smoke-full", device="cpu")
def test_right(attn):
    attn.check(sdpa)

def without_scale(q, k, v):
    return sdpa(q, k, v, scale=1.0)

@pytest.mark.attention("smoke-half", device="cpu")
def test_wrong(attn):
    attn.check(without_scale)
"""


PLAIN = """
def test_plain():
    pass
"""
UNIMPORTED = """
import pytest

@pytest.mark.attention("smoke-full", device="cpu")
def test_right(attn):
    pass
"""
MEASURED = """
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa

@pytest.mark.attention("smoke-full", device="cpu")
def test_fast(attn):
    samples = attn.measure(sdpa).samples
    assert len(samples) > 1
    print("samples:", len(samples))
"""


def needed_by(name, *extras):
    """The distributions that a package and its extras need, themselves and all that these need, by name."""
    found, waiting = {}, [(name, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found[name, extra] = distribution(name)
        for text in found[name, extra].requires or ():
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                waiting += [(one.name, ""), *((one.name, asked) for asked in one.extras)]
    return {name: one for (name, _), one in found.items() if name != "pytest-attn"}


@pytest.fixture
def installed(tmp_path):
    """Return a function that makes the environment of some extras, and returns one that runs its python."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "test_it.py").write_text(TEST)

    def install(*extras):
        venv.create(tmp_path / "venv", clear=True)
        (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        libraries = Path(sysconfig.get_path("purelib"))
        for one in needed_by("pytest-attn", *extras).values():
            for top in {file.parts[0] for file in one.files} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(libraries / top)
        own = next(file for file in distribution("pytest-attn").files if file.match("*.dist-info/entry_points.txt"))
        (site / own.parts[0]).symlink_to(libraries / own.parts[0])
        (site / "pytest_attn").symlink_to(ROOT / "pytest_attn")
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_XDIST", "PYTHONPATH"))}

        def run(*arguments):
            command = [tmp_path / "venv" / "bin" / "python", *arguments]
            return subprocess.run(command, cwd=project, env=alone, capture_output=True, text=True, check=False)

        return run

    return install


def test_without_torch_other_tests_are_undisturbed_and_a_case_says_what_to_install(installed, tmp_path):
    run, project = installed(), tmp_path / "project"
    assert "No module named 'torch'" in run("-c", "import torch").stderr
    assert "No module named 'pytest_benchmark'" in run("-c", "import pytest_benchmark").stderr
    (project / "test_it.py").write_text(PLAIN)
    plain = run("-m", "pytest", "--no-header", "-W", "error")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "attn" not in plain.stdout
    assert "torch" not in plain.stdout
    (project / "test_it.py").write_text(UNIMPORTED)
    result = run("-m", "pytest", "--no-header", "-W", "error")
    assert result.returncode == 2, result.stdout
    assert result.stdout.count('pytest-attn needs torch, which is not installed; pip install "pytest-attn[torch]"') == 1
    assert "Traceback" not in result.stdout + result.stderr
    called = run("-c", "import pytest_attn; pytest_attn.check")
    assert called.stderr.splitlines()[-1].endswith('which is not installed; pip install "pytest-attn[torch]"')


@pytest.mark.slow("starts an environment")
def test_without_pytest_benchmark_a_kernel_is_timed_and_with_it_each_sample_reaches_it(installed, tmp_path):
    (tmp_path / "project" / "test_it.py").write_text(MEASURED)
    result = installed("torch")("-m", "pytest", "-s")
    assert result.returncode == 0, result.stdout + result.stderr
    result = installed("torch", "benchmark")("-m", "pytest", "-s", "--benchmark-json=out.json")
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = json.loads((tmp_path / "project" / "out.json").read_text())["benchmarks"]
    assert f"samples: {row['stats']['rounds']}\n" in result.stdout


@pytest.mark.slow("starts an environment")
def test_with_torch_alone_the_plugin_judges_and_says_what_each_option_needs(installed, tmp_path):
    run = installed("torch")
    assert "ModuleNotFoundError" in run("-c", "import numpy").stderr
    result = run("-m", "pytest", "--attn-output=run.jsonl", "--attn-output=run.md")
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    assert all((tmp_path / "project" / name).stat().st_size for name in ("run.jsonl", "run.md"))
    for option, extra in (
        ("--attn-save-failures=saved", "failures"),
        ("--attn-fuzz=2", "fuzz"),
        ("--attn-output=a.html", "report"),
    ):
        assert f'pip install "pytest-attn[{extra}]"' in run("-m", "pytest", option).stderr


@pytest.mark.slow("starts an environment")
def test_the_extra_failures_saves_tensors_that_fail_again(installed, tmp_path):
    run = installed("torch", "failures")
    result = run("-m", "pytest", "--attn-save-failures=saved", "-k", "wrong")
    (script,) = (tmp_path / "project" / "saved").glob("*/repro.py")
    assert "1 failed" in result.stdout, result.stdout + result.stderr
    again = run(script)
    assert again.returncode == 1
    assert "the softmax scale is missing" in again.stderr, again.stderr
