"""The SM clock of a GPU, locked on request while it is timed; latency/nvml.py asks."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_attn.latency.nvml import AbsentError, Gpu

if TYPE_CHECKING:
    import torch

#: NVML's code for a user who may not do this
_NO_PERMISSION = 4

_log = logging.getLogger(__name__)


class ClockError(Exception):
    """The clocks of a device cannot be locked, in NVML's words."""


@contextmanager
def locked_clocks(device: torch.device, megahertz: int | None) -> Iterator[int]:
    """Hold a GPU's SM clock at `megahertz` (None: the highest that it says it supports), and yield it.

    Undone when the block or the process ends, not when a signal kills it; a lock of somebody else goes with it, for NVML
    does not tell of one. Raises ClockError where the clock cannot be locked.
    """
    try:
        lock = _ClockLock(device, Gpu(device))
    except AbsentError as absent:
        raise ClockError(f"the clocks of {device} cannot be locked: {absent}; leave out --attn-lock-clocks") from absent
    atexit.register(lock.release)
    try:
        yield lock.hold(megahertz)
    finally:
        lock.release()
        atexit.unregister(lock.release)


class _ClockLock:
    """The SM clock of one GPU, locked and released once."""

    def __init__(self, device: torch.device, gpu: Gpu) -> None:
        self._device, self._gpu = device, gpu
        self._held = False

    def hold(self, megahertz: int | None) -> int:
        """Lock the clock and return it, in MHz. Raises ClockError."""
        wanted = self._gpu.highest_clock() if megahertz is None else megahertz
        refused = f"the clocks of {self._device} cannot be locked"
        if wanted is None:
            raise ClockError(f"{refused}: NVML does not say which it supports; name one")
        self._held = True  # before the call: what interrupts it may come after the lock
        try:
            self._gpu.lock_clocks(wanted)
        except Exception as error:
            self._held = False
            remedy = "run as root or " if getattr(error, "value", None) == _NO_PERMISSION else ""
            raise ClockError(f"{refused} at {wanted} MHz: {error}; {remedy}leave out --attn-lock-clocks") from error
        return wanted

    def release(self) -> None:
        """Unlock the clock, if it is held; a refusal is logged, since the test has had its result."""
        if not self._held:
            return
        try:
            self._gpu.unlock_clocks()
        except Exception as error:
            _log.warning("%s keeps its locked clocks: %s; nvidia-smi --reset-gpu-clocks", self._device, error)
        self._held = False
