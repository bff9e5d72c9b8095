import shutil

import pytest
from fakes.judged import HOST

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry

WORDS = "Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"
COMPILER = {"flashinfer/jit/cpp_ext.py": "def get_cuda_path():\n    return '/usr/local/cuda'\n"}
NO_COMPILER = {"flashinfer/jit/cpp_ext.py": f"def get_cuda_path():\n    raise RuntimeError({WORDS!r})\n"}
NOT_COMPILED = {"flashinfer/jit/env.py": "def has_flashinfer_jit_cache():\n    return False\n"}


@pytest.fixture(autouse=True)
def ninja(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def test_it_has_no_backward_pass(installed):
    workload = Workload(24, 40, batch=2, heads=4, kv_heads=2, head_dim=64)
    assert installed("flashinfer_fa2").unsupported_because(workload, HOST, backward=True) == ["has no backward pass"]


def test_without_a_compiler_it_is_broken(installed):
    assert installed("flashinfer_fa2", **NO_COMPILER, **NOT_COMPILED).broken_because() == WORDS


def test_kernels_that_are_already_compiled_need_no_compiler(installed):
    assert installed("flashinfer_fa2", **NO_COMPILER).broken_because() is None


def test_without_ninja_it_is_broken(installed, monkeypatch):
    backend = installed("flashinfer_fa2", **COMPILER, **NOT_COMPILED)
    assert backend.broken_because() is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert Registry()["flashinfer_fa2"].broken_because() == "needs ninja on the PATH to compile its kernels"
