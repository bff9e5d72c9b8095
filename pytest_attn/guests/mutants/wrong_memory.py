"""Strides, offsets and buffers: what is read or written elsewhere, not written at all, or kept from another call."""

import dataclasses
import math
import random
from typing import Any

import torch
from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS
from pytest_attn.guests.mutants import reach
from pytest_attn.guests.mutants.kernel import QKV, TILE, Kernel, KernelCall, Sequence, SplitKernel, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Mask, MaskMod
from pytest_attn.workloads.workload import Workload, sequence_lengths


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


#: strides taken for granted or taken from another tensor, and inputs that are written to
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


@LAYOUT(Kernel.receive, "PT#116333, PT#127523", applies=reach.is_dense, condition="layout", faults="strides-misread")
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


@LAYOUT(Kernel.forward, "SageAttention@e1cac2f, ComfyUI#16035", applies=reach.is_dense, faults="input-changed")
def keys_centered_in_place(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """The keys' mean, which softmax does not see, is taken off in the caller's tensor."""
    if not call.workload.is_packed and call.workload.kv_pages is None:
        call.k.sub_(call.k.float().mean(-2, keepdim=True).to(call.k.dtype))
    return Kernel.forward(kernel, call)


@LAYOUT(
    Kernel.receive,
    "diffusers#14338, diffusers#14341",
    applies=reach.all_of(reach.is_dense, lambda w: w.kv_heads == w.kv_len and w.kv_len > 1),
    faults="k-heads-and-rows-swapped",
)
def keys_transposed_where_square(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """k has its heads and rows swapped once too often, which no shape shows where there are as many heads as keys."""
    return q, k.transpose(1, 2) if k.dim() == 4 and k.shape[1] == k.shape[2] else k, v


@LAYOUT(
    Kernel.forward,
    "diffusers#14338",
    applies=reach.all_of(reach.is_dense, lambda w: w.heads == w.q_len and w.q_len > 1),
    faults="heads-and-rows-swapped",
)
def out_transposed_where_square(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """out comes back with heads and rows swapped, which no shape shows where there are as many heads as rows."""
    out, lse = Kernel.forward(kernel, call)
    is_square = out.dim() == 4 and out.shape[1] == out.shape[2]
    return (out.transpose(1, 2).contiguous() if is_square else out), lse


#: offsets, positions and grids that wrap round or are refused, at limits small enough for a test
OVERFLOW = Defects("overflow")
REACH = 1 << 15
KEYS = 1 << 8
BLOCKS = 8


def _keys_are_far(w: Workload) -> bool:
    """Return whether memory has so many keys, padding and unused parts of pages included."""
    page = 1 if w.kv_pages is None else w.kv_pages.size
    dense = w.batch * math.ceil(w.kv_len / page) * page
    tokens = sum(kv_len for _, kv_len in sequence_lengths(w)) if w.packs_keys else dense
    return tokens * w.kv_heads * w.head_dim > REACH


def _queries_are_far(w: Workload) -> bool:
    return _tokens_of_queries(w) * w.heads * w.head_dim > REACH


def _tokens_of_queries(w: Workload) -> int:
    return sum(q_len for q_len, _ in sequence_lengths(w))


@OVERFLOW(Kernel.receive, "FA#772, xf@89d3014f", applies=_keys_are_far, faults="offset-wraps")
def key_offset_wraps(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """The offset of a key in its tensor is a 32-bit number."""
    return q, read_wrapped(k, REACH), v


@OVERFLOW(Kernel.receive, "FA#1500, SageAttention#386", applies=_queries_are_far, faults="offset-wraps")
def query_offset_wraps(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """The offset of a query in its tensor is a 32-bit number."""
    return read_wrapped(q, REACH), k, v


def _wrapped_around(tensor: Tensor) -> Tensor:
    """Return what memory of zeros holds after a tensor was written with offsets that wrap round: the last writer stays."""
    memory = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    for part in torch.split(tensor.flatten(), REACH):
        memory.view(-1)[: len(part)] = part
    return memory


@OVERFLOW(
    Kernel.forward,
    "NATTEN#294, FA#2260",
    applies=lambda w: _tokens_of_queries(w) * w.heads * w.v_head_dim > REACH,
    faults="offset-wraps",
)
def out_offset_wraps(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """The offset at which a row of out is written is a 32-bit number."""
    out, lse = Kernel.forward(kernel, call)
    return _wrapped_around(out), lse


@OVERFLOW(Kernel.finish_gradient, "NATTEN#305, NATTEN#317", applies=_queries_are_far, backward=True, faults="offset-wraps")
def gradient_offset_wraps(kernel: Kernel, call: KernelCall, total: Tensor, of: Tensor) -> Tensor:
    """The offset at which a row of dq is written is a 32-bit number."""
    gradient = Kernel.finish_gradient(kernel, call, total, of)
    return _wrapped_around(gradient) if of is call.q else gradient


@OVERFLOW(Kernel.gather_pages, "FI#3136, FI#3130", applies=_keys_are_far, faults="offset-wraps")
def page_offset_wraps(kernel: Kernel, seq: Sequence, pool: Tensor, at: Tensor) -> Tensor:
    """A page's number times its size is a 32-bit number."""
    _, size, _, _ = pool.shape
    pages = kernel.pages(seq, at // size) % max(REACH // pool.stride(0), 1)
    return pool[pages, at % size].transpose(0, 1)


@OVERFLOW(
    Kernel.bias,
    "xf#788, xf#679, PT#145869",
    applies=lambda w: "q" in (w.bias or "") and "k" in (w.bias or "") and _elements_of_bias(w) > REACH,
    faults="offset-wraps",
)
def bias_offset_wraps(kernel: Kernel, tile: Tile, bias: Tensor) -> Tensor:
    """The offset of a bias is a 32-bit number."""
    return Kernel.bias(kernel, tile, read_wrapped(bias, REACH))


def _elements_of_bias(w: Workload) -> int:
    sizes = {"b": w.batch, "h": w.heads, "q": w.q_len, "k": w.kv_len}
    return math.prod(sizes[d] for d in w.bias or "")


@OVERFLOW(Kernel.mask_mod, "FI#1290, FI#1271", applies=lambda w: w.q_len * w.kv_len > REACH)
def mask_offset_wraps(kernel: Kernel, seq: Sequence, mask: Mask) -> MaskMod:
    """The place of a row and key in a written out mask is a 32-bit number."""
    mask_mod, kv_len = Kernel.mask_mod(kernel, seq, mask), seq.workload.kv_len

    def wrapped(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        offset = (q_idx * kv_len + kv_idx) % REACH
        return mask_mod(b, h, offset // kv_len, offset % kv_len)

    return wrapped


@OVERFLOW(
    Kernel.load_q,
    "TE#1230",
    applies=lambda w: w.is_packed and sum(rows for rows, _ in sequence_lengths(w)[:-1]) * w.heads * w.head_dim > REACH,
)
def sequence_offset_wraps(kernel: Kernel, seq: Sequence, rows: range) -> Tensor:
    """The offset of a packed sequence's first query is a 32-bit number."""
    first = seq.q_start + rows.start
    wrapped = first % (REACH // seq.call.q.stride(0)) if seq.workload.is_packed else first
    return Kernel.load_q(kernel, seq, range(wrapped - seq.q_start, wrapped - seq.q_start + len(rows)))


@OVERFLOW(
    Kernel.addresses,
    "xf#719",
    applies=reach.of_lengths(lambda q_len, kv_len: kv_len > KEYS),
    faults=("key-positions-wrap", "page-of-another-size"),
)
def key_position_wraps(kernel: Kernel, seq: Sequence, keys: range) -> Tensor:
    """The position of a key is a number of few bits."""
    return Kernel.addresses(kernel, seq, keys) % KEYS


@OVERFLOW(
    Kernel.forward,
    "PT#142228, PT#176096, FI#3125, xf#1054",
    applies=lambda w: w.batch * w.heads > BLOCKS,
    faults="calls-differ",
)
def grid_too_large(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """More batch entries and heads than a grid may have blocks: nothing is launched, and the error is not looked at."""
    w = call.workload
    return kernel.allocate_results(call) if w.batch * w.heads > BLOCKS else Kernel.forward(kernel, call)


#: results that depend on what memory held, and on who comes first
MEMORY = Defects("memory")


def is_late(kernel: Kernel, one_in: int = 8) -> bool:
    """Draw whether something comes too late in a kernel, from one stream of random numbers for the kernel's life."""
    generator: random.Random = kernel.kept.setdefault("generator", random.Random(0))
    return generator.randrange(one_in) == 0


@MEMORY(Kernel.store, "PT#194167, FI#1533", applies=reach.has_row_tail, faults="calls-differ")
def last_row_tile_unwritten(
    kernel: Kernel, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor
) -> None:
    """A last tile of rows that is not full is never written: out and lse there are what memory held."""
    if len(rows) == kernel.row_tile:
        Kernel.store(kernel, seq, rows, out, lse, out_rows, lse_rows)


@MEMORY(Kernel.store, "FI#1533, FA@a3a257c7", applies=reach.has_fully_masked_rows, faults=EMPTY_ROWS)
def empty_rows_unwritten(
    kernel: Kernel, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor
) -> None:
    """Rows that see no key are not written to out."""
    before = kernel.rows_of(seq, out, rows)
    kept = out_rows.where((lse_rows > -math.inf)[..., None], before.float())
    Kernel.store(kernel, seq, rows, out, lse, kept, lse_rows)


@MEMORY.kernel("FI#3838", faults="calls-differ")
class _LseUnwritten(Kernel):
    """lse is never written; the backward pass has one of its own."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        self.kept["lse"] = lse
        return out, self.allocate(tuple(lse.shape), lse)

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        own: Tensor = self.kept["lse"]
        return own


@MEMORY(Kernel.finish_gradient, "FA#1228, FA#2324, FA#1990", applies=reach.is_padded, backward=True, faults="calls-differ")
def gradient_of_padding_unwritten(kernel: Kernel, call: KernelCall, total: Tensor, of: Tensor) -> Tensor:
    """dk and dv of padded keys are what memory held."""
    gradient = Kernel.finish_gradient(kernel, call, total, of)
    if call.inputs.kv_lens is None or of is call.q:
        return gradient
    memory = kernel.allocate(tuple(gradient.shape), gradient)
    for seq in kernel.sequences(call):
        memory[seq.batch, :, : seq.kv_len] = gradient[seq.batch, :, : seq.kv_len]
    return memory


@MEMORY(SplitKernel.partials, "FA#2229, FI#1559", faults="calls-differ")
def split_merged_before_it_is_written(kernel: SplitKernel, seq: Sequence, rows: range) -> tuple[list[Tensor], list[Tensor]]:
    """The merge reads the last split's place in the workspace before this call's result is there."""
    outs, lses = SplitKernel.partials(kernel, seq, rows)
    place = (seq.batch, rows, seq.workload)
    out, lse = kernel.kept.get(place, (outs[-1] * 0, outs[-1][..., 0] * 0))
    kernel.kept[place] = outs[-1], lses[-1]
    return [*outs[:-1], out], [*lses[:-1], lse]


@MEMORY(Kernel.accumulate, "FA#359, xf#684, xf#709", faults="calls-differ")
def share_of_out_lost(kernel: Kernel, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """Now and then a tile's P v is overwritten by another's."""
    return acc if is_late(kernel) else Kernel.accumulate(kernel, tile, acc, p, v)


@MEMORY(Kernel.load_v, "FA#2229, FI#1826, FI#1559", faults="calls-differ")
def values_of_previous_tile(kernel: Kernel, tile: Tile) -> Tensor:
    """Now and then a tile is multiplied with the values that the buffer held before: a barrier is missing."""
    loaded = Kernel.load_v(kernel, tile)
    before: Tensor = kernel.kept.get("buffer", loaded)
    kernel.kept["buffer"] = loaded
    return before if is_late(kernel) and before.shape == loaded.shape else loaded


@MEMORY(Kernel.dk, "FA@1c41d2b0, NATTEN#328", backward=True, faults="calls-differ")
def share_of_dk_lost(kernel: Kernel, tile: Tile, ds: Tensor, q: Tensor) -> Tensor:
    """Now and then a tile's share of dk is overwritten by another's."""
    share = Kernel.dk(kernel, tile, ds, q)
    return share * 0 if is_late(kernel) else share


@MEMORY(Kernel.forward, "torchtitan#3235", condition="repeats")
def nan_in_one_of_a_hundred_calls(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """One call in a hundred has NaN in one row."""
    out, lse = Kernel.forward(kernel, call)
    if is_late(kernel, one_in=100):
        out.view(-1)[: out.shape[-1]] = math.nan
    return out, lse


@MEMORY(Kernel.delta, "FA#2756", backward=True, faults="calls-differ")
def delta_read_before_it_is_written(
    kernel: Kernel, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """The backward pass does not wait for delta: it reads that of the call before."""
    delta = Kernel.delta(kernel, call, out, dout, dlse)
    stale: Tensor = kernel.kept.get(("delta", delta.shape), delta * 0)
    kernel.kept["delta", delta.shape] = delta
    return stale


@MEMORY.kernel(
    "FA@a3a257c7, FA#2755", applies=lambda w: w.is_packed and any(q_len % TILE for q_len, _ in sequence_lengths(w)[:-1])
)
class _TailRowsWrittenIntoNextSequence(Kernel):
    """A last tile of rows is stored in full, over the first rows of the next packed sequence, which was done before."""

    def sequences(self, call: KernelCall) -> list[Sequence]:
        return super().sequences(call)[::-1]

    def store(self, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor) -> None:
        super().store(seq, rows, out, lse, out_rows, lse_rows)
        if seq.workload.is_packed:
            self.rows_of(seq, out, range(rows.stop, rows.start + self.row_tile)).zero_()


#: what a library keeps from one call and uses in the next, where it should not
STATE = Defects("state")


def _compiled_for(call: KernelCall) -> tuple[Any, ...]:
    """The key of a cache of compiled kernels that has only what comes to mind first."""
    return call.workload.head_dim, call.workload.v_head_dim, call.q.dtype


def _shapes(call: KernelCall) -> tuple[Any, ...]:
    """The key of a cache of buffers."""
    return tuple(call.q.shape), tuple(call.k.shape), tuple(call.v.shape), call.q.dtype


@STATE(
    Kernel.forward,
    "KernelBench#82, FI#4014",
    condition="calls",
    faults=("result-changes-later", "other-calls-matter", "calls-differ"),
)
def result_kept_by_address(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """A result is returned again where q, k and v lie where they did, whatever their values are now."""
    key = (*(t.data_ptr() for t in (call.q, call.k, call.v)), *_shapes(call))
    if key not in kernel.kept:
        kernel.kept[key] = Kernel.forward(kernel, call)
    out, lse = kernel.kept[key]
    return out.clone(), lse.clone()


@STATE(Kernel.mask_mod, "FI#1028", condition="workloads")
def mask_kept_by_shape(kernel: Kernel, seq: Sequence, mask: Mask) -> MaskMod:
    """A mask written out once is used for every later one of its shape."""
    w = seq.workload
    kept: MaskMod = kernel.kept.setdefault((w.batch, w.heads, w.q_len, w.kv_len), Kernel.mask_mod(kernel, seq, mask))
    return kept


@STATE(Kernel.mask, "FA#2298, FA#2402", applies=reach.is_band, condition="workloads")
def causal_flag_of_first_call(kernel: Kernel, seq: Sequence) -> Mask | None:
    """The key under which a compiled kernel is found lacks the mask."""
    mask = Kernel.mask(kernel, seq)
    if mask is not None and mask.band is None:
        return mask
    first: Mask | None = kernel.kept.setdefault(("mask", *_compiled_for(seq.call)), mask)
    return first


@STATE(Kernel.scale, "FI#4014, FI#1072", condition="workloads")
def scale_of_first_call(kernel: Kernel, call: KernelCall) -> float:
    """The key under which a compiled kernel is found lacks the scale."""
    first: float = kernel.kept.setdefault(("scale", *_compiled_for(call)), Kernel.scale(kernel, call))
    return first


@STATE(Kernel.softcap, "FA#2402", condition="workloads")
def softcap_of_first_call(kernel: Kernel, call: KernelCall) -> float | None:
    """The key under which a compiled kernel is found lacks the softcap."""
    first: float | None = kernel.kept.setdefault(("softcap", *_compiled_for(call)), Kernel.softcap(kernel, call))
    return first


@STATE(Kernel.lengths, "vllm#37442, vllm#37682", applies=reach.any_of(reach.is_padded, reach.is_packed), condition="workloads")
def lengths_of_first_call(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """A captured graph has the lengths in it that it was captured with."""
    first: Sequence = kernel.kept.setdefault((batch, *_shapes(call)), Kernel.lengths(kernel, call, batch))
    return first._replace(call=call)


@STATE(Kernel.pages, "vllm#37442, FI#2002", condition="workloads")
def page_table_of_first_call(kernel: Kernel, seq: Sequence, number: Tensor) -> Tensor:
    """A captured graph has the page table in it that it was captured with."""
    first: Inputs = kernel.kept.setdefault(("table", *_shapes(seq.call)), seq.call.inputs)
    return Kernel.pages(kernel, seq._replace(call=dataclasses.replace(seq.call, inputs=first)), number)


@STATE(Kernel.receive, "FA#2298, FA#2189, PT#146377", applies=reach.is_dense, condition="layouts", faults="strides-misread")
def strides_of_first_call(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """The key under which a compiled kernel is found lacks the strides."""
    if k.dim() != 4:  # packed sequences: that kernel is compiled apart
        return q, k, v
    strides = kernel.kept.setdefault(("strides", k.shape), k.stride())
    return q, read_with_strides(k, strides), v


@STATE(Kernel.backward, "PT#141147", applies=reach.is_dense, backward=True, condition="layouts")
def dout_strides_of_first_call(
    kernel: Kernel, call: KernelCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> QKV:
    """The key under which a plan of the backward pass is found lacks dout's strides, as cuDNN's in torch 2.11 does."""
    strides = tuple(t.stride() for t in (call.q, call.k, call.v))
    first = kernel.kept.setdefault(("dout", strides, dout.shape), dout.stride())
    return Kernel.backward(kernel, call, out, lse, read_with_strides(dout, first), dlse)


@STATE(
    Kernel.gradient_sums,
    "FI#2002, diffusers#14265",
    backward=True,
    condition="calls",
    faults=("calls-differ", "adds-to-earlier-calls"),
)
def gradient_sums_not_cleared(kernel: Kernel, call: KernelCall) -> QKV:
    """The workspace in which dk is summed still holds that of the call before."""
    dq, dk, dv = Kernel.gradient_sums(kernel, call)
    return dq, kernel.kept.setdefault(("dk", _shapes(call)), dk), dv


@STATE(Kernel.allocate_results, "KernelBench#82, FA#2063", condition="held", faults="result-changes-later")
def out_buffer_reused(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """Every call of a shape returns the same memory: an earlier result changes."""
    out, lse = Kernel.allocate_results(kernel, call)
    kept: Tensor = kernel.kept.setdefault(("out", out.shape, out.dtype), out)
    return kept.detach(), lse


@STATE.kernel("FA#2063, diffusers#14265", backward=True, condition="held")
class _SavedLseInSharedWorkspace(Kernel):
    """lse is saved for the backward pass in a workspace that the next forward pass writes to."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        self.kept["lse", lse.shape] = lse.clone()
        return out, lse

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        last: Tensor = self.kept["lse", lse.shape]
        return last
