"""Layout: strides taken for granted or taken from another tensor, and inputs that are written to."""

import torch
from torch import Tensor

from pytest_attn.guests.mutants.kernel import QKV, Kernel, KernelCall
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import all_of, is_dense


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def memory_of(tensor: Tensor) -> Tensor:
    """Return all the memory that a tensor is a part of, as a flat tensor of its dtype."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)


def offsets_of(shape: tuple[int, ...], strides: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the offset of every element, int64, from the first one's."""
    offsets = torch.zeros((), dtype=torch.int64, device=like.device)
    for size, stride in zip(shape, strides, strict=True):
        offsets = offsets[..., None] + torch.arange(size, device=like.device) * stride
    return offsets


def read_with_strides(
    tensor: Tensor, strides: tuple[int, ...], shape: tuple[int, ...] | None = None, start: int | None = None
) -> Tensor:
    """Read a tensor with other strides; offsets past the end of its memory wrap round, where a GPU would read anything.

    shape, start: another shape, and another first offset than the tensor's own.
    """
    memory = memory_of(tensor)
    first = tensor.storage_offset() if start is None else start
    return memory[(first + offsets_of(shape or tensor.shape, strides, tensor)) % len(memory)]


def read_wrapped(tensor: Tensor, reach: int) -> Tensor:
    """Read a tensor with offsets that wrap round after `reach` elements."""
    return memory_of(tensor)[tensor.storage_offset() + offsets_of(tensor.shape, tensor.stride(), tensor) % reach]


def written_with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return what a contiguous tensor holds after `tensor` was written into its memory with other strides."""
    memory = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    memory.view(-1)[offsets_of(tensor.shape, strides, tensor).flatten() % tensor.numel()] = tensor.flatten()
    return memory


LAYOUT = Defects("layout")


def _as_if_contiguous(tensor: Tensor) -> Tensor:
    return read_with_strides(tensor, contiguous_strides(tensor.shape))


@LAYOUT("FA#1217", "PT#112577", condition="layout", faults=("strides-misread",))
class _QAssumedContiguous(Kernel):
    """q is read as if it were contiguous."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        return _as_if_contiguous(q), k, v


@LAYOUT("FlagAttention#45", "triton#1821", condition="layout", faults=("strides-misread",))
class _VReadWithStridesOfK(Kernel):
    """v is read with the strides of k."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        return q, k, read_with_strides(v, k.stride() if k.shape == v.shape else v.stride())


@LAYOUT("FI#1865", "FI#2414", condition="layout", faults=("strides-misread",))
class _OutWrittenWithStridesOfQ(Kernel):
    """out is contiguous, but is written with the strides of q."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        return (written_with_strides(out, call.q.stride()) if out.shape == call.q.shape else out), lse


@LAYOUT("PT#116333", "PT#127523", applies=is_dense, condition="layout", faults=("strides-misread",))
class _HeadStrideFromBatchStride(Kernel):
    """Heads of k are taken to divide its batch stride, which means nothing in a batch of 1."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        if q.dim() != 4 or k.shape[0] != q.shape[0]:
            return q, k, v
        batch, _, *rest = k.stride()
        return q, read_with_strides(k, (batch, batch // k.shape[1], *rest)), v


@LAYOUT("FA#2745", condition="layout", faults=("strides-misread",))
class _StorageOffsetIgnored(Kernel):
    """k is read from the beginning of its memory, also where it is a slice of it."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        return q, read_with_strides(k, k.stride(), start=0), v


@LAYOUT("FA#2298", "PT#191937", condition="layout", faults=("strides-misread",))
class _ExpandedReadAsContiguous(Kernel):
    """A tensor that is expanded, with a stride of 0, is read as if it were contiguous."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        k, v = (_as_if_contiguous(t) if 0 in t.stride() else t for t in (k, v))
        return q, k, v


@LAYOUT("PT#187506", condition="strides", faults=("strides-misread",))
class _InnermostStrideIgnored(Kernel):
    """The elements of a head's vector are taken to lie side by side."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        return q, read_with_strides(k, (*k.stride()[:-1], 1)), v


@LAYOUT("FA#2745", condition="strides")
class _AddressRoundedTo16Bytes(Kernel):
    """v is read from the last address before its own that is a multiple of 16 bytes."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        aligned = v.storage_offset() // (16 // v.element_size()) * (16 // v.element_size())
        return q, k, read_with_strides(v, v.stride(), start=aligned)


@LAYOUT("FA@2423cca3", "PT#146377", backward=True, condition="layout", faults=("strides-misread",))
class _KeysReadAgainWithStridesOfQ(Kernel):
    """The backward pass reads k with the strides of q."""

    def receive_again(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        return q, read_with_strides(k, q.stride()) if q.shape == k.shape else k, v


@LAYOUT("FA#355", "FA@9ee0ff1d", "FlagAttention#1", backward=True, condition="layout", faults=("strides-misread",))
class _DoutAssumedContiguous(Kernel):
    """The gradient of out is read as if it were contiguous, as out is."""

    def receive_dout(self, dout: Tensor) -> Tensor:
        return _as_if_contiguous(dout)


@LAYOUT("xf#548", "xf#282", backward=True, condition="layout", faults=("strides-misread",))
class _DqWrittenWithStridesOfQ(Kernel):
    """dq is contiguous, but is written with the strides of q."""

    def finish_gradient(self, call: KernelCall, total: Tensor, of: Tensor) -> Tensor:
        gradient = super().finish_gradient(call, total, of)
        return written_with_strides(gradient, of.stride()) if of is call.q else gradient


@LAYOUT("SageAttention@e1cac2f", "ComfyUI#16035", applies=is_dense, faults=("input-changed",))
class _KeysCenteredInPlace(Kernel):
    """The keys' mean, which softmax does not see, is taken off in the caller's tensor."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        if not call.workload.is_packed and call.workload.kv_pages is None:
            call.k.sub_(call.k.float().mean(-2, keepdim=True).to(call.k.dtype))
        return super().forward(call)


@LAYOUT(
    "diffusers#14338",
    "diffusers#14341",
    applies=all_of(is_dense, lambda w: w.kv_heads == w.kv_len and w.kv_len > 1),
    faults=("k-heads-and-rows-swapped",),
)
class _KeysTransposedWhereSquare(Kernel):
    """k has its heads and rows swapped once too often, which no shape shows where there are as many heads as keys."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        return q, k.transpose(1, 2) if k.dim() == 4 and k.shape[1] == k.shape[2] else k, v


@LAYOUT(
    "diffusers#14338",
    applies=all_of(is_dense, lambda w: w.heads == w.q_len and w.q_len > 1),
    faults=("heads-and-rows-swapped",),
)
class _OutTransposedWhereSquare(Kernel):
    """out comes back with heads and rows swapped, which no shape shows where there are as many heads as rows."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        is_square = out.dim() == 4 and out.shape[1] == out.shape[2]
        return (out.transpose(1, 2).contiguous() if is_square else out), lse
