"""Imports point down only, and never in a circle; the layers are those of docs/architecture.md."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pytest_attn
from pytest_attn.processes.fork_server import modules_ahead

ROOT = Path(pytest_attn.__file__).parent
ARCHITECTURE = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
#: from the top: a folder or file may import those after it, and its own; `__init__` says where each public name lives
LAYERS = (
    "__init__",
    "__main__",
    "plugin",
    "hooks",
    "guests/judging",
    "guests/isolation",
    "guests/audit",
    "guests/models",
    "guests/ranks",
    "guests/promises",
    "guests/fuzz",
    "guests/saving",
    "guests/ranking",
    "guests/mutants",
    "guests/merging",
    "guests/steady",
    "guests/evidence",
    "guests/against",
    "guests/libraries",
    "cases",
    "session",
    "suite",
    "strategies",
    "invariants",
    "latency",
    "diagnosis",
    "correctness",
    "reports",
    "backends",
    "workloads",
    "processes",
    "seam",
    "version",
)
SIBLINGS = ("invariants", "latency")
#: layers that may be loaded before a case is made: pytest starts and collects without torch
BEFORE_A_CASE = ("plugin", "hooks", "session", "reports", "suite", "backends", "workloads", "processes", "seam", "version")
#: modules of theirs that a case loads
AT_A_CASE = (
    "workloads/kv_layout.py",
    *(f"backends/{name}.py" for name in ("eager", "flex", "gradients", "layouts", "sdpa", "streams")),
)
PYTEST_ALLOWED = ("plugin", "hooks", "cases", "session", "suite", "processes")
#: files of guests that make what a test touches; the others judge without pytest
OF_TESTS = ("_case.py", "_items.py", "_run.py", "_executor.py", "_server.py", "/pool.py", "/small_models.py", "_guest.py")
HEAVY = ("torch", "numpy", "triton", "rich")
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py" or path.read_text().strip())


def layer(path, root=ROOT):
    parts = path.relative_to(root).parts
    return "/".join(parts[:2]) if parts[0] == "guests" else parts[0].removesuffix(".py")


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def statements(tree):
    """Yield a node and the statements within it: no expression imports anything."""
    yield tree
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(tree, name, ()):
            yield from statements(inner)


@cache
def imported(path, top_level_only=False):
    """Return the dotted names that a file imports: in functions and for type checkers as well, unless top_level_only."""
    tree = tree_of(path)
    hidden = set()
    if top_level_only:
        for block in statements(tree):
            is_lazy = isinstance(block, ast.FunctionDef)
            is_typing = isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
            if is_lazy or is_typing:
                hidden.update(node for node in statements(block) if node is not block)
    names = []
    for node in statements(tree):
        if isinstance(node, ast.Import) and node not in hidden:
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node not in hidden:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def files_imported(path, root=ROOT):
    """Return the files of the package that a file imports."""
    found = set()
    for name in imported(path):
        top, *parts = name.split(".")
        if top == root.name:
            found.add(_file_of(root, parts) or _file_of(root, parts[:-1]))  # the last may be a name within a file
    return found


def _file_of(root, parts):
    place = root.joinpath(*parts)
    return next((file for file in (place.with_name(f"{place.name}.py"), place / "__init__.py") if file.is_file()), None)


def upward_arrows(root=ROOT, layers=LAYERS):
    """Return (importing file, imported file) where the second lies above the first."""
    place = layers.index
    files = [path for path in root.rglob("*.py") if path.name != "__init__.py"]
    arrows = [(path, other) for path in files for other in files_imported(path, root)]
    return [
        (path, other)
        for path, other in arrows
        if place(layer(other, root)) < place(layer(path, root)) and layer(path, root) != "suite"
    ]


def circles(root=ROOT):
    """Return the set of files that import each other in a circle, where there is one."""
    arrows = {path: files_imported(path, root) - {root / "__init__.py"} for path in root.rglob("*.py")}
    arrows.pop(root / "__init__.py", None)
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return [{str(member.relative_to(root)) for member in error.args[1]}]
    return []


def test_no_files_import_each_other_in_a_circle():
    found, upward = circles(), upward_arrows()
    print(f"circles {len(found)}, upward arrows {len(upward)}")
    assert found == []
    assert [f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}, which lies above it" for path, other in upward] == []


@pytest.mark.parametrize(
    ("text", "circle", "upward"),
    [
        ("", [], 0),
        ("from attn.low import one\n", [], 0),
        ("from attn.top.a import one\n", [{"low.py", "top/a.py"}], 1),
        ("def late():\n    from attn.top import a\n", [{"low.py", "top/a.py"}], 1),
        ("import typing\nif typing.TYPE_CHECKING:\n    from attn.top.a import One\n", [{"low.py", "top/a.py"}], 1),
    ],
)
def test_a_planted_circle_and_a_planted_upward_arrow_are_seen(tmp_path, text, circle, upward):
    root = tmp_path / "attn"
    (root / "top").mkdir(parents=True)
    (root / "top" / "a.py").write_text("from attn.low import two\n")
    (root / "low.py").write_text(text.replace("attn.low", "attn.lowest"))
    (root / "lowest.py").write_text("")
    assert circles(root) == circle
    assert len(upward_arrows(root, ("top", "low", "lowest"))) == upward


#: what the house may have at most: rooms are the folders of the package, arrows and floors those between them
MOST = {
    "files": 313,
    "rooms": 26,
    "floors": 9,
    "arrows": 139,
    "imports within functions": 150,
    "imports for type checkers": 150,
}


def measures(root=ROOT):
    """Return the measures of the house, by their names in MOST."""
    files = list(root.rglob("*.py"))
    rooms = {path.parent for path in files if path.parent != root and path.read_text().strip()}
    rooms = {layer(path / "__init__.py", root) for path in rooms}
    arrows = {(layer(path, root), layer(other, root)) for path in files for other in files_imported(path, root)}
    arrows = {(one, other) for one, other in arrows if one != other and {one, other} <= rooms}

    @cache
    def floor(room):
        return 1 + max((floor(below) for above, below in arrows if above == room), default=0)

    hidden = [_imports_within(tree_of(path)) for path in files]
    return {
        "files": len(files),
        "rooms": len(rooms),
        "floors": max(map(floor, rooms)),
        "arrows": len(arrows),
        "imports within functions": sum(functions for functions, _ in hidden),
        "imports for type checkers": sum(checkers for _, checkers in hidden),
    }


def _imports_within(tree):
    """Return how many imports stand within functions, and how many are for type checkers only."""
    functions, checkers = set(), set()
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions |= set(_imports_of(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            checkers |= set(_imports_of(node))
    return len(functions), len(checkers)


def _imports_of(tree):
    return (node for node in statements(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def test_the_house_is_small_enough_to_hold():
    found = measures()
    print(found)
    assert {name: found[name] for name, most in MOST.items() if found[name] > most} == {}


def test_a_room_and_an_import_too_many_are_seen(tmp_path):
    root = tmp_path / "attn"
    for name in ("low", "middle", "top"):
        (root / name).mkdir(parents=True)
    (root / "low" / "one.py").write_text("def late():\n    import os\n")
    (root / "middle" / "two.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    from attn.low import one\n")
    (root / "top" / "three.py").write_text("from attn.middle import two\n")
    assert list(measures(root).values()) == [3, 3, 3, 2, 1, 1]


def test_the_page_on_the_architecture_lists_these_layers():
    (drawn,) = re.findall(r"```\n(plugin .*?)```", ARCHITECTURE, flags=re.S)
    names = [re.match(r"[\w/]+(  \w+)*", line) for line in drawn.splitlines()]
    listed = [name.rstrip("/") for found in names if found for name in found.group().split("  ") if name.rstrip("/") in LAYERS]
    assert listed == [name for name in LAYERS if not name.startswith("__")]


def test_the_page_on_the_architecture_names_files_that_there_are():
    named = set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE)) - {"tests/test_layers.py"}
    assert len(named) > 20
    assert 1 < ARCHITECTURE.count("\n- Where") <= 25, "names answer the rest"
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def offenses(path, root=ROOT):
    """Say what a file imports that its layer may not."""
    mine, theirs = layer(path, root), {layer(other, root) for other in files_imported(path, root)}
    names, at_once = imported(path), {name.partition(".")[0] for name in imported(path, top_level_only=True)}
    if mine not in LAYERS:
        yield "belongs to no layer"
    if mine == "suite":
        theirs.discard(f"guests/{path.stem.removeprefix('test_')}")  # whose bundled tests they are
    if mine == "suite" and not theirs <= {"__init__", "suite"}:
        yield "the suite is written with the public contract only"
    if mine in SIBLINGS and theirs.intersection(SIBLINGS) - {mine}:
        yield "invariants and latency know nothing of each other"
    inside = path.relative_to(root).as_posix()
    if mine in BEFORE_A_CASE and not inside.startswith(AT_A_CASE) and at_once.intersection(HEAVY):
        yield "imports a heavy library when it is imported"
    if not mine.startswith("guests/") and any(other.startswith("guests/") for other in theirs) and mine != "__init__":
        yield "the core knows no guest: it is registered by an entry point"
    if mine not in PYTEST_ALLOWED and not inside.endswith(OF_TESTS) and "pytest" in {name.partition(".")[0] for name in names}:
        yield "knows of pytest"


#: words of guests, and of what they judge
OF_GUESTS = re.compile(
    r"\b(?:models?|attn_model|mutants?|ranks|shards?|sharding|saved.failures?|save.failures)\b|over_ranks", re.I
)
#: how many lines of the core may have one, and what it means there
MAY_NAME = {
    "__init__.py": (16, "the names of `pytest_attn.capture` and the like"),
    "backends/eager.py": (1, "whose code it is like"),
    "backends/machine.py": (1, "of a CPU"),
    "correctness/call.py": (2, "who hands tensors over as views"),
    "diagnosis/attention_faults.py": (1, "what rotates q and k"),
    "hooks.py": (1, "an example"),
    "invariants/memory_layout.py": (1, "who hands tensors over as slices"),
    "latency/statistics.py": (1, "the title of a paper"),
    "latency/work.py": (1, "whose activations values are like"),
    "session/manifest.py": (1, "of a CPU"),
    "suite/test_models.py": (30, "the bundled tests of a guest"),
    "suite/test_ranks.py": (11, "the bundled tests of a guest"),
    "workloads/catalog.py": (2, "whose shapes they are"),
    "workloads/workload.py": (1, "which order of heads is usual"),
}


def words_of_guests(root=ROOT):
    """Return how many lines of each file of the core have a word of a guest."""
    core = (path for path in root.rglob("*.py") if not layer(path, root).startswith("guests/"))
    lines = {path.relative_to(root).as_posix(): path.read_text().splitlines() for path in core}
    found = {name: sum(bool(OF_GUESTS.search(line)) for line in text) for name, text in lines.items()}
    return {name: number for name, number in found.items() if number}


def test_the_core_has_no_word_of_a_guest():
    found = words_of_guests()
    assert {name: number for name, number in found.items() if number > MAY_NAME.get(name, (0, ""))[0]} == {}
    assert {name for name in MAY_NAME if name not in found} == set(), "they need no exception any more"


def test_a_planted_word_of_a_guest_is_seen(tmp_path):
    planted = {"session/options.py": "mutants: bool\n", "cases/case.py": "a rank\n", "guests/ranks/pool.py": "ranks"}
    for name, text in planted.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert words_of_guests(tmp_path) == {"session/options.py": 1}


def test_a_file_imports_what_its_layer_may():
    assert [f"{path.relative_to(ROOT)}: {offense}" for path in FILES for offense in offenses(path)] == []


@pytest.mark.parametrize(
    ("place", "text", "offense"),
    [
        ("drawer.py", "", "belongs to no layer"),
        ("suite/test_it.py", "from pytest_attn.correctness import judge\n", "the suite is written"),
        ("latency/gate.py", "def late():\n    from pytest_attn.invariants import leak\n", "know nothing of each other"),
        ("backends/registry.py", "import torch.nn\n", "imports a heavy library"),
        ("correctness/judge.py", "def late():\n    import pytest\n", "knows of pytest"),
        ("guests/models/step.py", "import pytest\n", "knows of pytest"),
        ("plugin.py", "def late():\n    from pytest_attn.guests.models import step\n", "the core knows no guest"),
    ],
)
def test_a_planted_import_is_seen(tmp_path, place, text, offense):
    root = tmp_path / "pytest_attn"
    for name in (place, "correctness/judge.py", "invariants/leak.py", "guests/models/step.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / place).write_text(text)
    (found,) = offenses(root / place, root)
    assert offense in found


def test_only_the_registry_asks_what_kind_of_subject_it_has():
    asking = [path for path in FILES if "isinstance(" in (text := path.read_text()) and ", Backend)" in text]
    assert [str(path.relative_to(ROOT)) for path in asking] == ["backends/registry.py"]


def test_what_fresh_processes_find_imported_imports_no_other_plugin_of_pytest():
    """Or pytest warns that it cannot rewrite the assertions of that plugin any more, where warnings may be errors."""
    names = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in FILES}
    ahead = [name for name in modules_ahead(names) if name in names]
    assert len(ahead) > 100
    late = ("hypothesis", "pytest_benchmark", "xdist", *(names.keys() - set(ahead)))
    assert [name for name in ahead if any(one.startswith(late) for one in imported(names[name], top_level_only=True))] == []


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "constants"])
def test_there_is_no_drawer(name):
    assert not list(ROOT.rglob(f"{name}*"))


def loaded_after(code):
    show = f"print(*sorted(m for m in sys.modules if m.split('.')[0] in {HEAVY!r} or m.startswith('pytest_attn.')))"
    script = f"{code}\nimport sys\n{show}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_plugin_loads_nothing_heavy():
    for code in ("import pytest_attn.plugin", "from pytest_attn import Workload, Window, Backend"):
        loaded = loaded_after(code)
        assert "pytest_attn.plugin" in loaded or "pytest_attn.workloads.workload" in loaded
        assert not [module for module in loaded if module.split(".")[0] in HEAVY]


def test_collecting_attention_tests_loads_nothing_heavy(tmp_path):
    (tmp_path / "test_cases.py").write_text("""
import pytest
from pytest_attn import Document, Neighborhood, Pages, Window, Workload
@pytest.mark.attention("smoke", Workload(64, mask=Window(3, 0)), backward=True, returns=("out", "lse"))
def test_backend(attn, attn_backend):
    pass
@pytest.mark.attention(Workload(64), ranks=2)
def test_ranks(attn):
    pass
@pytest.mark.attention_model
def test_model(attn_model, attn_backend):
    pass
""")
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "--attn-backends=all", str(tmp_path)]
    loaded = loaded_after(f"import pytest\nassert pytest.main({options!r}) == 0")
    assert "pytest_attn.session.collection" in loaded
    assert [word for word in loaded if word in HEAVY] == []


@pytest.mark.slow("starts processes")
def test_a_run_without_attention_tests_loads_settings_and_session_only(tmp_path):
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    loaded = loaded_after(f"import pytest\nassert pytest.main(['-q', '-p', 'no:cacheprovider', {str(tmp_path)!r}]) == 0")
    modules = [word.removeprefix("pytest_attn.") for word in loaded if word.startswith("pytest_attn") or word in HEAVY]
    names = sorted(path.parent.name for path in ROOT.glob("guests/*/*_guest.py"))  # which register themselves
    assert modules == [
        *("guests", *(one for name in names for one in (f"guests.{name}", f"guests.{name}.{name}_guest"))),
        "hooks",
        "plugin",
        "processes",
        "processes.lifetime",
        "processes.worker",
        "seam",
        "session",
        "session.benchmark_traces",
        *(f"session.{name}" for name in ("devices", "kinds", "lost_cuda", "option_types", "options", "pytest_versions")),
        *(f"session.{name}" for name in ("registrations", "session")),
    ]


def test_pytest_parses_no_module_of_the_package_for_its_assertions():
    ours = [one for name, one in sys.modules.items() if name.startswith("pytest_attn.") and ".suite" not in name]
    assert len(ours) > 5
    assert {type(module.__loader__).__name__ for module in ours} == {"SourceFileLoader"}
