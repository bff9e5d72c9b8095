"""A core without guests: the package without their folder judges, measures and passes the tests that are not about them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_attn.version import __version__

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa
from pytest_attn import Workload

mark = pytest.mark.attention(Workload(64, heads=2), device="cpu")

@mark
def test_right(attn): attn.check(sdpa)
@mark
def test_wrong(attn): attn.check(lambda q, k, v: sdpa(q, k, v) * 1.1)
@mark
def test_invariants(attn): attn.check_invariants(sdpa)
@mark
def test_measured(attn): attn.measure(sdpa)
@mark
def test_method_of_a_guest(attn): attn.check_module(None)
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Return a folder with what is installed where no guest is, and the environment variables under which it is imported."""
    out = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "pytest_attn", out / "pytest_attn", ignore=shutil.ignore_patterns("guests"))
    info = out / f"pytest_attn-{__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pytest-attn\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text("[pytest11]\nattn = pytest_attn.plugin\n")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return out, {**own, "PYTHONPATH": str(out)}


def test_it_judges_and_measures_and_says_what_it_has_not(core, tmp_path):
    (tmp_path / "test_mine.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=core[1], cwd=tmp_path)
    assert "2 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "out is 1.1 times exact attention" in done.stdout
    assert "AttributeError: attn has no attribute 'check_module'" in done.stdout


#: tests that look at the files of the repository, which has guests
OF_THE_REPOSITORY = (
    *("benchmarks", "core_alone", "dependencies", "docs", "docstrings", "extras", "prose", "repository", "wheel"),
    "tables_of_docs",
)
#: what else of the repository tests read
PAGES = ("README", "CONTRIBUTING", "CHANGELOG", "AGENTS")
READ = (
    "action.yml",
    "conftest.py",
    "docs",
    "baselines",
    "benchmarks",
    "Makefile",
    "pyproject.toml",
    *(f"{one}.md" for one in PAGES),
)


@pytest.mark.slow("some minutes on two cores")
def test_its_tests_pass(core):
    shutil.copytree(ROOT / "tests", core[0] / "tests", ignore=shutil.ignore_patterns("guests", "__pycache__"))
    for name in READ:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, core[0] / name)
    left_out = [f"--ignore-glob=**/test_{name}.py" for name in OF_THE_REPOSITORY]
    command = [sys.executable, "-m", "pytest", "tests", "-n", "2", "--dist", "worksteal", "-q", *left_out]
    environment = {name: value for name, value in core[1].items() if name != "ATTN_TESTS"}  # without the slow ones
    done = subprocess.run(command, capture_output=True, text=True, cwd=core[0], env=environment)
    assert done.returncode == 0, done.stdout[-5000:]
