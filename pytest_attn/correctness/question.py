"""What is asked of a kernel: a workload, its inputs, how to judge; and exact attention on these, kept for all that ask."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import quiet
from pytest_attn.correctness.compare import ContractError, limits_named
from pytest_attn.correctness.precision import PRECISIONS, Precision, precision_named
from pytest_attn.correctness.reference import Reference, compute_reference
from pytest_attn.workloads.inputs import Inputs, distribution_names, draw_inputs
from pytest_attn.workloads.masks import function_label, function_name
from pytest_attn.workloads.workload import LAYOUTS, Workload

if TYPE_CHECKING:
    import torch

DEFAULT_CACHE_BYTES = 4 << 30


class ReferenceCache:
    """References shared by all callables of a run; those unused for longest go when `limit` bytes are full."""

    def __init__(self, limit: int = DEFAULT_CACHE_BYTES) -> None:
        self.limit = limit
        self.computed = 0
        self._kept: OrderedDict[tuple[object, ...], Reference] = OrderedDict()

    def get(
        self, workload: Workload, distribution: str, seed: int, device: torch.device, precision: Precision, backward: bool
    ) -> Reference:
        """Return the reference, computing it where it is not kept; one with gradients also serves without."""
        for with_gradients in (True,) if backward else (False, True):
            key = (workload, distribution, seed, str(device), precision, with_gradients)
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        inputs = draw_inputs(workload, distribution, seed, device)
        reference = compute_reference(inputs, precision, backward)
        self.computed += 1
        self._kept[(workload, distribution, seed, str(device), precision, backward)] = reference
        while len(self._kept) > 1 and sum(map(_held_bytes, self._kept.values())) > self.limit:
            self._kept.popitem(last=False)
        if _held_bytes(reference) > self.limit:
            self._kept.clear()
        return reference


def _held_bytes(reference: Reference) -> int:
    i = reference.inputs
    return reference.nbytes + sum(t.nbytes for t in (i.q, i.k, i.v, i.dout))


@dataclass(frozen=True)
class Question:
    """All that a judgement depends on, beside the callable. Raises ValueError for a value that is not one of the known."""

    workload: Workload
    device: torch.device
    backward: bool = False
    inputs: tuple[str, ...] = ("structured", "flat")
    precision: str = "flash"
    layout: str = "bhsd"
    returns_lse: bool = False
    seed: int = 0
    limits: str = "default"

    def __post_init__(self) -> None:
        precision_named(self.precision)
        limits_named(self.limits)
        distribution_names(self.inputs)
        if not isinstance(self.workload, Workload):
            raise ValueError(f"workload must be a name or a Workload, got {self.workload!r}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number >= 0, got {self.seed!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout {self.layout!r}; known: {', '.join(LAYOUTS)}")
        if (self.layout == "thd") != self.workload.is_packed:
            if self.layout == "thd":
                raise ValueError(f"layout 'thd' needs a packed workload (q_lens), {self.workload.id} is not one")
            object.__setattr__(self, "layout", "thd")
        if self.backward and self.workload.kv_pages:
            raise ValueError(f"{self.workload.id} reads paged keys, which have no gradient; leave out backward=True")

    def put_to(self, subject: object) -> Question:
        """Return the question as a backend answers it: in the native layout, with the precision and lse that it declares.

        A callable answers it as it is. Raises ValueError for a backend of an unknown precision.
        """
        if not isinstance(subject, Backend):
            return self
        precision = subject.precision_on(self.device.type)
        if precision not in PRECISIONS:
            raise ValueError(f"backend {subject.name!r}: unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
        layout = "thd" if self.workload.is_packed else "bhsd"
        return dataclasses.replace(self, precision=precision, returns_lse=subject.returns_lse, layout=layout)

    def draw(self, distribution: str) -> Inputs:
        """Return the inputs of one distribution."""
        return draw_inputs(self.workload, distribution, self.seed, self.device)

    def reference(self, cache: ReferenceCache, distribution: str | None = None, subject: object = None) -> Reference:
        """Return the reference of one distribution, by default the first.

        For a backend that quantises its inputs it is exact attention on the quantised values, kept for this backend only.
        """
        precision = precision_named(self.precision)
        distribution = distribution or self.inputs[0]
        with quiet():  # the arithmetic is ours, its warnings are not the test's
            if not isinstance(subject, Backend) or not subject.is_approximate:
                return cache.get(self.workload, distribution, self.seed, self.device, precision, self.backward)
            given = self.draw(distribution)
            reference = compute_reference(_quantised_by(subject, given), precision, self.backward)
            reference.given = given
            return reference


def _quantised_by(subject: Backend, given: Inputs) -> Inputs:
    """Return what the backend makes of its inputs; raise ContractError where that has other shapes."""
    made = subject.dequantised(given)
    for name in "qkv":
        shape = getattr(getattr(made, name, None), "shape", None)
        if shape != getattr(given, name).shape:
            found = type(made).__name__ if shape is None else f"{name} of shape {tuple(shape)}"
            raise ContractError(f"{subject.name}.dequantised returned {found}; expected {tuple(getattr(given, name).shape)}")
    return made


def in_layout(tensor: torch.Tensor, question: Question, is_kv: bool = False) -> torch.Tensor:
    """Swap rows and heads for "bshd", there and back; page pools have a layout of their own."""
    if question.layout != "bshd" or (is_kv and question.workload.kv_pages):
        return tensor
    return tensor.transpose(1, 2).contiguous()


def subject_name(subject: object) -> str:
    """Return what to call a backend or callable in messages."""
    if isinstance(subject, Backend):
        return subject.name
    return function_name(subject) if isinstance(subject, functools.partial) else function_label(subject)
