"""A downstream repository: the wheel, built and installed into an environment of its own, runs marked tests.

That environment sees the libraries of this one, but not its plugin: to install torch once more takes a minute.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOWNSTREAM = """
import pytest
from torch.nn.functional import scaled_dot_product_attention
from pytest_attn import Workload

@pytest.mark.attention("smoke-full", Workload(40, heads=2, head_dim=32, mask="causal"), backward=True, precision="flash2")
def test_backends(attn, attn_backend):
    attn.check(attn_backend)

@pytest.mark.attention("smoke-full")
def test_wrong(attn):
    attn.check(lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=1.0))
"""

#: what others pin of what pytest-attn needs, by who does; and a torch, which stands for each of theirs
PINS = {
    "PyTorch's CI": ("pytest==7.3.2", "pytest-xdist==3.3.1", "packaging==24.0"),
    "NATTEN": ("pytest==7.4.4",),
    "Transformer Engine": ("pytest==8.2.1",),
    "vLLM": ("pytest==8.3.5", "pluggy==1.5.0", "iniconfig==2.0.0", "packaging==24.2"),
    "transformers": ("pytest==8.4.2",),
}
TORCH = "2.7.1+cu128"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    release = {**os.environ, "REPOSITORY_URL": "https://example.org/attention/pytest-attn"}
    subprocess.run(command, check=True, capture_output=True, env=release)
    return next(out.glob("*.whl"))


def metadata_of(wheel):
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    return zipfile.ZipFile(wheel).read(name).decode()


def test_readme_in_the_wheel_of_a_release_links_to_files_of_the_repository(wheel):
    links = re.findall(r"\]\(([^)#]+)", metadata_of(wheel))
    here = [link.removeprefix("https://example.org/attention/pytest-attn/") for link in links]
    assert len(here) > 10
    assert [link for link in here if not re.match(r"(blob|raw)/main/", link)] == []
    assert [link for link in here if not (ROOT / link.partition("/main/")[2]).exists()] == []


def test_the_wheel_has_types_suite_and_entry_point(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"pytest_attn/py.typed", "pytest_attn/suite/test_correctness.py"} <= set(names)
    page = {"page.html", "style.css", *(path.name for path in (ROOT / "pytest_attn/reports/html").glob("*.js"))}
    assert {f"pytest_attn/reports/html/{name}" for name in page} <= set(names)
    schemas = {"baseline.json", "certificate.json", "failure.json", "judgment.json", "record.json", "request.json", "run.json"}
    assert {f"pytest_attn/schemas/{name}" for name in schemas} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "conftest"))]
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "[pytest11]\nattn = pytest_attn.plugin" in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_the_wheel_says_what_it_needs(wheel):
    needs = re.findall(r"^Requires-Dist: ([\w-]+)(\S*)$", metadata_of(wheel), re.MULTILINE)
    assert sorted(needs) == [("packaging", ">=22"), ("pluggy", ">=1.2"), ("pytest", ">=7.3.2")]


def test_what_is_imported_is_declared(wheel):
    declared = set(re.findall(r"^Requires-Dist: ([\w-]+)", metadata_of(wheel), re.MULTILINE))
    own = [path for path in (ROOT / "pytest_attn").rglob("*.py") if "libraries" not in path.parts]
    imported = {name for path in own for name in re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.MULTILINE)}
    called = {"pytest_benchmark": "pytest-benchmark", "pynvml": "nvidia-ml-py", "vl_convert": "vl-convert-python"}
    needed = {
        called.get(name, name) for name in imported - sys.stdlib_module_names - {"pytest_attn", "_pytest", "typing_extensions"}
    }
    assert needed - {"xdist"} <= declared  # which is there where it runs the tests, and is imported then only


def pip(python, *arguments):
    """Run pip for the environment of a python; asks an index once, and not for long."""
    command = [sys.executable, "-m", "pip", "--python", python, "--retries", "1", "--timeout", "30", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def pinned(tmp_path):
    """Return a function that makes an environment of pins and returns one that says which of them a package would change."""

    def environment(pins):
        venv.create(tmp_path / "venv")
        python, report = tmp_path / "venv" / "bin" / "python", tmp_path / "report.json"
        done = pip(python, "install", "--quiet", *pins)
        if done.returncode and pip(python, "download", "--quiet", "--no-deps", "--dest", tmp_path, pins[0]).returncode:
            pytest.skip(f"not shown, for no index can be reached: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        torch = site / f"torch-{TORCH}.dist-info"
        torch.mkdir()
        (torch / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH}\n")
        names = {re.split("-[0-9]", path.name)[0].replace("_", "-") for path in site.glob("*.dist-info")}

        def changed(package):
            done = pip(python, "install", "--quiet", "--dry-run", "--report", report, package)
            assert done.returncode == 0, done.stderr
            planned = {one["metadata"]["name"].lower() for one in json.loads(report.read_text())["install"]}
            assert "pytest-attn" in planned
            return planned & names

        return changed

    return environment


@pytest.mark.one_in(5)
@pytest.mark.parametrize("pins", PINS.values(), ids=PINS)
def test_the_wheel_changes_nothing_where_others_pin_their_packages(wheel, pinned, pins):
    changed = pinned(pins)
    assert changed(wheel) == set()
    assert changed(f"{wheel}[torch]") == set()


def test_the_oldest_pytest_is_pinned_by_somebody_and_all_are_tested(wheel):
    tested = re.search(r"^PYTESTS = (.+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert [f"pytest=={one}" for one in tested] == [pins[0] for pins in PINS.values()]
    assert f"Requires-Dist: pytest>={tested[0]}\n" in metadata_of(wheel)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel: its python, and the variables of a shell that has neither this tree nor xdist's."""
    folder = tmp_path_factory.mktemp("installed")
    python = empty_environment(folder, wheel)
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_XDIST", "PYTHONPATH"))}
    ask = [python, "-c", "import pytest_attn; print(pytest_attn.__file__)"]
    where = subprocess.run(ask, cwd=folder, env=alone, capture_output=True, text=True, check=True)
    assert Path(where.stdout).is_relative_to(folder)
    return python, alone


def empty_environment(folder, package):
    """Make an environment that has the package and sees the libraries of this one; return its python."""
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--ignore-installed", package], check=True, capture_output=True)
    return python


@pytest.mark.slow("starts an environment")
def test_the_sdist_installs_and_has_what_the_wheel_has(wheel, tmp_path):
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    empty_environment(tmp_path, sdist)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("pytest_attn/")}
    assert {str(path.relative_to(site)) for path in (site / "pytest_attn").rglob("*") if path.is_file()} >= names


@pytest.mark.slow("starts an environment")
def test_a_downstream_repository_runs_its_tests_and_the_bundled_suite(installed, tmp_path):
    python, alone = installed
    project = tmp_path / "project"
    project.mkdir()

    def run(*args):
        command = [python, "-m", "pytest", "--attn-device=cpu", *args]
        return subprocess.run(command, cwd=project, env=alone, capture_output=True, text=True, check=False)

    chosen = ("--attn-backends=math,sdpa", "--attn-workloads=smoke-full,smoke-half", "-k", "not test_models")
    suite = run("--pyargs", "pytest_attn.suite", *chosen)
    assert suite.returncode == 0, suite.stdout
    assert "20 passed" in suite.stdout, suite.stdout
    (project / "test_downstream.py").write_text(DOWNSTREAM)
    result = run("--attn-backends=math,sdpa_flash")
    assert "1 failed, 4 passed" in result.stdout, result.stdout
    assert "with scale 1: the softmax scale is missing" in result.stdout
