"""P2: strides say where elements lie, not what attention is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.strides import fused, refusals, swapped
from pytest_attn.invariants.call import Tensors
from pytest_attn.invariants.invariant import Invariant, NotApplicable
from pytest_attn.invariants.probe import Probe

if TYPE_CHECKING:
    from torch import Tensor

#: A tensor with the same shape and values, and other strides.
Relaid: TypeAlias = "Callable[[Tensor], Tensor]"


def padded(tensor: Tensor) -> Tensor:
    """Rows, vectors and heads have room behind them, so that no stride is a product of sizes."""
    first, *middle, rows, dim = tensor.shape
    memory = tensor.new_full((first, *(size + 1 for size in middle), rows + 2, dim + 8), 7)
    for axis, size in enumerate(tensor.shape):
        memory = memory.narrow(axis, 0, size)
    return memory.copy_(tensor)


def innermost(tensor: Tensor) -> Tensor:
    """Elements of a head's vector lie two apart."""
    import torch

    return torch.stack([tensor, tensor + 1], -1)[..., 0]


def odd_where_one(tensor: Tensor) -> Tensor:
    """Dimensions of size 1 have strides that mean nothing."""
    strides = [7 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def same(tensor: Tensor) -> Tensor:
    """The tensor as it is."""
    return tensor


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How q, k, v and dout lie, in words and in fact."""

    words: str
    q: Relaid
    k: Relaid
    v: Relaid
    dout: Relaid

    def of(self, tensors: Tensors) -> Tensors:
        """Lay the tensors out."""
        return Tensors(self.q(tensors.q), self.k(tensors.k), self.v(tensors.v), self.dout(tensors.dout))


def _all(words: str, relaid: Relaid) -> Arrangement:
    return Arrangement(words, relaid, relaid, relaid, relaid)


_DEFAULT = (
    _all("q, k, v and dout with heads and rows swapped in memory", swapped),
    Arrangement(
        "k a slice of a wider tensor, v swapped in memory, strides of 7 in q's dimensions of size 1",
        odd_where_one,
        fused,
        swapped,
        padded,
    ),
    Arrangement("elements of q's, k's and v's vectors two apart", innermost, innermost, innermost, same),
)
_THOROUGH = (
    Arrangement("q alone a slice of a wider tensor", fused, same, same, same),
    Arrangement("q alone swapped in memory", swapped, same, same, same),
    Arrangement("k alone with room behind its rows", same, padded, same, same),
    Arrangement("v alone swapped in memory", same, same, swapped, same),
    Arrangement("q, k and v slices of one wider tensor each", fused, fused, fused, same),
    Arrangement("dout alone swapped in memory", same, same, same, swapped),
    Arrangement("dout's elements two apart", same, same, same, innermost),
    _all("strides of 7 in dimensions of size 1", odd_where_one),
)


class Layout(Invariant):
    """The same values with other strides give the same result, or a refusal."""

    name = "layout"
    summary = "tensors with other strides give what contiguous ones give, or are refused"
    calls = len(_DEFAULT) + 1

    def run(self, probe: Probe) -> str:
        """Call with each arrangement that is no refusal."""
        base, refusal, answered = probe.base, "", 0
        for arrangement in _arrangements(probe):
            try:
                with refusals():
                    found = probe.call(arrangement.of(probe.handed()))
            except RefusedError as error:
                refusal = f"{arrangement.words}: refused in its own words: {_first_line(error)}"
                continue
            answered += 1
            if changed := probe.change(found, base):
                return f"{arrangement.words}: {changed}"
        if broken := _expanded(probe):
            return broken
        if not answered:
            raise NotApplicable(refusal)
        return ""


def _arrangements(probe: Probe) -> tuple[Arrangement, ...]:
    """Choose arrangements: all, the default ones, or the most mixed of these where each costs a compilation."""
    if probe.thorough:
        return *_DEFAULT, *_THOROUGH
    return _DEFAULT[1:2] if probe.is_compiled else _DEFAULT


def _expanded(probe: Probe) -> str:
    """Call with all key heads one, of stride 0, and dout one row, against the same values in contiguous tensors."""
    if probe.workload.kv_pages is not None or not probe.is_short:
        return ""
    axis = 1 if probe.spec.layout != "bshd" else 2
    tensors = probe.handed()

    def one_head(tensor: Tensor) -> Tensor:
        return tensor.narrow(axis, 0, 1).expand(tensor.shape)

    dout = tensors.dout.narrow(-1, 0, 1).expand(tensors.dout.shape)
    try:
        with refusals():
            found = probe.call(Tensors(tensors.q, one_head(tensors.k), one_head(tensors.v), dout))
    except RefusedError:
        return ""
    of_heads = 1 if not probe.workload.is_packed else -2
    inputs = probe.inputs

    def written_out(tensor: Tensor, axis: int) -> Tensor:
        return tensor.narrow(axis, 0, 1).expand(tensor.shape).contiguous()

    values = dataclasses.replace(
        inputs, k=written_out(inputs.k, of_heads), v=written_out(inputs.v, of_heads), dout=written_out(inputs.dout, -1)
    )
    misfit = probe.misfit(found, values)
    return f"k and v with heads of stride 0, dout with elements of stride 0: {misfit}" if misfit else ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
