"""Integer overflow: offsets, positions and grids that wrap round or are refused, at limits small enough for a test.

The real limits are 2^31 elements, 2^15 keys and 65,535 blocks. Here an offset wraps at REACH elements, a key's position at
KEYS and a grid ends at BLOCKS, so that workloads of the group `edges` pass them.
"""

import math

import torch
from torch import Tensor

from pytest_attn.guests.mutants.kernel import QKV, Kernel, KernelCall, Sequence, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import of_lengths
from pytest_attn.guests.mutants.strides import read_wrapped
from pytest_attn.workloads.masks import Mask, MaskMod
from pytest_attn.workloads.workload import Workload, sequence_lengths

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


@OVERFLOW(Kernel.receive, "FA#772, xf@89d3014f", applies=_keys_are_far)
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


@OVERFLOW(Kernel.gather_pages, "FI#3136, FI#3130", applies=_keys_are_far)
def page_offset_wraps(kernel: Kernel, seq: Sequence, pool: Tensor, at: Tensor) -> Tensor:
    """A page's number times its size is a 32-bit number."""
    _, size, _, _ = pool.shape
    pages = kernel.pages(seq, at // size) % max(REACH // pool.stride(0), 1)
    return pool[pages, at % size].transpose(0, 1)


@OVERFLOW(
    Kernel.bias,
    "xf#788, xf#679, PT#145869",
    applies=lambda w: "q" in (w.bias or "") and "k" in (w.bias or "") and _elements_of_bias(w) > REACH,
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
    applies=of_lengths(lambda q_len, kv_len: kv_len > KEYS),
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
