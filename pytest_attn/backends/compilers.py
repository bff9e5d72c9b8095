"""Compilers of kernels, the backends that they serve, and the folders in which they keep kernels for the next run."""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

from pytest_attn.backends.machine import installed_version, usable_cores


@dataclass(frozen=True)
class Compiler:
    """A compiler that makes a kernel for each workload of some backends, which takes seconds.

    distribution: that it comes with. folder: where it keeps what it compiled, USER for the user's name, unless the variable
    says otherwise. below: in either of them. switch: the variable that switches it on and off, and how it is where unset.
    seconds: that a kernel takes it, roughly, as on an H200's host of 16 cores beside seven others.
    """

    name: str
    distribution: str
    backends: frozenset[str]
    variable: str
    folder: str
    switch: tuple[str, str]
    below: str = ""
    seconds: float = 6.0

    def folder_in_use(self, environ: os._Environ[str] | dict[str, str]) -> Path | None:
        """Return where it keeps what it compiled; None where the user has switched that off, or lacks it."""
        if environ.get(*self.switch) != "1" or installed_version(self.distribution) is None:
            return None
        return Path(environ.get(self.variable) or os.path.expanduser(self.folder.replace("USER", getuser()))) / self.below


_TEMPORARY = tempfile.gettempdir()
_FLASH4 = "FLASH_ATTENTION_CUTE_DSL_CACHE"
_INDUCTOR = "TORCHINDUCTOR_"
COMPILERS = (
    Compiler(
        "inductor",
        "torch",
        frozenset(("flex", "flex_flash", "flex_decode", "torch_cp_flex")),
        f"{_INDUCTOR}CACHE_DIR",
        f"{_TEMPORARY}/torchinductor_USER",
        (f"{_INDUCTOR}FX_GRAPH_CACHE", "1"),
    ),
    Compiler(
        "flash-attn 4",
        "flash-attn-4",
        frozenset(("flash4", "flex_flash", "sdpa_fa4")),
        f"{_FLASH4}_DIR",
        f"{_TEMPORARY}/USER/flash_attention_cute_dsl_cache",
        (f"{_FLASH4}_ENABLED", "1"),
    ),
    Compiler(
        "FlashInfer",
        "flashinfer-python",
        frozenset(("flashinfer_fa2", "flashinfer_fa3")),
        "FLASHINFER_WORKSPACE_BASE",
        "~",
        ("", "1"),
        ".cache/flashinfer",
        seconds=90.0,
    ),
)


def compilers_of(name: str) -> list[Compiler]:
    """Return what compiles for a backend or a variant; loads neither."""
    base, _, variant = name.partition("+")
    by_torch = COMPILERS[:1] if variant in ("compile", "max_autotune") else ()
    return [one for one in COMPILERS if base in one.backends or one in by_torch]


def seconds_to_compile(name: str, compiles: bool) -> float:
    """Return how long a backend compiles for a workload, roughly; 0 where it does not. compiles: whether it says so."""
    return max((one.seconds for one in compilers_of(name)), default=Compiler.seconds if compiles else 0.0)


def share_cores(workers: int) -> None:
    """Have inductor take a worker's share of the cores for its processes, where the user has not said how many."""
    os.environ.setdefault(f"{_INDUCTOR}COMPILE_THREADS", str(max(1, usable_cores() // workers)))


def keeping_flash4() -> dict[str, str]:
    """Return what has flash-attn 4 keep what it compiles, where the user has not said whether it does."""
    switch, value = next(one.switch for one in COMPILERS if one.name == "flash-attn 4")
    return {} if switch in os.environ else {switch: value}


def kept_line(selected: Iterable[str]) -> str:
    """Say where what backends that are named compile is kept for the next run; "" where none of them compiles."""
    names = {*selected}
    asked = COMPILERS if "all" in names else {one for name in names for one in compilers_of(name)}
    folders = [(one.folder_in_use(os.environ), one.name) for one in COMPILERS if one in asked]
    shown = [f"{folder} ({name})" for folder, name in folders if folder]
    return f"attn: compiled kernels are kept in {', '.join(shown)}" if shown else ""
