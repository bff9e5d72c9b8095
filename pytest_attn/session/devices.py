"""The devices of a run; one GPU per xdist worker where asked, a lock for who times on it."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.reports.files import Lock

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.machine import Machine

_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: in a worker with a GPU of its own: how many workers have the same
_SHARERS = "PYTEST_ATTN_GPU_SHARERS"
_NO_GPU = "--attn-gpu-per-worker: there is no GPU that this process may use; leave it out"
#: the oldest release of torch, as in the extra `torch` of the package
OLDEST_TORCH = (2, 6)
_INSTALL_TORCH = 'pip install "pytest-attn[torch]"'
#: seconds to wait for another process that times on the same device
PATIENCE = 600.0
#: into how many parts what large tests may take of a device's memory is divided
_PARTS = 8
#: seconds for which a taken one is waited for before another is tried
_A_TRY = 0.02


# -- the devices of a run ------------------------------------------------------------------------------------------------


class NoTorchError(ImportError):
    """torch is missing, too old, or cannot be imported."""


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
            from pytest_attn.backends.machine import resolve_device, usable_cores, wait_asleep

            device, workers = resolve_device(wanted), count_workers()
            is_shared = device.type == "cpu" and device not in self._devices.values() and workers > 1
            if is_shared and "OMP_NUM_THREADS" not in os.environ:  # threads on one core wait for one another, busily
                import torch

                torch.set_num_threads(min(torch.get_num_threads(), max(1, usable_cores() // workers)))
            if device.type == "cuda" and sharers_of(_SHARERS in os.environ, device) > 1:
                wait_asleep(device)
            self._devices[wanted] = device
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
    """Raise NoTorchError, with torch's own words, unless it can be imported and is new enough."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise NoTorchError(f"pytest-attn needs torch, which is not installed; {_INSTALL_TORCH}") from None
        raise NoTorchError(_broken(error)) from None
    except Exception as error:
        raise NoTorchError(_broken(error)) from None
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and tuple(map(int, found.groups())) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise NoTorchError(f"pytest-attn needs torch {oldest} or newer, {torch.__version__} is installed; {_INSTALL_TORCH}")


def _broken(error: Exception) -> str:
    return f"torch is installed but cannot be imported: {type(error).__name__}: {error}; reinstall torch"


# -- a GPU for each worker of xdist --------------------------------------------------------------------------------------


def require_gpu(mine: Any) -> None:
    """Refuse a worker of this host, by execnet's specification of it, where there is no GPU. Raises pytest.UsageError."""
    if not _host_of(mine) and not visible_gpus():
        raise pytest.UsageError(_NO_GPU)


def take_own_gpu(config: pytest.Config) -> None:
    """In an xdist worker, see only the GPU that is its turn of the caller's list, before CUDA wakes.

    Raises pytest.UsageError where there is no GPU to take.
    """
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None:
        return
    number, workers = _place_of(worker)
    gpus = visible_gpus()
    if not gpus:
        raise pytest.UsageError(_NO_GPU)
    os.environ[_VISIBLE] = gpus[number % len(gpus)]
    os.environ[_SHARERS] = str(len(range(number % len(gpus), workers, len(gpus))))


def _place_of(worker: dict[str, Any]) -> tuple[int, int]:
    """Return which worker of its host this is, from 0, and how many that host has.

    The controller knows; its workers' ids count over all hosts and over those that it started again, or are names.
    """
    if "attn_place" in worker:
        number, workers = worker["attn_place"]
        return int(number), int(workers)
    counted = re.fullmatch(r"gw(\d+)", worker["workerid"])
    if not counted:
        raise pytest.UsageError(
            f"--attn-gpu-per-worker: nobody says which worker of its host {worker['workerid']!r} is; leave it out, or start"
            " the run with the same pytest-attn on every host"
        )
    return int(counted[1]), int(worker["workercount"])


def place_on_host(mine: Any, specs: Sequence[Any]) -> list[int]:
    """Return which worker of its host one of xdist's workers is, from 0, and how many that host has.

    mine, specs: execnet's specifications of this worker and of all. A restarted worker keeps its specification.
    """
    neighbors = [spec for spec in specs if _host_of(spec) == _host_of(mine)]
    place = next((index for index, spec in enumerate(neighbors) if spec is mine or spec.id == mine.id), 0)
    return [place, max(1, len(neighbors))]


def _host_of(spec: Any) -> str:
    """Return what tells the host of a worker from the others: "" is the controller's own.

    A proxy (`--px`, `via=`) stands for its host, and ssh's target may follow options.
    """
    if spec.via:
        return f"via {spec.via}"
    target = str(spec.ssh or spec.vagrant_ssh or spec.socket or "").split()
    name = target[-1].rpartition("@")[2] if target else ""
    if spec.socket:
        name = name.rpartition(":")[0]
    return "" if name in ("localhost", "127.0.0.1", "::1", socket.gethostname()) else name


def visible_gpus() -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES, or the indices of all GPUs, without waking CUDA."""
    listed = os.environ.get(_VISIBLE)
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip() and entry.strip() != "-1"]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]  # through NVML: no context


def untimed_because(gpu_per_worker: bool, device: torch.device) -> str | None:
    """Say why this process must not time: others work on the same device at the same time; None where it may."""
    if (sharers := sharers_of(gpu_per_worker, device)) == 1:
        return None
    if device.type != "cuda":
        return f"{sharers} workers share the {device.type}; latencies need -n 0"
    if not gpu_per_worker:
        return f"{sharers} workers share a GPU; latencies need -n 0, or --attn-gpu-per-worker with as many GPUs"
    return f"{sharers} workers share a GPU; latencies need at most as many workers as GPUs"


def sharers_of(gpu_per_worker: bool, device: torch.device) -> int:
    """Return how many workers of xdist work on this process's device, itself among them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return 1
    is_own = gpu_per_worker and device.type == "cuda"
    return int(os.environ.get(_SHARERS, "1")) if is_own else count_workers()


def count_workers() -> int:
    """Return how many workers of xdist the run has, of which this process is one; 1 where it has none."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


class NoLockError(Exception):
    """What keeps other processes from timing on a device cannot be opened; the text says which file that is, and why."""


@contextmanager
def device_lock(device: torch.device) -> Iterator[None]:
    """Let no other process of this kind time on the device meanwhile. Raises NoLockError."""
    lock = Lock.named(lock_name(device))
    try:
        lock.acquire(PATIENCE)
    except TimeoutError:
        pytest.fail(f"latency: another process has been timing on {device} for {PATIENCE:.0f} s ({lock.path})", pytrace=False)
    except OSError as error:
        raise NoLockError(
            f"{lock.path} cannot be locked, without which others may time on {device} meanwhile"
            f" ({error.strerror or error}); remove it, or set TMPDIR to another folder"
        ) from None
    with lock:
        yield


@contextmanager
def memory_lock(device: torch.device, share: float) -> Iterator[None]:
    """Hold a share of what large tests may take of the device's memory, once others of this kind leave it, or after long.

    share: from 0 to 1, of which _PARTS are held by whole ones. Who comes first takes first.
    """
    name = lock_name(device)
    parts = [Lock.named(f"memory-{part}-{name}") for part in range(_PARTS)]
    wanted, end, turns = min(_PARTS, math.ceil(share * _PARTS)), time.monotonic() + PATIENCE, cycle(parts)
    with ExitStack() as held:
        with suppress(OSError), Lock.named(f"memory-{name}").acquire(PATIENCE):  # too late, or none can be locked
            while sum(part.is_held for part in parts) < wanted and time.monotonic() < end:
                if not (part := next(turns)).is_held:
                    with suppress(TimeoutError):
                        held.enter_context(part.acquire(_A_TRY))
        yield


def lock_name(device: torch.device) -> str:
    """Name a device the same in every process, whatever part of the GPUs each sees."""
    if device.type != "cuda":
        return device.type
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"gpu-{uuid or os.environ.get(_VISIBLE, '') or device.index}"
