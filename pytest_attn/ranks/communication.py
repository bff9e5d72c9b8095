"""How long a call's NCCL kernels ran on a GPU, and all others, from torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_attn.latency.work import Work, wait

if TYPE_CHECKING:
    import torch

#: calls that are profiled, of which the last counts: the profiler's own start takes part of the first
_CALLS = 3
_MICROSECOND = 1e-6


def communication_of(work: Work, device: torch.device) -> dict[str, float] | None:
    """Return seconds of the last of a few calls: its span on the device, NCCL's kernels, and others; None without kernels.

    Every rank makes as many calls. Kernels that run at the same time count once, in each of the two sums.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    spans: list[tuple[float, float, str]] = []
    for _ in range(_CALLS):
        call = work.stage()
        wait(device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            wait(device)
        spans = [
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        ]
    return seconds_of(spans)


def seconds_of(spans: Iterable[tuple[float, float, str]]) -> dict[str, float] | None:
    """Return the span, NCCL's share and the others' of kernels: (begin, end, name), in microseconds."""
    found = [one for one in spans if not one[2].startswith(("aten::", "cuda", "nccl:"))]
    if not found:
        return None
    nccl = [one for one in found if "nccl" in one[2].lower()]
    others = [one for one in found if "nccl" not in one[2].lower()]
    whole = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
    return {"span": whole * _MICROSECOND, "inside": _covered(nccl), "own": _covered(others)}


def _covered(spans: Iterable[tuple[float, float, str]]) -> float:
    """Return the seconds during which at least one of some kernels ran."""
    covered, until = 0.0, float("-inf")
    for begin, end, _ in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered * _MICROSECOND
