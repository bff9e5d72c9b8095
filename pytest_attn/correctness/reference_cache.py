"""Exact attention for the checks of a run, computed once for all kernels that are compared with it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch

from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.reference import Reference, compute_reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.positions import has_long_sequences
from pytest_attn.workloads.workload import Workload

DEFAULT_CACHE_BYTES = 4 << 30


class ReferenceCache:
    """References shared by all kernels of a run; those unused for longest go when `limit` bytes are full."""

    def __init__(self, limit: int = DEFAULT_CACHE_BYTES) -> None:
        self.limit = limit
        self.computed = 0
        self._kept: OrderedDict[tuple[object, ...], Reference] = OrderedDict()

    def inputs_of(self, spec: CheckSpec, distribution: str) -> Inputs:
        """Return the inputs of one distribution."""
        return draw_inputs(spec.workload, distribution, spec.seed, spec.device)

    def reference_of(self, spec: CheckSpec, distribution: str | None = None, subject: Subject | None = None) -> Reference:
        """Return the reference of one distribution, by default the first.

        For a subject that quantizes its inputs it is exact attention on the quantized values, computed for this one only.
        """
        precision = spec.profile
        distribution = distribution or spec.inputs[0]
        with quiet():  # the arithmetic is ours, its warnings are not the test's
            if subject is not None and subject.is_approximate:
                given = self.inputs_of(spec, distribution)
                reference = compute_reference(_quantized_by(subject, given), precision, spec.backward)
                reference.given = given
                return reference
            wanted = tuple(spec.parameters)
            return self.get(spec.workload, distribution, spec.seed, spec.device, precision, spec.backward, wanted, spec.extra)

    def get(
        self,
        workload: Workload,
        distribution: str,
        seed: int,
        device: torch.device,
        precision: Precision,
        backward: bool,
        parameters: tuple[str, ...] = (),
        extra: tuple[str, ...] = (),
    ) -> Reference:
        """Return the reference, computing it where it is not kept; one with gradients also serves without."""
        for with_gradients in (True,) if backward else (False, True):
            key = (workload, distribution, seed, str(device), precision, with_gradients, parameters, extra)
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        draw = partial(draw_inputs, workload, distribution, seed, device)
        reference = compute_reference(_lean(draw, workload, backward), precision, backward, parameters=parameters, extra=extra)
        if reference.is_sampled or has_long_sequences(workload):
            reference.redraw = partial(_lean, draw, workload, backward)
        self.computed += 1
        self._kept[(workload, distribution, seed, str(device), precision, backward, parameters, extra)] = reference
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > self.limit:
            self._kept.popitem(last=False)
        if reference.nbytes > self.limit:
            self._kept.clear()
        return reference


def _lean(draw: Callable[..., Inputs], workload: Workload, backward: bool) -> Inputs:
    """Draw inputs; those of a long workload without dout where no gradient is asked for."""
    if backward or not has_long_sequences(workload):
        return draw()
    return draw(with_dout=False)


def _quantized_by(subject: Subject, given: Inputs) -> Inputs:
    """Return what a subject makes of its inputs; raise ContractError where that has other shapes."""
    made = subject.dequantized(given)
    for name in "qkv":
        shape = getattr(getattr(made, name, None), "shape", None)
        if shape != getattr(given, name).shape:
            found = type(made).__name__ if shape is None else f"{name} of shape {tuple(shape)}"
            raise ContractError(f"{subject.name}.dequantized returned {found}; expected {tuple(getattr(given, name).shape)}")
    return made
