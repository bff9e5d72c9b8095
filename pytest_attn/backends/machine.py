"""The device under test and the software around it, as far as a backend must know them to refuse."""

from __future__ import annotations

import ctypes
import operator
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from pytest_attn.version import __version__

if TYPE_CHECKING:
    import torch

_COMPARISONS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "<": operator.lt, ">": operator.gt}


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None where it is not installed."""
    try:
        found = metadata.metadata(distribution)
    except metadata.PackageNotFoundError:
        return None
    versions: list[str] = found.get_all("Version") or []
    return versions[0] if versions else None  # a folder that an uninstallation left has none


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version before any suffix ("2.11.0a1+cu130": 2, 11, 0); none where it cannot be read."""
    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def satisfies(version: str, comparison: str, wanted: str) -> bool:
    """Return whether a version is ">=", "<=", "==", "<" or ">" another, as far as that is written: 2.7.4 is "==" 2.7."""
    theirs = release(wanted)
    mine = (*release(version), *(0 for _ in theirs))[: len(theirs)]
    return bool(_COMPARISONS[comparison](mine, theirs))


@dataclass(frozen=True)
class Machine:
    """One device.

    Args:
        device: its torch name, such as "cuda:0".
        name: its product's name.
        capability: compute capability, None where it has none.
        architecture: such as "sm90" or "gfx942".
        memory: bytes.
        device_count: how many of its kind there are.
        torch_version: of the torch that runs.
    """

    device: str
    name: str
    capability: tuple[int, int] | None
    architecture: str
    memory: int
    device_count: int
    torch_version: str

    @property
    def kind(self) -> str:
        """The device type: "cpu", "cuda", "xpu" or "mps"."""
        return self.device.partition(":")[0]

    @property
    def torch_release(self) -> tuple[int, ...]:
        """Torch's major and minor version."""
        return release(self.torch_version)[:2]


def is_device_name(text: str) -> bool:
    """Return whether `text` names a device, there or not: "cpu", "cuda", "cuda:N", "xpu", "xpu:N" or "mps"."""
    return re.fullmatch(r"cpu|(cuda|xpu)(:\d+)?|mps", text) is not None


def resolve_device(wanted: str = "auto") -> torch.device:
    """Return the torch device for "auto", "cpu", "cuda", "cuda:N", "xpu" or "mps".

    Raises ValueError where the name is unknown or the device is not there, saying which are.
    """
    import torch

    if wanted != "auto" and not is_device_name(wanted):
        raise ValueError(f"unknown device {wanted!r}; expected auto, cpu, cuda, cuda:N, xpu or mps")
    there = _devices()
    if wanted == "auto":
        return torch.device(next((d for d in there if d != "cpu"), "cpu"))
    name = wanted if wanted in ("cpu", "mps") or ":" in wanted else f"{wanted}:0"
    if name not in there:
        raise ValueError(f"device {wanted!r} is not there; this machine has {', '.join(there)}")
    return torch.device(name)


def _devices() -> list[str]:
    import torch

    found = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found += [f"xpu:{i}" for i in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


#: the driver's CU_CTX_SCHED_BLOCKING_SYNC
_ASLEEP = 4


def wait_asleep(device: torch.device) -> None:
    """Have this process sleep while it waits for a GPU, where the driver lets it, instead of looking again and again.

    Before it first uses the GPU. Each wait then lasts some microseconds longer: not for a process that times anything.
    """
    with suppress(OSError, AttributeError):
        driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), device.index or 0) == 0:
            driver.cuDevicePrimaryCtxSetFlags_v2(handle, _ASLEEP)


def wait(device: torch.device) -> None:
    """Wait for all that a device was asked to do."""
    if device.type in ("cuda", "xpu", "mps"):
        which = () if device.type == "mps" else (device,)
        getattr(sys.modules["torch"], device.type).synchronize(*which)


def current(device: torch.device | str) -> AbstractContextManager[object]:
    """Make a CUDA device the current one for a while: many libraries launch on that one, whatever their tensors' device."""
    import torch

    device = torch.device(device)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def machine_of(device: torch.device) -> Machine:
    """Describe a device that is there."""
    import torch

    architecture, capability, count = device.type, None, 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability, count = (properties.major, properties.minor), torch.cuda.device_count()
        name, memory = properties.name, properties.total_memory
        of_rocm = getattr(properties, "gcnArchName", "").partition(":")[0] if torch.version.hip else ""
        architecture = of_rocm or f"sm{properties.major}{properties.minor}"
    elif device.type == "xpu":
        name, memory = torch.xpu.get_device_name(device), torch.xpu.get_device_properties(device).total_memory
        count = torch.xpu.device_count()
    else:
        name, memory = _processor(), _system_memory()
    return Machine(str(device), name, capability, architecture, memory, count, torch.__version__)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = (line.partition(":")[2].strip() for line in info if line.startswith("model name"))
            return next(names, "CPU")
    except OSError:
        return platform.processor() or "CPU"


def usable_cores() -> int:
    """Count the logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _system_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62  # unknown: never the reason of a refusal


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
    if found:
        return found[1]
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
