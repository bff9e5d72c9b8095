"""Offsets past 2^31, with little data."""

from __future__ import annotations

import dataclasses
import sys
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
    summary = "rows, heads and batch entries more than 2^31 elements apart give what near ones give, or are refused"
    calls = 8
    thorough = True

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Needs 4 GiB that are hardly touched: a CUDA device has them, or a system that gives memory when it is touched."""
        import torch

        if probe.device.type == "cpu":
            return None if sys.platform == "linux" else "needs 4 GiB that no system but Linux surely leaves untouched"
        if probe.device.type != "cuda":
            return "needs 4 GiB of a CUDA device"
        for defect in probe.subject.defects_on(probe.workload, machine_of(probe.device), probe.backward):
            if self.name in defect.invariants:  # one that ends the CUDA context is not shown again and again
                return f"known defect {defect.issue}: {defect.summary}"
        free, _ = torch.cuda.mem_get_info(probe.device)
        return None if free > 2 * _FAR * 4 else "the device has too little free memory"

    def run(self, probe: Probe) -> str:
        """Spread q, k, v and dout, one after the other, along each of their dimensions."""
        refusal, answered = "a single row has no offsets", False
        for name in ("q", "k", "v", "dout") if probe.backward else ("q", "k", "v"):
            for axis in _axes(getattr(probe.handed(), name)):
                tensors = probe.handed()
                spread = _spread(getattr(tensors, name), axis)
                try:
                    with refusals():
                        found = probe.call(dataclasses.replace(tensors, **{name: spread}))
                except RefusedError as error:
                    refusal = f"refused in its own words: {error}"
                    continue
                answered = True
                if changed := probe.change(found):
                    return f"{name} spread over more than 2^31 elements along dimension {axis}: {changed}"
        if not answered:
            raise NotApplicable(refusal)
        return ""


def _axes(tensor: Tensor) -> list[int]:
    """Return the dimensions but the last that can be spread, the longest first."""
    sizes = tensor.shape[:-1]
    return sorted((dim for dim in range(len(sizes)) if sizes[dim] > 1), key=lambda dim: -sizes[dim])


def _spread(tensor: Tensor, axis: int) -> Tensor:
    """Return the same values with a dimension spread over 2^31 elements."""
    sizes = tensor.shape[:-1]
    strides = list(tensor.stride())
    strides[axis] = -(-_FAR // (sizes[axis] - 1) // _ALIGNED) * _ALIGNED
    inner = 1
    for dim in reversed(range(tensor.dim())):
        if dim != axis:
            strides[dim] = inner
            inner *= tensor.shape[dim]
    if inner > strides[axis]:
        raise NotApplicable("the tensor is too large to be spread")
    try:
        memory = tensor.new_empty(strides[axis] * (sizes[axis] - 1) + inner)
    except RuntimeError as error:
        raise NotApplicable(f"no memory for it: {error}") from None
    return memory.as_strided(tensor.shape, strides).copy_(tensor)
