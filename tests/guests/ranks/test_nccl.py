"""Whether ranks may share a GPU is asked of the NCCL that a process has loaded: here of libraries that know their release."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from pytest_attn import Machine
from pytest_attn.guests.ranks import nccl as asked
from pytest_attn.guests.ranks.nccl import too_few_gpus_because

ONE = Machine("cuda:0", "NVIDIA H200", (9, 0), "sm90", 150 << 30, 1, "2.11.0+cu130")
SHOW = "from pytest_attn.guests.ranks.nccl import loaded_nccl; print(loaded_nccl())"


@pytest.fixture
def nccl(tmp_path):
    """Build a library of a release, under a name."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")

    def build(code, name="libnccl.so.2"):
        source, library = tmp_path / "nccl.c", tmp_path / str(code) / name
        source.write_text(f"int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}\n")
        library.parent.mkdir()
        subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", library, source], check=True)
        return library

    return build


def shown(loading="", preload=""):
    """Return what a process finds that loads a library as Python loads an extension's."""
    load = f"import ctypes; ctypes.CDLL({str(loading)!r}); " if loading else ""
    environment = {**os.environ, "LD_PRELOAD": str(preload)} if preload else None
    command = [sys.executable, "-c", load + SHOW]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("code", "release"), [(23007, "(2, 30, 7)"), (22809, "(2, 28, 9)"), (2804, "(2, 8, 4)")])
@pytest.mark.parametrize("name", ["libnccl.so.2", "libtorch_cuda.so"])
def test_the_release_is_that_of_the_library_that_is_loaded(nccl, code, release, name):
    assert shown(loading=nccl(code, name)) == release


@pytest.mark.slow("imports torch anew")
def test_what_is_preloaded_comes_before_what_torch_brings(nccl):
    old, new = nccl(22809), nccl(23007)
    assert shown(loading=old, preload=new) == "(2, 30, 7)"
    assert shown(loading=new, preload=old) == "(2, 28, 9)"


def test_nothing_is_loaded_to_ask_it(nccl):
    nccl(23007)
    assert shown() == "()"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((2, 30, 0), None),
        ((2, 31, 2), None),
        (
            (2, 28, 9),
            "needs 2 GPUs, this machine has 1; ranks share one over NCCL 2.30 or newer, and NCCL 2.28.9 is loaded:"
            " pip install 'nvidia-nccl-cu13>=2.30'",
        ),
        (
            (),
            "needs 2 GPUs, this machine has 1; ranks share one over NCCL 2.30 or newer, and no NCCL is loaded:"
            " pip install 'nvidia-nccl-cu13>=2.30'",
        ),
    ],
)
def test_what_is_said_where_there_are_fewer_gpus_than_ranks(monkeypatch, found, said):
    monkeypatch.setattr(asked, "loaded_nccl", lambda: found)
    assert too_few_gpus_because(2, ONE) == said
    assert too_few_gpus_because(2, replace(ONE, device_count=2)) is None
    assert too_few_gpus_because(4, replace(ONE, device="cpu", device_count=0)) is None
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert too_few_gpus_because(2, ONE) == (said and "needs 2 GPUs, this machine has 1")
