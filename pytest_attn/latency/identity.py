"""Which machine a time belongs to: what must be equal for two times to be compared, and what should be."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pytest_attn.backends.machine import Machine


@dataclass(frozen=True)
class Identity:
    """The hard keys: times of machines that differ in one of them are never compared.

    kind: "cuda", "cpu", ...; name: the full product name; units: multiprocessors of a GPU, logical cores of a CPU that this
    process may use; memory_gib: of a GPU, rounded, 0 for a CPU; mig: the MIG profile, "" where there is none.
    """

    kind: str
    name: str
    units: int
    memory_gib: int = 0
    mig: str = ""

    @property
    def slug(self) -> str:
        """The name as a file name: "nvidia-h200", "cpu-amd-epyc-9b14-2-cores"."""
        words = re.sub(r"\((?:r|tm)\)|\bcpu\b|\bprocessor\b|@.*", " ", self.name, flags=re.IGNORECASE)
        parts = [words, self.mig] if self.kind != "cpu" else ["cpu", words, f"{self.units} cores"]
        return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-") or "unknown"

    @property
    def full_slug(self) -> str:
        """The slug with every key, for the second machine of one name."""
        return f"{self.slug}-{self.units}-units-{self.memory_gib}-gib"

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types."""
        return asdict(self)


def identify(device: torch.device, machine: Machine) -> Identity:
    """Return the identity of a device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        mig = re.search(r"MIG\s+([\w.]+)", properties.name)
        gib = round(properties.total_memory / 2**30)
        return Identity("cuda", properties.name, properties.multi_processor_count, gib, mig[1] if mig else "")
    return Identity(device.type, machine.name, usable_cores() if device.type == "cpu" else 0)


def gpu_of(device: torch.device) -> str:
    """Return what tells a GPU from others of its name: the first digits of its UUID; "" for what is none."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", "") if device.type == "cuda" else ""
    return str(found).removeprefix("GPU-")[:8]


def usable_cores() -> int:
    """Count the logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def conditions_of(device: torch.device, read: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the soft keys: where these differ from a baseline's, times are compared only if the anchors agree.

    read: what NVML says of the device; its driver and power limit are taken from there.
    """
    found: dict[str, object] = {"torch": torch.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    if device.type == "cuda":
        found |= {"runtime": torch.version.cuda or torch.version.hip, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
        found |= {"triton": _version("triton")}
        found |= {key: (read or {}).get(key) for key in ("driver", "power_limit_w")}
    else:
        found |= {"blas": _blas(), "system": platform.system(), "interpreter": sys.version}  # whose speed is an anchor
    return {key: str(value) for key, value in sorted(found.items()) if value not in (None, "")}


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _blas() -> str:
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return found[1] if found else ""
