"""One GPU as NVML knows it: its clocks and why they are what they are, and the processes that compute on it."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import text_of

if TYPE_CHECKING:
    from types import ModuleType

    import torch

_NVML = Library(("nvidia-ml-py", "pynvml", "nvidia-ml-py3"), "pynvml", "pip install nvidia-ml-py")
POWER_CAP = "software power cap"
#: the bits of the event reasons, by number: their names changed from "throttle" to "event"
_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
#: what counts how long the clocks were held down: policies by their number, fields (since driver 565) by theirs
_POLICIES = {0: POWER_CAP, 1: "thermal violation"}
FIELDS = {269: "software thermal slowdown", 270: "hardware thermal slowdown", 271: "hardware power brake"}
_SUCCESS, _NOT_FOUND = 0, 6


class AbsentError(Exception):
    """NVML says nothing of a device."""


class Gpu:
    """One GPU as NVML knows it. A question that it does not answer is answered with None: no test fails of it."""

    def __init__(self, device: torch.device) -> None:
        """Find the device. Raises AbsentError where NVML is not there or does not know it."""
        import torch

        self._nvml = _nvml_for(device)
        try:
            torch.cuda.synchronize(device)  # makes the context with which NVML lists this process, to know it by
            self._nvml.nvmlInit()
            self._handle = _handle_of(device, self._nvml)
        except Exception as error:  # NVMLError, what torch raises without a driver, or what an old pynvml lacks
            raise AbsentError(f"NVML says nothing of {device}: {error}") from error
        self._is_slice = bool(self._ask("nvmlDeviceIsMigDeviceHandle", self._handle))
        whole = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", self._handle) if self._is_slice else None
        self._whole = self._handle if whole is None else whole  # clocks, heat and power are those of all slices

    def reasons(self) -> list[str] | None:
        """Say why the clocks are what they are now."""
        kinds = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        bits = self._first(kinds, self._whole)
        return None if bits is None else [word for bit, word in _REASONS.items() if bits & bit]

    def counters(self) -> dict[str, int]:
        """Return how long the clocks have been held down so far, by reason; only an increase means something."""
        read = {word: self._ask("nvmlDeviceGetViolationStatus", self._whole, policy) for policy, word in _POLICIES.items()}
        counted = {word: status.violationTime for word, status in read.items() if status is not None}
        fields = self._ask("nvmlDeviceGetFieldValues", self._whole, list(FIELDS)) or ()
        return counted | {FIELDS[field.fieldId]: field.value.ullVal for field in fields if field.nvmlReturn == _SUCCESS}

    def running(self) -> set[int] | None:
        """Return the pids of the processes that can compute on the GPU."""
        kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2")
        processes = self._first(kinds, self._handle)
        return None if processes is None else {process.pid for process in processes}

    def computing(self, since: int) -> set[int] | None:
        """Return the pids of the processes that computed since a time, in microseconds of the wall clock."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, since)
        except Exception as error:
            nobody = getattr(error, "value", None) in (_SUCCESS, _NOT_FOUND)  # pynvml raises success without samples
            return set() if nobody else None
        # some drivers leave entries unfilled: more than 100 %, or of no time
        return {sample.pid for sample in samples if sample.timeStamp > since and 0 < sample.smUtil <= 100}

    def conditions(self) -> dict[str, int | float | str]:
        """Return what could be read of the state of the GPU."""
        nvml, reasons, said = self._nvml, self.reasons(), self._ask("nvmlSystemGetDriverVersion")
        found = {
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", self._whole, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", self._whole, nvml.NVML_CLOCK_MEM),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", self._whole, nvml.NVML_TEMPERATURE_GPU),
            "power_w": _watts(self._ask("nvmlDeviceGetPowerUsage", self._whole)),
            "power_limit_w": _watts(self._ask("nvmlDeviceGetEnforcedPowerLimit", self._whole)),
            "driver": said and text_of(said),
            "reasons": None if reasons is None else ", ".join(reasons),
            "mig": self._mig(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def has_nvlink_to(self, other: Gpu) -> bool | None:
        """Say whether NVLink connects the two; None where nobody knows."""
        index = getattr(self._nvml, "NVML_P2P_CAPS_INDEX_NVLINK", None)
        if index is None:
            return None
        status = self._ask("nvmlDeviceGetP2PStatus", self._whole, other._whole, index)
        return None if status is None else bool(status == _SUCCESS)

    def highest_clock(self) -> int | None:
        """Return the highest SM clock that the GPU says it supports, in MHz."""
        memory = self._ask("nvmlDeviceGetSupportedMemoryClocks", self._whole) or [0]
        clocks = self._ask("nvmlDeviceGetSupportedGraphicsClocks", self._whole, max(memory))
        highest = max(clocks) if clocks else self._ask("nvmlDeviceGetMaxClockInfo", self._whole, self._nvml.NVML_CLOCK_SM)
        return None if highest is None else int(highest)

    def lock_clocks(self, megahertz: int) -> None:
        """Hold the SM clock. Raises NVMLError."""
        self._nvml.nvmlDeviceSetGpuLockedClocks(self._whole, megahertz, megahertz)

    def unlock_clocks(self) -> None:
        """Let the SM clock go. Raises NVMLError."""
        self._nvml.nvmlDeviceResetGpuLockedClocks(self._whole)

    def _mig(self) -> str | None:
        if self._is_slice:
            return text_of(self._ask("nvmlDeviceGetName", self._handle) or "on")
        mode = self._ask("nvmlDeviceGetMigMode", self._whole)
        return None if mode is None else "on" if mode[0] else ""

    def _ask(self, function: str, *arguments: object) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception:  # NVMLError, what an old pynvml lacks, and where it is newer than the driver an error of its own
            return None

    def _first(self, functions: tuple[str, ...], *arguments: object) -> Any:
        answers = (self._ask(function, *arguments) for function in functions)
        return next((answer for answer in answers if answer is not None), None)


def _nvml_for(device: torch.device) -> ModuleType:
    import torch

    if device.type != "cuda" or torch.version.hip:
        raise AbsentError(f"{device} is not an NVIDIA GPU")
    missing = _NVML.missing_because()
    if missing:
        raise AbsentError(missing)
    try:
        return _NVML.load()
    except RuntimeError as error:
        raise AbsentError(str(error)) from error


def _handle_of(device: torch.device, nvml: ModuleType) -> Any:
    """Return NVML's handle of a device by the first of its names that NVML knows. Raises what it said to the first one."""
    errors = []
    for function, name in _names_of(device):
        handle, error = _tried(nvml, function, name)
        if error is None:
            return handle
        errors.append(error)
    raise errors[0]


def _tried(nvml: ModuleType, function: str, name: bytes | int) -> tuple[Any, Exception | None]:
    try:
        return getattr(nvml, function)(name), None
    except Exception as error:
        return None, error


def _names_of(device: torch.device) -> Iterator[tuple[str, bytes | int]]:
    """Yield what NVML may know a device by; as bytes, which every pynvml takes."""
    import torch

    by_uuid, by_bus = "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByPciBusId"
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        yield by_uuid, f"GPU-{uuid}".encode()
        yield by_uuid, f"MIG-{uuid}".encode()
    place: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in place:
        yield by_bus, "{:08X}:{:02X}:{:02X}.0".format(*place).encode()
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    entry = visible[index] if index < len(visible) and visible[index] else str(index)
    yield ("nvmlDeviceGetHandleByIndex", int(entry)) if entry.isdigit() else (by_uuid, entry.encode())


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else round(milliwatts / 1000, 1)


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
    refused, held = f"the clocks of {device} cannot be locked", list[int]()
    try:
        gpu = Gpu(device)
    except AbsentError as absent:
        raise ClockError(f"{refused}: {absent}; leave out --attn-lock-clocks") from absent

    def release() -> None:
        """Unlock the clock, if it is held; a refusal is logged, since the test has had its result."""
        if not held:
            return
        try:
            gpu.unlock_clocks()
        except Exception as error:
            _log.warning("%s keeps its locked clocks: %s; nvidia-smi --reset-gpu-clocks", device, error)
        held.clear()

    atexit.register(release)
    try:
        wanted = gpu.highest_clock() if megahertz is None else megahertz
        if wanted is None:
            raise ClockError(f"{refused}: NVML does not say which it supports; name one")
        held.append(wanted)  # before the call: what interrupts it may come after the lock
        try:
            gpu.lock_clocks(wanted)
        except Exception as error:
            held.clear()
            remedy = "run as root or " if getattr(error, "value", None) == _NO_PERMISSION else ""
            raise ClockError(f"{refused} at {wanted} MHz: {error}; {remedy}leave out --attn-lock-clocks") from error
        yield wanted
    finally:
        release()
        atexit.unregister(release)
