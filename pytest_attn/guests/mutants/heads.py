"""Heads: query heads that read another key head, head dimensions cut or misread."""

import dataclasses

from torch import Tensor

from pytest_attn.guests.mutants.kernel import QKV, Kernel, Sequence, Tile, positions
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import all_of, is_dense, is_grouped, is_grouped_twice
from pytest_attn.guests.mutants.strides import contiguous_strides, read_with_strides
from pytest_attn.workloads.workload import is_interleaved

HEADS = Defects("heads")


@HEADS(
    "HipKittens#22",
    "FI#1148",
    applies=all_of(is_grouped_twice, lambda w: not is_interleaved(w)),
    faults=("heads-interleaved",),
)
class _GroupsInterleaved(Kernel):
    """Query head h reads key head h % kv_heads, not h // group."""

    def kv_head_of(self, seq: Sequence) -> Tensor:
        return positions(range(seq.workload.heads), seq.call.q) % seq.workload.kv_heads


@HEADS("HipKittens#22", applies=lambda w: w.kv_heads not in (1, w.group), faults=("group-taken-for-kv-heads",))
class _GroupTakenForNumberOfKeyHeads(Kernel):
    """Query head h reads key head h // kv_heads, which is right only where groups are as large as they are many."""

    def kv_head_of(self, seq: Sequence) -> Tensor:
        w = seq.workload
        return (positions(range(w.heads), seq.call.q) // w.kv_heads).clamp_(max=w.kv_heads - 1)


@HEADS(
    "FI#1148",
    "FI#1614",
    applies=all_of(is_grouped_twice, lambda w: bool(w.group & (w.group - 1))),
    faults=("group-rounded-to-power-of-two",),
)
class _GroupRoundedToPowerOfTwo(Kernel):
    """Groups of 3, 5 or 7 query heads are taken for groups of 4 or 8."""

    def kv_head_of(self, seq: Sequence) -> Tensor:
        return positions(range(seq.workload.heads), seq.call.q) >> (seq.workload.group - 1).bit_length()


@HEADS("SageAttention#302", "xf#854", applies=is_grouped_twice, faults=("groups-ignored",))
class _GroupsIgnored(Kernel):
    """Query head h reads key head h, as far as there are key heads."""

    def kv_head_of(self, seq: Sequence) -> Tensor:
        return positions(range(seq.workload.heads), seq.call.q).clamp_(max=seq.workload.kv_heads - 1)


@HEADS("PT#193893", applies=lambda w: w.heads % 2 == 1, faults=("zeros-there",))
class _LastOddHeadLost(Kernel):
    """Heads are taken two by two, and the last of an odd number stays zero."""

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        out, lse = super().attend(seq, rows)
        out[seq.workload.heads // 2 * 2 :] = 0
        return out, lse


@HEADS("FA#2591", "FA#2594", applies=lambda w: bool(w.head_dim % 16), faults=("head-dim-tail-unread", "scores-without-effect"))
class _HeadDimTailNotRead(Kernel):
    """Only whole steps of 16 of the head dimension are multiplied."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        whole = q.shape[-1] // 16 * 16
        return super().logits(q[..., :whole], k[..., :whole])


@HEADS(
    "FA@e3b2400a",
    "FA@9e07d6d3",
    applies=all_of(is_dense, lambda w: w.v_head_dim != w.head_dim),
    faults=("v-with-head-dim-of-k",),
)
class _ValuesReadWithKeysHeadDim(Kernel):
    """Rows of v are taken to lie head_dim apart, as those of k do."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        if v.shape[-1] == k.shape[-1]:
            return q, k, v
        return q, k, read_with_strides(v, contiguous_strides((*v.shape[:-1], k.shape[-1])))


@HEADS("TE#3216", "jax#36702", applies=all_of(is_dense, lambda w: w.batch > 1), faults=("keys-of-first-batch-entry",))
class _KeysOfFirstBatchEntry(Kernel):
    """Every batch entry reads the keys of the first: a stride of 0."""

    def load_k(self, tile: Tile) -> Tensor:
        seq = tile.seq if tile.workload.kv_pages else dataclasses.replace(tile.seq, batch=0)
        return self.load(seq, seq.call.k, tile.keys)


@HEADS("FI#4525", applies=all_of(is_grouped, lambda w: bool(w.sinks)), faults=("sink-of-key-head",))
class _SinkOfKeyHead(Kernel):
    """A query head takes the sink with the number of its key head."""

    def sinks(self, seq: Sequence) -> Tensor | None:
        sinks = super().sinks(seq)
        return None if sinks is None else sinks[self.kv_head_of(seq)]


@HEADS("vllm#1938", applies=all_of(is_grouped, lambda w: bool(w.alibi)), faults=("alibi-slope-of-key-head",))
class _AlibiSlopeOfKeyHead(Kernel):
    """A query head takes the slope with the number of its key head."""

    def alibi_slopes(self, tile: Tile, slopes: Tensor) -> Tensor:
        return slopes[self.kv_head_of(tile.seq)]


@HEADS("jax#36702", "xf#788", applies=lambda w: w.heads > 1 and "h" in (w.bias or ""), faults=("bias-of-first-head",))
class _BiasOfFirstHead(Kernel):
    """A bias that differs between heads is read for the first."""

    def bias(self, tile: Tile, bias: Tensor) -> Tensor:
        return super().bias(tile, bias[:, :1])
