"""Single calls of a work on an idle device, and their results looked at."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from pytest_attn.latency.work import Work

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


class TimedCall(NamedTuple):
    """One call on an idle device: its result, and the host's seconds until it was launched, and until it was done."""

    value: object
    launched: float
    done: float


def verified(work: Work) -> TimedCall:
    """Call a work and look at the result, which must be that of the data as it is; then change the data for the next look."""
    call = called(work)
    work.verify("called again after its data changed in place", work.result(call.value))
    work.refresh()
    return call


def called(work: Work) -> TimedCall:
    """Call a work once."""
    call = work.stage()
    wait(work.device)
    begun = time.perf_counter()
    value = call()
    launched = time.perf_counter() - begun
    wait(work.device)
    return TimedCall(value, launched, time.perf_counter() - begun)


def wait(device: torch.device) -> None:
    """Wait for all that a device was asked to do."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type in ("xpu", "mps"):
        getattr(torch, device.type).synchronize()
