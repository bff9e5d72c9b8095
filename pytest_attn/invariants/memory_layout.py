"""Strides say where elements lie, not what attention is."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.call import fused, refusals, swapped
from pytest_attn.invariants.invariant import (
    ANY_STRIDES,
    NotApplicable,
    Probe,
    Tensors,
    first_difference,
    invariant,
    on,
    prefixed,
)
from pytest_attn.invariants.poison import unowned_keys
from pytest_attn.workloads.dtypes import beside

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
    return torch.stack([tensor, beside(tensor, 1)], -1)[..., 0]


def same(tensor: Tensor) -> Tensor:
    """The tensor as it is."""
    return tensor


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Arrangement of q, k, v and dout in memory, in words and in fact."""

    words: str
    q: Relaid = same
    k: Relaid = same
    v: Relaid = same
    dout: Relaid = same

    def of(self, tensors: Tensors) -> Tensors:
        """Lay the tensors out."""
        return Tensors(self.q(tensors.q), self.k(tensors.k), self.v(tensors.v), self.dout(tensors.dout))


def all_of(words: str, relaid: Relaid) -> Arrangement:
    """Return the arrangement in which all four tensors lie so."""
    return Arrangement(words, relaid, relaid, relaid, relaid)


#: as models hand tensors over: a slice of a wider tensor beside what one projection is seen by heads; values that alone were
#: not written anew; and a gradient that comes from another layer than that of the call before, on which q, k and v lie as
#: they did. All four alike are what `check` has
_DEFAULT = (
    Arrangement(
        "k a slice of a wider tensor, q, v and dout with heads and rows swapped in memory", swapped, fused, swapped, swapped
    ),
    Arrangement("v alone swapped in memory", v=swapped),
    Arrangement("v and dout swapped in memory, where v alone was right", v=swapped, dout=swapped),
)
_DOUT_ALONE = Arrangement("dout alone swapped in memory", dout=swapped)
_THOROUGH = (
    all_of("q, k, v and dout with heads and rows swapped in memory", swapped),
    _DOUT_ALONE,
    Arrangement("elements of q's, k's and v's vectors two apart", innermost, innermost, innermost),
    Arrangement("q alone a slice of a wider tensor", fused),
    Arrangement("q alone swapped in memory", swapped),
    Arrangement("k alone with room behind its rows", k=padded),
    Arrangement("q, k and v slices of one wider tensor each", fused, fused, fused),
    Arrangement("dout alone with room behind its rows", dout=padded),
    Arrangement("dout's elements two apart", dout=innermost),
)


@invariant(
    "layout",
    "tensors with other strides give the result of contiguous ones, or are refused",
    calls=len(_DEFAULT) + 2,
    needs=(ANY_STRIDES,),
)
def layout(probe: Probe) -> str:
    """The same values with other strides give the same result, or a refusal."""
    if probe.thorough:
        arrangements: tuple[Arrangement, ...] = (*_DEFAULT, *_THOROUGH)
    elif probe.is_compiled:  # each of q, k and v costs a compilation: the most mixed one
        arrangements = (*_DEFAULT[:1], *([_DOUT_ALONE] if probe.backward else []))
    else:
        arrangements = _DEFAULT if probe.backward else _DEFAULT[:2]
    return judge_arrangements(probe, arrangements, _expanded)


def judge_arrangements(
    probe: Probe, arrangements: Iterable[Arrangement], afterwards: Callable[[Probe], str] = lambda probe: ""
) -> str:
    """Return how an arrangement changes the results, "" where none does; raises NotApplicable where all are refused.

    afterwards: what else is asked where none changes them.
    """
    base, refusal, answered = probe.base, "", 0
    for arrangement in arrangements:
        try:
            with on(arrangement.words), refusals():
                found = probe.call(arrangement.of(probe.handed()))
        except RefusedError as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            refusal = f"{arrangement.words}: refused in its own words: {first_line}"
            continue
        answered += 1
        if changed := probe.moved(found, base):
            return f"{arrangement.words}: {changed}"
    if broken := afterwards(probe):
        return broken
    if not answered:
        raise NotApplicable(refusal)
    return ""


def _expanded(probe: Probe) -> str:
    """Call with all key heads one, of stride 0, and dout one row, against the same values in contiguous tensors."""
    if probe.workload.kv_pages is not None or not probe.is_short:
        return ""

    def repeated(tensor: Tensor, axis: int) -> Tensor:
        return tensor.narrow(axis, 0, 1).expand(tensor.shape)

    tensors, inputs = probe.handed(), probe.inputs
    heads = 1 if probe.spec.layout != "bshd" else 2
    expanded = Tensors(tensors.q, repeated(tensors.k, heads), repeated(tensors.v, heads), repeated(tensors.dout, -1))
    words = "k and v with heads of stride 0, dout with elements of stride 0"
    try:
        with on(words), refusals():
            found = probe.call(expanded)
    except RefusedError:
        return ""
    heads = 1 if not probe.workload.is_packed else -2
    values = {"k": repeated(inputs.k, heads), "v": repeated(inputs.v, heads), "dout": repeated(inputs.dout, -1)}
    written_out = dataclasses.replace(inputs, **{name: t.contiguous() for name, t in values.items()})  # type: ignore[arg-type]
    contiguous = probe.run(written_out)
    if not first_difference(found, contiguous) or not probe.misfit(found, written_out):  # equal bits need no exact attention
        return ""
    return prefixed(words, probe.moved(found, contiguous, written_out))


def odd_where_one(tensor: Tensor) -> Tensor:
    """Dimensions of size 1 have strides that mean nothing."""
    strides = [7 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def unaligned(tensor: Tensor) -> Tensor:
    """The first element lies one element behind an aligned address."""
    memory = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return memory.copy_(tensor)


_ARRANGEMENTS = (
    all_of("strides of 7 in dimensions of size 1", odd_where_one),
    all_of("first elements that are not aligned to 16 bytes", unaligned),
)


@invariant(
    "alignment",
    "tensors with strides or addresses that are not aligned to 16 bytes give the result of aligned ones, or are refused",
    calls=len(_ARRANGEMENTS),
    thorough=True,
    needs=(ANY_STRIDES,),
    may_end_cuda=True,
)
def alignment(probe: Probe) -> str:
    """Tensors that are not aligned to 16 bytes give the same result, or are refused.

    Kernels that read by TMA descriptors may end with the CUDA context. So it comes last, on a GPU in a process of its own.
    """
    return judge_arrangements(probe, _ARRANGEMENTS)


_FAR = 2**31 + 2**20
_ALIGNED = 64


@invariant(
    "offsets",
    "rows, heads and batch entries more than 2^31 elements apart give the usual result, or are refused",
    calls=8,
    thorough=True,
)
def offsets(probe: Probe) -> str:
    """A tensor whose last row lies more than 2^31 elements after its first is a tensor like others."""
    if reason := _unspreadable_because(probe):
        raise NotApplicable(reason)
    arrangements = []
    for name in ("q", "k", "v", "dout") if probe.backward else ("q", "k", "v"):
        last = _last_read(probe, name)
        for axis in sorted((dim for dim in range(len(last)) if last[dim]), key=lambda dim: -last[dim]):
            words = f"{name} spread over more than 2^31 elements along dimension {axis}"
            spread = partial(_spread, axis=axis, last=last[axis])
            arrangements.append(Arrangement(words, **{name: spread}))
    if not arrangements:
        raise NotApplicable("a single row has no offsets")
    return judge_arrangements(probe, arrangements)


def _unspreadable_because(probe: Probe) -> str | None:
    """Say why nothing can be spread over 4 GiB that are hardly touched, None where CUDA or Linux gives that much."""
    if probe.device.type == "cpu":
        return None if sys.platform == "linux" else "needs 4 GiB that no system but Linux surely leaves untouched"
    if probe.device.type != "cuda":
        return "needs 4 GiB of a CUDA device"
    for defect in probe.subject.defects_on(probe.workload, machine_of(probe.device), probe.backward):
        if offsets.name in defect.invariants:  # one that ends the CUDA context is not shown again and again
            return f"known defect {defect.issue}: {defect.summary}"
    free, _ = torch.cuda.mem_get_info(probe.device)
    return None if free > 2 * _FAR * 4 else "the device has too little free memory"


def _last_read(probe: Probe, name: str) -> list[int]:
    """Return the last index along each dimension at which something is read: no row or page that is nobody's.

    0 where that lies in the first half, and twice as much memory would not do.
    """
    inputs = probe.inputs
    unowned = unowned_keys(inputs) if name in "kv" else None
    if unowned is None or bool(unowned.all()):
        return [size - 1 for size in getattr(probe.handed(), name).shape[:-1]]
    k, v = ((~unowned).to(t.dtype).expand(t.shape).contiguous() for t in (inputs.k, inputs.v))
    read = getattr(probe.handed(dataclasses.replace(inputs, k=k, v=v)), name)
    last = read.float().amax(-1).nonzero().amax(0).tolist()
    return [index if 2 * index >= size - 1 else 0 for index, size in zip(last, read.shape, strict=False)]


def _spread(tensor: Tensor, axis: int, last: int) -> Tensor:
    """Return the same values with a dimension spread so that index `last` lies 2^31 elements behind the first."""
    sizes = tensor.shape[:-1]
    strides = list(tensor.stride())
    strides[axis] = -(-_FAR // last // _ALIGNED) * _ALIGNED
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
