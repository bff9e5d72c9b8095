"""Which software a device is driven with, each by its version."""

from __future__ import annotations

import platform
import re
import warnings
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_attn.backends.machine import Machine


def versions_of(machine: Machine) -> dict[str, str]:
    """Return versions by name, without what is not there: of this package, Python, torch, Triton, CUDA or ROCm, the driver."""
    import torch

    found = {
        "pytest-attn": own_version(),
        "python": platform.python_version(),
        "torch": str(machine.torch_version),
        "triton": _distribution("triton"),
    }
    if machine.kind == "cuda":
        found |= {"cuda": torch.version.cuda, "rocm": torch.version.hip, "driver": _driver()}
        found["cudnn"] = str(torch.backends.cudnn.version() or "")  # type: ignore[no-untyped-call]
    return {name: version for name, version in found.items() if version}


def own_version() -> str:
    """Return the version of this package."""
    from pytest_attn import __version__

    return __version__


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package pynvml, which has the same module, warns that it is deprecated
            import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except Exception:  # no package, no driver, no permission
        return None
    return version.decode() if isinstance(version, bytes) else str(version)
