"""Every story can be told twice: in this process, and through an xdist worker in another.

The second takes seconds each, so only those that are marked `twice` always are. `make test-all` tells all of them, and those
that are marked slow.
"""

import getpass
import os
import pkgutil
import tempfile
from importlib import import_module

import pytest

import pytest_attn
from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.registry import Registry

# Runs in this process forget the modules that they loaded. torch's C extensions cannot be loaded again, and a second
# Workload class would not be an instance of the first: so everything is loaded here, once.
for module in pkgutil.walk_packages(pytest_attn.__path__, "pytest_attn."):
    if ".suite." not in module.name:
        import_module(module.name)
for name in (registry := Registry()).names:
    registry[name].unavailable_because(machine_of(resolve_device("cpu")))


def pytest_collection_modifyitems(config, items):
    """Leave out the second telling of most stories, and slow ones, unless ATTN_TESTS=all."""
    if os.environ.get("ATTN_TESTS") == "all":
        return
    left_out = {item for item in items if _is_told_again(item) or item.get_closest_marker("slow")}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_told_again(item):
    callspec = getattr(item, "callspec", None)
    through_xdist = callspec is not None and callspec.params.get("run") == "xdist"
    return through_xdist and item.path.parent.name == "plugin" and not item.get_closest_marker("twice")


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch):
    """Let a story that runs in a worker of these tests' own run not take itself for one."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _own_processes(request, monkeypatch):
    """Let the processes that a story starts wait for nothing that is not theirs.

    Hypothesis is imported by its plugin at the end of every run; the lock of a device, in the folder of temporary files, may
    be another story's.
    """
    if "pytester" in request.fixturenames:
        pytester = request.getfixturevalue("pytester")  # which forgets the options of these tests' own run
        if request.path.name != "test_fuzz.py":
            monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
        compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled))
        own = str(pytester.path.parent / f"{pytester.path.name}-tmp")
        os.mkdir(own)
        monkeypatch.setenv("TMPDIR", own)
        monkeypatch.setattr(tempfile, "tempdir", own)


@pytest.fixture(params=["serial", "xdist"])
def run(request, pytester):
    """Run pytest on the files of `pytester` and return the result."""

    def run_it(*args):
        if request.param == "serial":
            return pytester.runpytest_inprocess("-p", "no:cacheprovider", *args)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "1", *args)

    run_it.is_serial = request.param == "serial"
    return run_it


@pytest.fixture
def kernel_test(pytester):
    """Write a test of one kernel: its body, the marker's arguments, the fixtures it takes."""

    def write(body, marker='Workload(32, heads=2, head_dim=32), device="cpu"', fixtures="attn", before=""):
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        pytester.makepyfile(
            f"""
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from pytest_attn import Workload, Window, Pages
{before}

@pytest.mark.attention({marker})
def test_kernel({fixtures}):
{lines}
"""
        )

    return write
