"""Heads: query heads that read another key head, head dimensions cut or misread."""

from torch import Tensor

from pytest_attn.guests.mutants.kernel import QKV, Kernel, Sequence, Tile, positions
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import all_of, is_dense, is_grouped, is_grouped_twice
from pytest_attn.guests.mutants.strides import contiguous_strides, read_with_strides
from pytest_attn.workloads.workload import is_interleaved

HEADS = Defects("heads")


@HEADS(
    Kernel.kv_head_of,
    "HipKittens#22, FI#1148",
    applies=all_of(is_grouped_twice, lambda w: not is_interleaved(w)),
    faults="heads-interleaved",
)
def groups_interleaved(kernel: Kernel, seq: Sequence) -> Tensor:
    """Query head h reads key head h % kv_heads, not h // group."""
    return positions(range(seq.workload.heads), seq.call.q) % seq.workload.kv_heads


@HEADS(Kernel.kv_head_of, "HipKittens#22", applies=lambda w: w.kv_heads not in (1, w.group), faults="group-taken-for-kv-heads")
def group_taken_for_number_of_key_heads(kernel: Kernel, seq: Sequence) -> Tensor:
    """Query head h reads key head h // kv_heads, which is right only where groups are as large as they are many."""
    w = seq.workload
    return (positions(range(w.heads), seq.call.q) // w.kv_heads).clamp_(max=w.kv_heads - 1)


@HEADS(Kernel.kv_head_of, "FI#1148, FI#1614", applies=all_of(is_grouped_twice, lambda w: bool(w.group & (w.group - 1))))
def group_rounded_to_power_of_two(kernel: Kernel, seq: Sequence) -> Tensor:
    """Groups of 3, 5 or 7 query heads are taken for groups of 4 or 8."""
    return positions(range(seq.workload.heads), seq.call.q) >> (seq.workload.group - 1).bit_length()


@HEADS(Kernel.kv_head_of, "SageAttention#302, xf#854", applies=is_grouped_twice)
def groups_ignored(kernel: Kernel, seq: Sequence) -> Tensor:
    """Query head h reads key head h, as far as there are key heads."""
    return positions(range(seq.workload.heads), seq.call.q).clamp_(max=seq.workload.kv_heads - 1)


@HEADS(Kernel.attend, "PT#193893", applies=lambda w: w.heads % 2 == 1, faults="zeros-there")
def last_odd_head_lost(kernel: Kernel, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
    """Heads are taken two by two, and the last of an odd number stays zero."""
    out, lse = Kernel.attend(kernel, seq, rows)
    out[seq.workload.heads // 2 * 2 :] = 0
    return out, lse


@HEADS(
    Kernel.logits,
    "FA#2591, FA#2594",
    applies=lambda w: bool(w.head_dim % 16),
    faults=("head-dim-tail-unread", "scores-without-effect"),
)
def head_dim_tail_not_read(kernel: Kernel, q: Tensor, k: Tensor) -> Tensor:
    """Only whole steps of 16 of the head dimension are multiplied."""
    whole = q.shape[-1] // 16 * 16
    return Kernel.logits(kernel, q[..., :whole], k[..., :whole])


@HEADS(
    Kernel.receive,
    "FA@e3b2400a, FA@9e07d6d3",
    applies=all_of(is_dense, lambda w: w.v_head_dim != w.head_dim),
    faults="v-with-head-dim-of-k",
)
def values_read_with_keys_head_dim(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Rows of v are taken to lie head_dim apart, as those of k do."""
    if v.shape[-1] == k.shape[-1]:
        return q, k, v
    return q, k, read_with_strides(v, contiguous_strides((*v.shape[:-1], k.shape[-1])))


@HEADS(Kernel.load_k, "TE#3216, jax#36702", applies=all_of(is_dense, lambda w: w.batch > 1))
def keys_of_first_batch_entry(kernel: Kernel, tile: Tile) -> Tensor:
    """Every batch entry reads the keys of the first: a stride of 0."""
    seq = tile.seq if tile.workload.kv_pages else tile.seq._replace(batch=0)
    return kernel.load(seq, seq.call.k, tile.keys)


@HEADS(Kernel.sinks, "FI#4525", applies=is_grouped)
def sink_of_key_head(kernel: Kernel, seq: Sequence) -> Tensor | None:
    """A query head takes the sink with the number of its key head."""
    sinks = Kernel.sinks(kernel, seq)
    return None if sinks is None else sinks[kernel.kv_head_of(seq)]


@HEADS(Kernel.alibi_slopes, "vllm#1938", applies=is_grouped)
def alibi_slope_of_key_head(kernel: Kernel, tile: Tile, slopes: Tensor) -> Tensor:
    """A query head takes the slope with the number of its key head."""
    return slopes[kernel.kv_head_of(tile.seq)]


@HEADS(Kernel.bias, "jax#36702, xf#788", applies=lambda w: w.heads > 1 and "h" in (w.bias or ""))
def bias_of_first_head(kernel: Kernel, tile: Tile, bias: Tensor) -> Tensor:
    """A bias that differs between heads is read for the first."""
    return Kernel.bias(kernel, tile, bias[:, :1])
