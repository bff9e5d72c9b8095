"""What the files of a folder import is named by the dependency groups that are installed to run them."""

import ast
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pytest_attn.session.devices import OLDEST_TORCH, NoTorchError, require_torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
#: of a folder or file, the groups; a later one has its own beneath an earlier one
GROUPS = {
    "tests": ("test",),
    "tests/prose": ("lint",),
    "benchmarks": ("test", "models"),
    "docs": ("docs",),
    ".ci": ("build",),
}
#: what a test or a benchmark does without, or has a stand-in for
OPTIONAL = {
    *("a-library", "check-jsonschema", "flash-attn", "pynvml", "sageattention"),
    *("tomli", "transformer-engine", "triton", "xformers"),
}
#: modules of this repository that its files import by their names alone
OWN = {"pytest_attn", *(one.stem for place in ("tests/*", "benchmarks/*.py", "docs/_ext/*.py") for one in ROOT.glob(place))}
#: modules that are called otherwise than their distributions
CALLED = {
    "_pytest": "pytest",
    "markdown_it": "markdown-it-py",
    "vl_convert": "vl-convert-python",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def declared(project, groups):
    """Return the distributions that a project needs to run, and those of its groups, by their normalized names."""
    waiting, names = [*project["project"].get("dependencies", ())], set()
    waiting += [{"include-group": group} for group in groups]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += project["dependency-groups"][one["include-group"]]
        else:
            names.add(canonicalize_name(Requirement(one).name))
    return names


def imported(path):
    """Return the top names that a file imports anywhere, or runs by `python -m`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.List):
            words = [one.value if isinstance(one, ast.Constant) else None for one in node.elts]
            names.update(after for before, after in pairwise(words) if before == "-m" and after)
    return {name.partition(".")[0] for name in names}


def undeclared(files, has):
    """Return a line for each file that imports what is not declared."""
    own = OWN | {file.stem for file in files}
    named = [(file, name) for file in files for name in imported(file) - sys.stdlib_module_names - own]
    return sorted(
        f"{file.name} imports {name}"
        for file, name in named
        if canonicalize_name(CALLED.get(name, name)) not in has | OPTIONAL
    )


def files_of(place):
    """Return the files of a row of GROUPS, which are of no later one."""
    beneath = [ROOT / other for other in GROUPS if other != place and other.startswith(place)]
    return [
        file
        for file in (ROOT / place).rglob("*.py")
        if "examples" not in file.relative_to(ROOT).parts and not any(file.is_relative_to(one) for one in beneath)
    ]


@pytest.mark.parametrize("place", GROUPS)
def test_a_group_has_what_its_files_import(place):
    files = files_of(place)
    assert files
    assert undeclared(files, declared(PROJECT, GROUPS[place])) == []


@pytest.mark.parametrize("project", sorted(path.parent.name for path in ROOT.glob("docs/examples/*/pyproject.toml")))
def test_an_example_has_what_its_files_import(project):
    folder = ROOT / "docs/examples" / project
    found = tomllib.loads((folder / "pyproject.toml").read_text())
    has = declared(found, found["dependency-groups"]) | {"pytest"}  # which comes with pytest-attn
    assert undeclared([*folder.rglob("*.py")], has) == []


def test_what_is_not_declared_is_found(tmp_path):
    (tmp_path / "test_it.py").write_text("import yaml\nimport os.path\ndef f():\n    from rich import x\n['-m', 'build']\n")
    found = undeclared([tmp_path / "test_it.py"], declared(PROJECT, ["models"]))
    assert found == ["test_it.py imports build", "test_it.py imports rich", "test_it.py imports yaml"]
    assert undeclared([tmp_path / "test_it.py"], declared(PROJECT, ["dev"])) == []


def test_the_oldest_torch_is_that_of_the_extra():
    (torch,) = PROJECT["project"]["optional-dependencies"]["torch"]
    assert torch == f"torch>={'.'.join(map(str, OLDEST_TORCH))}"
    others = [one for group in PROJECT["dependency-groups"].values() for one in group if re.match("torch>", str(one))]
    assert {*others} == {torch}


@pytest.mark.parametrize("version", ["2.6.0", "2.6.0a0+ecf3bae40a.nv25.01", "2.13.0+cpu", "3.0.0"])
def test_a_torch_that_is_new_enough_is_taken(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    require_torch()


def test_an_older_torch_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    with pytest.raises(NoTorchError) as refused:
        require_torch()
    assert str(refused.value) == (
        'pytest-attn needs torch 2.6 or newer, 2.5.1+cu124 is installed; pip install "pytest-attn[torch]"'
    )
