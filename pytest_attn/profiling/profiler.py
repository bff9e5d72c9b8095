"""Which kernels a call really launches, and how long each takes, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_attn.backends.contexts import quiet
from pytest_attn.latency.peak import peak_of
from pytest_attn.profiling.kernels import name_of
from pytest_attn.workloads.workload import Direction, Workload

if TYPE_CHECKING:
    import torch


class Launch(NamedTuple):
    """One kernel (on a CPU: one operator): its words, how often it was called, and its time on the device in seconds."""

    framework: str
    category: str
    architecture: str
    operation: str
    symbol: str
    calls: int
    seconds: float

    @property
    def words(self) -> str:
        """What is known of the kernel, in one line."""
        return " ".join(word for word in self[:4] if word)


@dataclass(frozen=True)
class Profile:
    """The launches of one call in one direction, longest first.

    peak_memory: bytes asked for beyond what was there before the call, None on a CPU. roofline: the least seconds that
    the workload's flops and bytes allow on this device, None where its ceilings are not known.
    """

    direction: Direction
    launches: tuple[Launch, ...]
    peak_memory: int | None
    flops: int
    roofline: float | None = None

    @property
    def seconds(self) -> float:
        """Device time of all launches."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def symbols(self) -> list[str]:
        """The kernels' symbols."""
        return [launch.symbol for launch in self.launches]

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types only, for reports."""
        launches = [launch._asdict() for launch in self.launches]
        return {**vars(self), "launches": launches, "seconds": self.seconds}


def profile_call(
    call: Callable[[], object],
    device: torch.device,
    workload: Workload,
    direction: Direction,
    ceilings: tuple[float, float] | None = None,
) -> Profile:
    """Profile one call; the caller has warmed it up. ceilings: (FLOP/s, bytes/s) of the device."""
    from torch.profiler import ProfilerActivity, profile

    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
    peak = None
    with quiet(), profile(activities=activities) as profiler:
        if on_cuda:
            peak = peak_of(call, device)
        else:
            call()
    flops = workload.flops(direction)
    roofline = max(flops / ceilings[0], workload.bytes(direction) / ceilings[1]) if ceilings else None
    return Profile(direction, tuple(_launches(profiler, on_cuda)), peak, flops, roofline)


def launches_of(call: Callable[[], object], device: torch.device) -> list[Launch]:
    """Return what a call launches, longest first."""
    from torch.profiler import ProfilerActivity, profile

    on_cuda = device.type == "cuda"
    with quiet(), profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
        call()
        if on_cuda:
            import torch

            torch.cuda.synchronize(device)
    return _launches(profiler, on_cuda)


def _launches(profiler: Any, on_cuda: bool) -> list[Launch]:
    """Sum up the profiler's events by kernel; on a CPU, the operators that do work themselves."""
    from torch._C._autograd import DeviceType

    wanted = DeviceType.CUDA if on_cuda else DeviceType.CPU
    found = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if event.device_type != wanted or microseconds <= 0 or _is_bookkeeping(event.key, on_cuda):
            continue
        found.append(Launch(*name_of(event.key), event.key, event.count, microseconds * 1e-6))
    return sorted(found, key=lambda launch: -launch.seconds)


def _is_bookkeeping(key: str, on_cuda: bool) -> bool:
    return not on_cuda and not key.startswith(("aten::", "cpp_", "graph_", "Torch-Compiled"))
