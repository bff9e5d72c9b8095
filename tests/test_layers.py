"""Imports point down only; the rules are those of docs/architecture.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_attn

ROOT = Path(pytest_attn.__file__).parent
#: from the top: a folder may import those after it, and itself
LAYERS = (
    "__main__",
    "plugin",
    "hooks",
    "session",
    "reports",
    "suite",
    "strategies",
    "failures",
    "invariants",
    "mutants",
    "profiling",
    "latency",
    "correctness",
    "backends",
    "workloads",
)
SIBLINGS = ("reports", "invariants", "latency")
PYTEST_ALLOWED = ("plugin", "hooks", "session", "suite")
HEAVY = ("torch", "numpy", "triton", "rich")
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")


def layer(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path, top_level_only=False):
    """Yield the modules that a file imports; TYPE_CHECKING blocks count as no import at run time."""
    tree = ast.parse(path.read_text())
    hidden = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for child in block.body
        for node in ast.walk(child)
    }
    if top_level_only:
        hidden |= {
            node
            for fn in ast.walk(tree)
            if isinstance(fn, ast.FunctionDef | ast.Lambda)
            for node in ast.walk(fn)
            if node is not fn
        }
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_from_its_own_layer_or_below(path):
    mine = layer(path)
    assert mine in LAYERS
    for module in imports(path):
        if not module.startswith("pytest_attn."):
            continue
        theirs = module.split(".")[1]
        if mine == "suite":
            raise AssertionError(f"the suite is written with the public contract only, not with {module}")
        assert LAYERS.index(theirs) >= LAYERS.index(mine), f"{mine} imports {module}, which lies above it"
        if mine in SIBLINGS:
            assert theirs == mine or theirs not in SIBLINGS, f"{mine} imports its sibling {theirs}"
        if mine == "backends":
            assert ".adapters" not in module, "adapters are found by the registry only, none imports another"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pytest_and_heavy_libraries_stay_where_they_belong(path):
    top = {module.split(".")[0] for module in imports(path, top_level_only=True)}
    assert not top.intersection(HEAVY), "imported when the module is"
    if layer(path) not in PYTEST_ALLOWED:
        assert "pytest" not in {module.split(".")[0] for module in imports(path)}


def test_finding_out_what_is_installed_imports_nothing():
    ask = """
import sys, torch, torch.nn.attention.varlen
from pytest_attn import Machine
from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.registry import Registry
before = set(sys.modules)
for machine in (machine_of(resolve_device()), Machine("cuda:0", "H200", (9, 0), "sm90", 1 << 37, 1, torch.__version__)):
    registry = Registry()
    for name in registry.names:
        registry[name].unavailable_because(machine)
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(tops - {"pytest_attn"} - set(sys.stdlib_module_names)))
"""
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "constants"])
def test_there_is_no_drawer(name):
    assert not list(ROOT.rglob(f"{name}*"))


def loaded_after(code):
    show = f"print(*sorted(m for m in sys.modules if m.split('.')[0] in {HEAVY!r} or m.startswith('pytest_attn.')))"
    script = f"{code}\nimport sys\n{show}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_plugin_loads_nothing_heavy():
    assert loaded_after("import pytest_attn.plugin") == ["pytest_attn.plugin"]
    loaded = loaded_after("from pytest_attn import Workload, Window, Backend")
    assert not [module for module in loaded if module.split(".")[0] in HEAVY]


def test_a_run_without_attention_tests_loads_settings_and_session_only(tmp_path):
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    loaded = loaded_after(f"import pytest\nassert pytest.main(['-q', '-p', 'no:cacheprovider', {str(tmp_path)!r}]) == 0")
    modules = [word for word in loaded if word.startswith("pytest_attn") or word in HEAVY]
    assert modules == [
        "pytest_attn.hooks",
        "pytest_attn.plugin",
        "pytest_attn.session",
        "pytest_attn.session.settings",
        "pytest_attn.session.store",
    ]
