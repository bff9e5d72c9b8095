"""What compilers keep for the next run: where that is said, and that a library which leaves it off is asked to."""

import os

import pytest
from fakes import install, uninstall

from pytest_attn.backends import compilers
from pytest_attn.backends.compilers import kept_line, share_cores
from pytest_attn.backends.library import FLASH4

SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(compilers, "installed_version", {"torch": "2.13", "flash-attn-4": "4.0"}.get)
    for name in (SWITCH, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compilers, "getuser", lambda: "me")
    return monkeypatch


@pytest.mark.parametrize(
    ("selected", "compilers"),
    [
        (("math", "sdpa"), []),
        (("flex",), ["/torchinductor_me (inductor)"]),
        (("sdpa", "sdpa+compile"), ["/torchinductor_me (inductor)"]),
        (("sdpa+graph",), []),
        (("flash4",), ["/me/flash_attention_cute_dsl_cache (flash-attn 4)"]),
        (("flashinfer_fa2",), []),  # which is not installed
        (("all",), ["/torchinductor_me (inductor)", "/me/flash_attention_cute_dsl_cache (flash-attn 4)"]),
    ],
)
def test_the_folders_of_the_selected_backends_are_said(installed, selected, compilers):
    said = kept_line(selected)
    assert bool(said) == bool(compilers)
    assert said.count("(") == len(compilers)
    for one in compilers:
        assert one in said


@pytest.mark.parametrize(("given", "workers", "seen"), [(None, 4, "4"), (None, 8, "2"), (None, 32, "1"), ("5", 8, "5")])
def test_inductor_takes_a_workers_share_of_the_cores_unless_the_user_says_otherwise(installed, given, workers, seen):
    installed.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    installed.setattr(os, "environ", {"TORCHINDUCTOR_COMPILE_THREADS": given} if given else {})
    share_cores(workers)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == seen


def test_what_the_user_has_set_holds(installed):
    installed.setenv("TORCHINDUCTOR_CACHE_DIR", "/theirs")
    assert kept_line(["flex"]) == "attn: compiled kernels are kept in /theirs (inductor)"
    installed.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    installed.setenv(SWITCH, "0")
    assert kept_line(["flex_flash"]) == ""


@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("0", "0")], ids=["unset", "switched off"])
def test_flash_attn_4_keeps_what_it_compiles_unless_the_user_says_otherwise(installed, tmp_path, given, seen):
    if given:
        installed.setenv(SWITCH, given)
    text = f"import os\nSEEN = os.environ.get('{SWITCH}')\n"
    files = ("flash_attn/cute/__init__.py",)
    install(installed, tmp_path, dict.fromkeys(files, text), "flash-attn-4", "4.0")
    try:
        found = FLASH4.load().SEEN
    finally:
        uninstall(files)
    assert (found, os.environ.get(SWITCH)) == (seen, given)
