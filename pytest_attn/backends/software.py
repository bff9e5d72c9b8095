"""The software that a device is driven with, each by its version."""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_attn.backends.machine import Machine
from pytest_attn.backends.versions import installed_version
from pytest_attn.version import __version__


def versions_of(machine: Machine) -> dict[str, str]:
    """Return versions by name, without what is not there: of this package, Python, torch, Triton, CUDA or ROCm, the driver."""
    import torch

    found = {
        "pytest-attn": __version__,
        "python": platform.python_version(),
        "torch": str(machine.torch_version),
        "triton": installed_version("triton"),
    }
    if machine.kind == "cuda":
        found |= {"cuda": torch.version.cuda, "rocm": torch.version.hip, "driver": _driver()}
        found["cudnn"] = str(torch.backends.cudnn.version() or "")  # type: ignore[no-untyped-call]
    return {name: version for name, version in found.items() if version}


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, as its kernel module says it, or NVML; None where neither does."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", file.read())
    except OSError:
        found = None
    return found[1] if found else _driver_by_nvml()


def _driver_by_nvml() -> str | None:
    try:
        with opened_nvml() as nvml:
            return text_of(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # no package, no driver, no permission
        return None


# -- NVML, for a few questions about the whole machine, without torch; latency/nvml.py watches one GPU -----------------------


@contextmanager
def opened_nvml() -> Iterator[Any]:
    """Hand out the module pynvml, initialized; raises whatever is raised without a package, a driver or a permission."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package pynvml, which has the same module, warns that it is deprecated
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def text_of(said: str | bytes) -> str:
    """Return what NVML says as text; old versions of pynvml return bytes."""
    return said.decode() if isinstance(said, bytes) else str(said)
