"""The devices that a run may use, and torch itself, which may be missing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.machine import Machine


class NoTorchError(Exception):
    """torch is missing or cannot be imported."""


class Machines:
    """The device of --attn-device, and those that markers name; each is looked up once, when first asked for."""

    def __init__(self, default: str) -> None:
        self._default = default
        self._devices: dict[str, torch.device] = {}
        self._machines: dict[str, Machine] = {}

    def device(self, wanted: str | torch.device | None = None) -> torch.device:
        """Return the device of the run, or the one that a marker names.

        Raises NoTorchError where torch cannot be imported, ValueError where the device is not there.
        """
        wanted = str(wanted or self._default)
        if wanted not in self._devices:
            require_torch()
            from pytest_attn.backends.machine import resolve_device

            self._devices[wanted] = resolve_device(wanted)
            if self._devices[wanted].type == "cpu":
                _share_cores()
        return self._devices[wanted]

    def machine(self, wanted: str | torch.device | None = None) -> Machine:
        """Describe the device. Raises as `device` does."""
        device = self.device(wanted)
        if str(device) not in self._machines:
            from pytest_attn.backends.machine import machine_of

            self._machines[str(device)] = machine_of(device)
        return self._machines[str(device)]

    @property
    def known_default(self) -> Machine | None:
        """The machine of --attn-device, None while nothing has asked for it."""
        return self._machines.get(str(self._devices.get(self._default)))


def require_torch() -> None:
    """Raise NoTorchError, with torch's own words, unless it can be imported."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise NoTorchError("pytest-attn needs torch, which is not installed; pip install torch") from None
        raise NoTorchError(_broken(error)) from None
    except Exception as error:
        raise NoTorchError(_broken(error)) from None


def _broken(error: Exception) -> str:
    return f"torch is installed but cannot be imported: {type(error).__name__}: {error}; reinstall torch"


def _share_cores() -> None:
    """Give each xdist worker its share of the cores: threads of several workers on one core wait for one another, busily."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // workers)))
