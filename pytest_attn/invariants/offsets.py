"""P12: offsets past 2^31, with little data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.strides import refusals
from pytest_attn.invariants.invariant import Invariant, NotApplicable
from pytest_attn.invariants.probe import Probe

if TYPE_CHECKING:
    from torch import Tensor

_FAR = 2**31 + 2**20
_ALIGNED = 64


class Offsets(Invariant):
    """A tensor whose last row lies more than 2^31 elements after its first is a tensor like others."""

    name = "offsets"
    summary = "rows or heads of q, k and v more than 2^31 elements apart give what near ones give, or are refused"
    calls = 3
    thorough = True

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Needs 4 GiB that are never written, which a CPU may not have."""
        import torch

        if probe.device.type != "cuda":
            return "needs 4 GiB of a CUDA device"
        for defect in probe.subject.defects_on(probe.workload, machine_of(probe.device), probe.backward):
            if self.name in defect.invariants:  # one that ends the CUDA context is not shown again and again
                return f"known defect {defect.issue}: {defect.summary}"
        free, _ = torch.cuda.mem_get_info(probe.device)
        return None if free > 2 * _FAR * 4 else "the device has too little free memory"

    def run(self, probe: Probe) -> str:
        """Spread q, k and v, one after the other."""
        refusal, answered = "", False
        for name in ("q", "k", "v"):
            tensors = probe.handed()
            try:
                with refusals():
                    found = probe.call(dataclasses.replace(tensors, **{name: _spread(getattr(tensors, name))}))
            except RefusedError as error:
                refusal = f"refused in its own words: {error}"
                continue
            answered = True
            if changed := probe.change(found):
                return f"{name} spread over more than 2^31 elements: {changed}"
        if not answered:
            raise NotApplicable(refusal)
        return ""


def _spread(tensor: Tensor) -> Tensor:
    """Return the same values with its longest dimension but the last spread over 2^31 elements."""
    sizes = tensor.shape[:-1]
    axis = max(range(len(sizes)), key=lambda dim: sizes[dim])
    if sizes[axis] == 1:
        raise NotApplicable("a single row has no offsets")
    strides = list(tensor.stride())
    strides[axis] = -(-_FAR // (sizes[axis] - 1) // _ALIGNED) * _ALIGNED
    inner = 1
    for dim in reversed(range(tensor.dim())):
        if dim != axis:
            strides[dim] = inner
            inner *= tensor.shape[dim]
    if inner > strides[axis]:
        raise NotApplicable("the tensor is too large to be spread")
    memory = tensor.new_empty(strides[axis] * (sizes[axis] - 1) + inner)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)
