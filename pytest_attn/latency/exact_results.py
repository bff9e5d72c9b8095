"""Comparison of what a timed call has left behind with attention on the data of that call.

It is compared with exact attention at rows that are drawn after the call.
"""

import dataclasses
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from pytest_attn.backends.defects import KnownDefect
from pytest_attn.correctness.comparison import TensorComparison
from pytest_attn.correctness.contract import EmptyRows, native_shape
from pytest_attn.correctness.judge import compare_rows
from pytest_attn.correctness.limits import Limits, limits_named, limits_of
from pytest_attn.correctness.reference import EXTRA, ExactRows, Expected, Held, exact_rows
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.latency.fresh_data import RandomPool, TensorSets, WholeSets
from pytest_attn.latency.work import LatencyDirection, names_of
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.kv_layout import canonical
from pytest_attn.workloads.workload import Workload

#: rows that are looked at of one result, and where probabilities are dropped, which takes more to tell
_ROWS, _ROWS_WITH_DROPOUT = 16, 64
#: how far beyond the limits of a check a timed result may be, which is looked at far more often
_ROOM = 2.0
#: the chance that nothing is dropped of a result, below which that is a fault
_CHANCE = 1e-9
#: standard deviations, and a share beside them, by which the size of a result with dropout may differ
_DEVIATIONS, _SHARE = 4.0, 0.25


class Attention:
    """Exact results of a timed call.

    names: of those that can be looked at, in the order in which a call returns them. results: those of a forward pass.
    quantized: what the kernel makes of its inputs, None for nothing. defects: those known of it on this workload and machine,
    by which a result may be off.
    """

    def __init__(
        self,
        spec: CheckSpec,
        inputs: Inputs,
        direction: LatencyDirection,
        quantized: Callable[[Inputs], Inputs] | None = None,
        defects: Sequence[KnownDefect] = (),
        results: tuple[str, ...] = ("out",),
    ) -> None:
        self._spec, self._quantized, self._defects = spec, quantized, defects
        of_keys = ("dk", "dv") if spec.workload.dropout else ()  # of which it leaves too few rows to tell
        self.names = tuple(name for name in names_of(direction, results) if name not in of_keys)
        nothing = inputs.q.new_empty(0)
        self._inputs = dataclasses.replace(inputs, q=nothing, k=nothing, v=nothing, dout=nothing)  # all that stays
        self._empty_rows = EmptyRows(inputs, spec.declared.empty_rows)
        self._limits = limits_named(spec.limits)
        self.chosen = random.Random(os.urandom(16))

    def sets_of(self, pool: RandomPool, number: int) -> TensorSets:
        """Return so many sets of what a kernel is given of q, k and v: all of it."""
        return WholeSets(pool, number)

    @property
    def workload(self) -> Workload:
        """What is computed."""
        return self._spec.workload

    def dout(self, drawn: Tensor) -> Tensor:
        """Return dout without what belongs to rows that see nothing, where these are the kernel's own affair."""
        if not self._empty_rows.are_there:
            return drawn
        return self._spec.in_layout(self._empty_rows.blanked(self._spec.in_layout(drawn)))

    def fault_of(self, results: Mapping[str, Tensor], tensors: Sequence[Tensor], dout: Tensor) -> str:
        """Say how results, as the kernel laid them out, are not those of what it was given; "" where they are.

        results: one of those of a forward pass, or dq, or dk and dv.
        """
        w, native = self._spec.workload, {name: self._native_of(name, result) for name, result in results.items()}
        held: Held | None = None
        for name, one in native.items():
            shape, held = self._expected_of(name, one)
            if tuple(one.shape) != shape:
                return f"{name} is of shape {tuple(one.shape)}, {shape} was expected"
            if one.device != tensors[0].device:  # whose work would not be a part of the time
                return f"{name} is on {one.device}, {tensors[0].device} was expected"
        rows = _ROWS_WITH_DROPOUT if w.dropout else _ROWS
        found = exact_rows(self._as_inputs(tensors, dout), self._spec.profile, list(native), rows, self.chosen, held)
        faults = [] if found is None else [self._fault_of(name, one, found, held) for name, one in native.items()]
        return next(filter(None, faults), "")

    def _fault_of(self, name: str, native: Tensor, found: ExactRows, held: Held | None) -> str:
        w, limits, expected = self._spec.workload, limits_of(name, self._limits), found.expected[name]
        got = self._empty_rows.forget_some(name, found.of(native, w, held), lambda rows: found.of(rows, w))
        is_dropped = bool(w.dropout) and name in ("out", "dq")
        is_clear = name not in ("lse", "max") and _is_clearly_right(got, expected, limits)
        if is_clear and is_dropped and (1 - w.dropout) ** (got.numel() // got.shape[-1]) < _CHANCE:
            return f"{name} is as if nothing were dropped; dropout={w.dropout:g}"
        if is_clear:
            return ""
        row = compare_rows(name, "randn", got, expected, w, limits)
        is_wrong = self._is_of_another_size(row) if is_dropped else row.excess > _ROOM
        if not is_wrong or any(d.explains(SimpleNamespace(tensors=(row,), changed=()), w) for d in self._defects):
            return ""
        if bool(got.isnan().any()):
            return "NaN: memory that was not written"
        if not bool(native.any()):
            return "it is zero everywhere, as if it had not been written yet"
        return f"{name} differs from exact attention by {row.relative_l2:.2g} of its norm"

    def _expected_of(self, name: str, native: Tensor) -> tuple[tuple[int, ...], Held | None]:
        """Return the shape that a native result must have, and what it has of all rows and heads, None for all."""
        return native_shape(name, self._spec.workload), None

    def _native_of(self, name: str, result: Tensor) -> Tensor:
        """Return a result with heads before rows, unless it is packed."""
        if name in EXTRA or name == "lse":
            return self._spec.declared.undeclared(name, result, self._spec.workload.is_packed)
        return self._native(result)

    def _native(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor with heads before rows, unless it is packed."""
        return tensor.transpose(1, 2) if self._spec.layout == "bshd" else tensor

    def _as_inputs(self, tensors: Sequence[Tensor], dout: Tensor) -> Inputs:
        """Return what a kernel was given as a reference takes it: `CheckSpec.handed`, backwards."""
        q, k, v = tensors
        if self._spec.workload.kv_pages is None:
            k, v = self._native(k), self._native(v)
        k, v = canonical(self._spec.workload, k, v)
        q, dout = self._native(q), self._native(dout)
        if self._quantized is None:
            return dataclasses.replace(self._inputs, q=q, k=k, v=v, dout=dout)
        return self._quantized(
            dataclasses.replace(self._inputs, q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), dout=dout)
        )

    def _is_of_another_size(self, row: TensorComparison) -> bool:
        """Return whether a result with dropout, whose mean is exact, lies elsewhere, with a slope that is not near 1."""
        w = self._spec.workload
        rows = row.elements / (w.v_head_dim if row.name == "out" else w.head_dim)
        deviation = math.sqrt(w.dropout / (1 - w.dropout) / rows)
        return not abs(row.alpha - 1) <= _SHARE + _DEVIATIONS * deviation or bool(row.wrong_positions)


#: a budget of zero, by which one can divide
_NO_BUDGET = 1e-37


def _is_clearly_right(got: Tensor, expected: Expected, limits: Limits) -> bool:
    """Return whether rows are finite and within the limits of a check, as far as one look at the device tells."""
    squares = ((got.double() - expected.value) / expected.tau.clamp(min=_NO_BUDGET)).square_()
    rows = squares.mean(-1)
    largest = torch.stack([squares.amax(), rows.amax(), rows.mean(-1).amax()]).sqrt_().tolist()
    return limits.excess(*largest) <= 1
