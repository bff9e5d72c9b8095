"""The device that tensors are on computes, whichever is the current one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.strides import refusals
from pytest_attn.invariants.invariant import Invariant, NotApplicable
from pytest_attn.invariants.probe import Probe

if TYPE_CHECKING:
    import torch


class Device(Invariant):
    """A kernel that is launched on the current device, whatever its tensors' device, reads memory of another one.

    It may end the CUDA context of the process, so only the thorough set asks.
    """

    name = "device"
    summary = "tensors on another GPU than the current one give what they give on that one"
    calls = 1
    thorough = True

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Needs two GPUs."""
        return "needs a second CUDA device" if _second_to(probe.device) is None else None

    def run(self, probe: Probe) -> str:
        """Call the kernel on tensors of another device, while that of the case stays the current one."""
        second = _second_to(probe.device)
        assert second is not None
        there = probe.on_device(second)
        try:
            with refusals():
                found = there.call(there.handed())
        except RefusedError as error:  # a callable may close over tensors of the first device
            raise NotApplicable(f"refused in its own words: {error}") from error
        changed = probe.change({name: tensor.to(probe.device) for name, tensor in found.items()})
        return f"tensors on {second}, while {probe.device} is the current device: {changed}" if changed else ""


def _second_to(device: torch.device) -> torch.device | None:
    import torch

    count = torch.cuda.device_count() if device.type == "cuda" else 0
    return torch.device("cuda", ((device.index or 0) + 1) % count) if count > 1 else None
