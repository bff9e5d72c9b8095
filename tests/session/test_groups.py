"""Which cases --dist loadgroup keeps in one worker: those that share what is compiled or imported."""

from types import SimpleNamespace

import pytest

from pytest_attn.plugin import pytest_configure_node
from pytest_attn.session.collection import mark_groups

TEST = """
import os, pytest

@pytest.mark.attention("smoke-full", "smoke-causal-gqa", device="cpu")
def test_it(attn_workload, attn_backend):
    print("ran", attn_workload.name, attn_backend.name, os.environ.get("PYTEST_XDIST_WORKER"))
"""
CONFTEST = """
from pytest_attn import Backend
from pytest_attn.backends.backend import LibraryBackend

class Own(Backend):
    name, library = "own", "torch"
    def prepare(self, inputs, backward=False):
        raise AssertionError

class Compiling(Own):
    name, compiles = "compiling", True

class Planning(Own):
    name, makes_plans = "planning", True

class Sharing(Compiling):
    name, runs_kernels_of = "sharing", "compiling"
    def compiled_for(self, workload):
        return "one kernel]@:"

class Imported(LibraryBackend):
    name = "imported"
    version = lambda self: "1"
    unavailable_because = lambda self, machine: None
    prepare = None

def pytest_attn_backends(registry):
    for backend in (Own, Compiling, Planning, Sharing, Imported):
        registry.add(backend())
"""
BACKENDS = "--attn-backends=own,compiling,planning,sharing,imported"


@pytest.fixture
def groups(pytester):
    """The group of each case, by workload and backend."""

    def of(*arguments, before="@pytest.mark.attention"):
        pytester.makepyfile(TEST.replace("@pytest.mark.attention", before))
        pytester.makeconftest(CONFTEST)
        items, _ = pytester.inline_genitems(BACKENDS, *arguments)
        mark_groups(items)
        marks = {item.callspec.id: item.get_closest_marker("xdist_group") for item in items}
        return {name: mark.args[0] for name, mark in marks.items() if mark}

    return of


def test_what_is_compiled_or_planned_is_shared_and_else_what_is_imported(groups):
    assert groups() == {
        "smoke-full-compiling": "smoke-full compiling",
        "smoke-causal-gqa-compiling": "smoke-causal-gqa compiling",
        "smoke-full-planning": "smoke-full planning",
        "smoke-causal-gqa-planning": "smoke-causal-gqa planning",
        "smoke-full-sharing": "one kernel~ compiling",
        "smoke-causal-gqa-sharing": "one kernel~ compiling",
        "smoke-full-imported": "imported",
        "smoke-causal-gqa-imported": "imported",
    }


def test_a_group_of_the_tests_own_holds(groups):
    own = '@pytest.mark.xdist_group("mine")\n@pytest.mark.attention'
    assert set(groups(before=own).values()) == {"mine"}


def test_a_faulty_kernel_has_one_worker_and_so_has_a_workload_on_a_gpu_of_ones_own(groups, monkeypatch):
    monkeypatch.setattr("pytest_attn.session.devices.take_own_gpu", lambda config: None)
    assert all(group.startswith("mutant~") for group in groups("--attn-mutants").values())
    by_workload = groups("--attn-gpu-per-worker")
    assert set(by_workload.values()) == {"smoke-full", "smoke-causal-gqa"}
    assert len(by_workload) == 10


def test_a_node_of_a_config_that_nobody_configured_is_left_alone(pytester):
    """As those of pytest-xdist's own tests are."""
    node = SimpleNamespace(config=pytester.parseconfig("-p", "no:cacheprovider"), workerinput={})
    pytest_configure_node(node)
    assert node.workerinput == {}
