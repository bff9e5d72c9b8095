import functools
import gc
import inspect
import os
import re
import sys
import sysconfig
from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.config import PytestPluginManager
from _pytest.fixtures import FixtureManager, getfixturemarker
from _pytest.pytester import SysModulesSnapshot
from left_out import IS_ALL

os.environ["OMP_NUM_THREADS"] = "1"  # as many for the processes that tests start as for this one: xdist's share the cores

TESTS = Path(__file__).parent

#: What pytest and the plugin read of the place they run in: a CI job's summary is longer, xdist's workers are told how wide
#: the terminal is, and a log may be colored. A test that is about one of them sets it itself.
_OF_THE_HOST = (
    *("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"),
    *("COLUMNS", "FORCE_COLOR", "NO_COLOR", "PY_COLORS"),
)


#: whether the guests of this package are installed with it; a core without them passes what is left of the tests
HAS_GUESTS = find_spec("pytest_attn.guests") is not None
#: what tells that a test, or what it imports from here, is about a guest
_OF_GUESTS = re.compile(
    r"\A\"{3}--attn-save-failures|pytest_attn\.(?:guests|capture)|attn_model|attn-(?:fuzz|mutants|rank|tune)|\branks=|check_m(odel|odule|erge)"
)
#: and one test, in its name or its text
_OF_A_GUEST = re.compile(
    r"\b(natten|sage|flash[234]|flashinfer_fa2|hub|diffusers|transformers)\b|attn-against|save.failures|saved failures"
)


def pytest_ignore_collect(collection_path):
    """Leave out the files that are about guests where none is installed."""
    if HAS_GUESTS or collection_path.suffix != ".py":
        return None
    return True if _is_about_guests(collection_path) else None


@functools.cache
def _is_about_guests(path):
    text = path.read_text(encoding="utf-8")
    imported = (TESTS / f"{name}.py" for name in re.findall(r"^(?:from|import) ([a-z_]+)", text, re.MULTILINE))
    return bool(_OF_GUESTS.search(text)) or any(one.is_file() and _is_about_guests(one) for one in imported)


def _is_about_a_guest(item):
    body = inspect.getsource(item.function).partition("def ")[2]
    return bool(_OF_A_GUEST.search(f"{item.name} {body}"))


@functools.cache
def _load():
    """Load torch, and collect no garbage while thousands of tests are collected."""
    gc.disable()
    import torch

    torch.set_num_threads(1)


def _restore(snapshot, restore=SysModulesSnapshot.restore):
    """Forget the modules that a run of pytester has loaded, but for what is installed: torch registers its parts once."""
    loaded = dict(sys.modules)
    restore(snapshot)
    new = ((name, loaded[name]) for name in loaded.keys() - sys.modules.keys())
    sys.modules.update({name: one for name, one in new if (getattr(one, "__file__", None) or "").startswith(_INSTALLED)})


_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
SysModulesSnapshot.restore = _restore


class _Installed(metadata.PathDistribution):
    """An installed distribution, of which each file is read once."""

    metadata, entry_points, files = (
        functools.cached_property(getattr(metadata.Distribution, name).fget) for name in ("metadata", "entry_points", "files")
    )


@functools.cache
def _installed_in(folder, found=metadata.distributions):
    return [_Installed(one._path) for one in found(path=[folder])]


_AHEAD = frozenset(sys.path)


def _distributions(found=metadata.distributions, **where):
    """Return what is installed: what pytest and the plugin ask for in hundreds of runs, and a test adds a folder at most."""
    if where:
        return found(**where)
    return [one for folder in sys.path for one in (_installed_in(folder) if folder in _AHEAD else found(path=[folder]))]


metadata.distributions = _distributions


def _look_once(plugins):
    """Look through the modules that are plugins once, not in each of hundreds of runs: a fifth of what a small one takes."""
    parse, parse_fixtures = PytestPluginManager.parse_hookimpl_opts, FixtureManager.parsefactories
    modules = {id(one): vars(one).values() for one in plugins if isinstance(one, ModuleType)}
    fixtures = {key: any(map(getfixturemarker, held)) for key, held in modules.items()}
    hooks = {}

    def parse_hookimpl_opts(manager, plugin, name):
        if id(plugin) not in modules:
            return parse(manager, plugin, name)
        if (id(plugin), name) not in hooks:
            hooks[id(plugin), name] = parse(manager, plugin, name)
        return hooks[id(plugin), name]

    def parsefactories(manager, *args, **kwargs):
        if fixtures.get(id(kwargs.get("holder", *args[:1])), True):
            parse_fixtures(manager, *args, **kwargs)

    PytestPluginManager.parse_hookimpl_opts = parse_hookimpl_opts
    FixtureManager.parsefactories = parsefactories


def pytest_collectstart():
    """Load torch where tests are collected, which xdist's controller does not do: its workers wait for it to start them."""
    _load()


def pytest_collection_modifyitems(config, items):
    """Leave out what is about guests where none is installed, and what tests/left_out.py says, unless ATTN_TESTS=all."""
    left_out = set() if HAS_GUESTS else {item for item in items if _is_about_a_guest(item)}
    if not IS_ALL:
        left_out |= {item for item in items if _is_told_again(item) or item.get_closest_marker("slow")}
        left_out |= _between([item for item in items if item not in left_out])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session):
    """Let nothing look at torch and thousands of tests again and again.

    Neither the collection of garbage, which took a fifth of the time, nor each interception of a model's attention, which
    looks for functions in all modules, and took a twelfth: of those loaded by now it sees our own, and those that hold one.
    """
    if HAS_GUESTS:
        _see_few_modules()
    _look_once(session.config.pluginmanager.get_plugins())
    gc.freeze()
    gc.enable()


def _see_few_modules():
    from pytest_attn.guests.models import interception

    owners, functions = interception._owners, interception.wrappers_of(lambda function, held: held)
    others = {  # whose ids they keep
        id(one): one
        for one in owners(None)
        if str(TESTS) not in str(one) and functions.keys().isdisjoint(map(id, vars(one).values()))
    }
    interception._owners = lambda model: (one for one in owners(model) if id(one) not in others)


def _between(items):
    """Return the cases that `one_in` leaves out: of each test all but the first, and every n-th after it."""
    seen, left_out = Counter(), set()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                left_out.add(item)
            seen[test] += 1
    return left_out


def _is_told_again(item):
    callspec = getattr(item, "callspec", None)
    through_xdist = callspec is not None and callspec.params.get("run") == "xdist"
    return through_xdist and item.path.parent.name == "plugin" and not item.get_closest_marker("twice")


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch):
    """Let a test see the same everywhere, and draw the same numbers whatever ran before it."""
    torch = sys.modules["torch"]
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes the stack for each kind of device, which takes longer
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    for name in _OF_THE_HOST:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def uncompiled(monkeypatch):
    """Let torch.compile write no C++, which takes seconds for each workload; `make suite` and ATTN_TESTS=all compile."""
    if not IS_ALL:
        torch = sys.modules["torch"]
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def no_worker(monkeypatch):
    """Let a run that a worker of these tests' own run starts not take itself for one."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
