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


def read_with_strides(tensor: Tensor, strides: tuple[int, ...], start: int | None = None) -> Tensor:
    """Read a tensor with other strides; offsets past the end of its memory wrap round, where a GPU would read anything.

    start: another first offset than the tensor's own.
    """
    memory = memory_of(tensor)
    first = tensor.storage_offset() if start is None else start
    return memory[(first + offsets_of(tensor.shape, strides, tensor)) % len(memory)]


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


@LAYOUT(Kernel.receive, "FA#1217, PT#112577", condition="layout", faults="strides-misread")
def q_assumed_contiguous(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """q is read as if it were contiguous."""
    return _as_if_contiguous(q), k, v


@LAYOUT(Kernel.receive, "FlagAttention#45, triton#1821", condition="layout", faults="strides-misread")
def v_read_with_strides_of_k(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """v is read with the strides of k."""
    return q, k, read_with_strides(v, k.stride() if k.shape == v.shape else v.stride())


@LAYOUT(Kernel.forward, "FI#1865, FI#2414", condition="layout", faults="strides-misread")
def out_written_with_strides_of_q(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """out is contiguous, but is written with the strides of q."""
    out, lse = Kernel.forward(kernel, call)
    return (written_with_strides(out, call.q.stride()) if out.shape == call.q.shape else out), lse


@LAYOUT(Kernel.receive, "PT#116333, PT#127523", applies=is_dense, condition="layout", faults="strides-misread")
def head_stride_from_batch_stride(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Heads of k are taken to divide its batch stride, which means nothing in a batch of 1."""
    if q.dim() != 4 or k.shape[0] != q.shape[0]:
        return q, k, v
    batch, _, *rest = k.stride()
    return q, read_with_strides(k, (batch, batch // k.shape[1], *rest)), v


@LAYOUT(Kernel.receive, "FA#2745", condition="layout", faults="strides-misread")
def storage_offset_ignored(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """k is read from the beginning of its memory, also where it is a slice of it."""
    return q, read_with_strides(k, k.stride(), start=0), v


@LAYOUT(Kernel.receive, "FA#2298, PT#191937", condition="layout", faults="strides-misread")
def expanded_read_as_contiguous(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """A tensor that is expanded, with a stride of 0, is read as if it were contiguous."""
    k, v = (_as_if_contiguous(t) if 0 in t.stride() else t for t in (k, v))
    return q, k, v


@LAYOUT(Kernel.receive, "PT#187506", condition="strides", faults="strides-misread")
def innermost_stride_ignored(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """The elements of a head's vector are taken to lie side by side."""
    return q, read_with_strides(k, (*k.stride()[:-1], 1)), v


@LAYOUT(Kernel.receive, "FA#2745", condition="strides")
def address_rounded_to_16_bytes(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """v is read from the last address before its own that is a multiple of 16 bytes."""
    aligned = v.storage_offset() // (16 // v.element_size()) * (16 // v.element_size())
    return q, k, read_with_strides(v, v.stride(), start=aligned)


@LAYOUT(Kernel.receive_again, "FA@2423cca3, PT#146377", backward=True, condition="layout", faults="strides-misread")
def keys_read_again_with_strides_of_q(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """The backward pass reads k with the strides of q."""
    return q, read_with_strides(k, q.stride()) if q.shape == k.shape else k, v


@LAYOUT(
    Kernel.receive_dout, "FA#355, FA@9ee0ff1d, FlagAttention#1", backward=True, condition="layout", faults="strides-misread"
)
def dout_assumed_contiguous(kernel: Kernel, dout: Tensor) -> Tensor:
    """The gradient of out is read as if it were contiguous, as out is."""
    return _as_if_contiguous(dout)


@LAYOUT(Kernel.finish_gradient, "xf#548, xf#282", backward=True, condition="layout", faults="strides-misread")
def dq_written_with_strides_of_q(kernel: Kernel, call: KernelCall, total: Tensor, of: Tensor) -> Tensor:
    """dq is contiguous, but is written with the strides of q."""
    gradient = Kernel.finish_gradient(kernel, call, total, of)
    return written_with_strides(gradient, of.stride()) if of is call.q else gradient


@LAYOUT(Kernel.forward, "SageAttention@e1cac2f, ComfyUI#16035", applies=is_dense, faults="input-changed")
def keys_centered_in_place(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """The keys' mean, which softmax does not see, is taken off in the caller's tensor."""
    if not call.workload.is_packed and call.workload.kv_pages is None:
        call.k.sub_(call.k.float().mean(-2, keepdim=True).to(call.k.dtype))
    return Kernel.forward(kernel, call)


@LAYOUT(
    Kernel.receive,
    "diffusers#14338, diffusers#14341",
    applies=all_of(is_dense, lambda w: w.kv_heads == w.kv_len and w.kv_len > 1),
    faults="k-heads-and-rows-swapped",
)
def keys_transposed_where_square(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """k has its heads and rows swapped once too often, which no shape shows where there are as many heads as keys."""
    return q, k.transpose(1, 2) if k.dim() == 4 and k.shape[1] == k.shape[2] else k, v


@LAYOUT(
    Kernel.forward,
    "diffusers#14338",
    applies=all_of(is_dense, lambda w: w.heads == w.q_len and w.q_len > 1),
    faults="heads-and-rows-swapped",
)
def out_transposed_where_square(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """out comes back with heads and rows swapped, which no shape shows where there are as many heads as rows."""
    out, lse = Kernel.forward(kernel, call)
    is_square = out.dim() == 4 and out.shape[1] == out.shape[2]
    return (out.transpose(1, 2).contiguous() if is_square else out), lse
