"""Lengths: padding counted, sequences that see each other, offsets of other sequences, pages lost or mixed up."""

import math

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS, LENGTHS_MISREAD, TAIL_MISSING
from pytest_attn.guests.mutants.kernel import TILE, Index, Kernel, KernelCall, Sequence, SplitKernel, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import (
    all_of,
    has_odd_tiles,
    is_band,
    is_grouped,
    is_packed,
    is_padded,
    of_lengths,
)
from pytest_attn.workloads.workload import Workload, sequence_lengths

LENGTHS = Defects("lengths")


@LENGTHS(Kernel.lengths, "TE#3331, TE#2186, FI#3871", applies=is_padded, faults=LENGTHS_MISREAD)
def kv_length_ignored(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """Padded keys are seen."""
    extent = Kernel.lengths(kernel, call, batch)
    return extent if call.workload.packs_keys else extent._replace(kv_len=call.workload.kv_len)


@LENGTHS(
    Kernel.lengths,
    "fla#766, FI#3393",
    applies=lambda w: w.kv_lens is not None and not w.packs_keys,
    faults=("newest-key-missing", "last-key-missing", "causal-hides-diagonal"),
)
def newest_key_not_seen(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """The length of a cache is one short: it was read before the new token was appended."""
    extent = Kernel.lengths(kernel, call, batch)
    return extent if call.inputs.kv_lens is None else extent._replace(kv_len=max(extent.kv_len - 1, 0))


@LENGTHS(Kernel.lengths, "FI#3871, Tencent-Hunyuan/HunyuanVideo#310", applies=is_padded, faults=LENGTHS_MISREAD)
def length_of_first_sequence(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """All sequences of a batch are as long as the first."""
    return Kernel.lengths(kernel, call, batch if call.workload.packs_keys else 0)


@LENGTHS.kernel(
    "vllm-project/vllm-omni#3525",
    applies=lambda w: w.packs_keys and w.q_lens != w.kv_lens,
    faults="keys-at-offsets-of-queries",
)
class _QueriesOffsetsForKeys(Kernel):
    """Packed keys are found with the cumulated lengths of the queries."""

    def lengths(self, call: KernelCall, batch: int) -> Sequence:
        extent = super().lengths(call, batch)
        return extent._replace(kv_start=extent.q_start, kv_len=extent.q_len) if call.workload.packs_keys else extent

    def addresses(self, seq: Sequence, keys: range) -> Tensor:
        tokens = seq.call.k.shape[0] if seq.workload.packs_keys else seq.kv_len
        return super().addresses(seq, keys).clamp_(max=tokens - 1 - seq.kv_start)


@LENGTHS(Kernel.lengths, "FA#1990", applies=is_packed, faults="keys-begin-late")
def keys_begin_one_token_late(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """Each packed sequence but the last reads the keys from its second to the first of the next."""
    extent, w = Kernel.lengths(kernel, call, batch), call.workload
    return extent._replace(kv_start=extent.kv_start + 1) if w.packs_keys and batch + 1 < w.batch else extent


@LENGTHS(
    Kernel.addresses,
    "jax#39521",
    applies=all_of(is_packed, is_grouped),
    faults="keys-with-stride-of-queries",
)
def key_offset_with_queries_heads(kernel: Kernel, seq: Sequence, keys: range) -> Tensor:
    """A packed sequence's first key is found with the stride of the queries, which have more heads."""
    w, at = seq.workload, Kernel.addresses(kernel, seq, keys)
    return (seq.kv_start * w.group + at) % len(seq.call.k) - seq.kv_start if w.packs_keys else at


@LENGTHS(Kernel.sequences, "Tencent-Hunyuan/HunyuanVideo#310, FI#942", applies=is_packed, faults="sequences-see-each-other")
def sequences_not_separated(kernel: Kernel, call: KernelCall) -> list[Sequence]:
    """Packed sequences are one: the cumulated lengths are ignored."""
    if not call.workload.packs_keys:
        return Kernel.sequences(kernel, call)
    return [Sequence(call, 0, 0, len(call.q), 0, len(call.k))]


def _tail_is_followed(w: Workload) -> bool:
    """Return whether a packed sequence with a tail that no mask hides is followed by another."""
    is_top_left = w.band is not None and w.band.top_left
    return w.packs_keys and not is_top_left and any(kv_len % TILE for _, kv_len in sequence_lengths(w)[:-1])


@LENGTHS(Kernel.lengths, "FI#942, FI#1206", applies=_tail_is_followed)
def tail_reads_next_sequence(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """The last tile of a packed sequence is filled up with, and sees, the keys of the next."""
    extent = Kernel.lengths(kernel, call, batch)
    if not call.workload.packs_keys:
        return extent
    filled = math.ceil(extent.kv_len / kernel.key_tile) * kernel.key_tile
    return extent._replace(kv_len=min(filled, len(call.k) - extent.kv_start))


def _aligns_to_its_end(w: Workload) -> bool:
    """Return whether some sequence's last row stands elsewhere, from its first key, than that of the longest."""
    if not is_band(w) or w.mask.band.top_left:
        return False
    return any(kv_len - q_len != w.kv_len - w.q_len for q_len, kv_len in sequence_lengths(w))


@LENGTHS(
    Kernel.diagonal,
    "TE#1281, TensorRT-LLM#10102",
    applies=_aligns_to_its_end,
    faults=("aligned-as-longest-sequence", "causal-other-alignment", "window-other-alignment"),
)
def alignment_of_longest_sequence(kernel: Kernel, seq: Sequence, row: Index) -> Index:
    """Rows stand where those of the longest sequence do, not at the end of their own."""
    w = seq.workload
    longest = seq._replace(q_len=w.q_len, kv_len=w.kv_len)
    return Kernel.diagonal(kernel, longest, row)


@LENGTHS(
    Kernel.lengths,
    "FA#2550, hw-native-sys/pypto#470",
    applies=lambda w: w.kv_pages is not None and any(n % w.kv_pages.size for n in w.kv_lens or ()),
    faults=("last-page-skipped", "tail-tile-missing"),
)
def last_page_skipped(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """A last page that is not full is not read."""
    extent, pages = Kernel.lengths(kernel, call, batch), call.workload.kv_pages
    return extent if pages is None else extent._replace(kv_len=extent.kv_len // pages.size * pages.size)


@LENGTHS(Kernel.pages, "FA#2550, FI#3136", applies=lambda w: w.batch > 1)
def pages_of_first_sequence(kernel: Kernel, seq: Sequence, number: Tensor) -> Tensor:
    """Every sequence reads the pages of the first."""
    return Kernel.pages(kernel, seq._replace(batch=0), number)


@LENGTHS(Kernel.pages, "hw-native-sys/pypto#470")
def pages_taken_in_order(kernel: Kernel, seq: Sequence, number: Tensor) -> Tensor:
    """A sequence's pages are taken to follow each other in the pool: only the first is looked up."""
    return (Kernel.pages(kernel, seq, number * 0) + number) % len(seq.call.k)


@LENGTHS(Kernel.pages, "FA#2709, FA#2711", applies=is_padded, faults="page-table-stride-ignored")
def page_table_without_its_stride(kernel: Kernel, seq: Sequence, number: Tensor) -> Tensor:
    """A row of the page table is found by the pages that the sequence uses, not by those that the row has room for."""
    table, pages = seq.call.inputs.page_table, seq.workload.kv_pages
    assert table is not None
    assert pages is not None
    used = math.ceil(seq.kv_len / pages.size)
    return table.flatten()[seq.batch * used + number].long()


@LENGTHS(Kernel.gather_pages, "FA#2745")
def page_of_another_size(kernel: Kernel, seq: Sequence, pool: Tensor, at: Tensor) -> Tensor:
    """Pages are taken to be twice as long as they are: a row of the page table is stepped through at half the pace."""
    _, size, _, _ = pool.shape
    return pool[kernel.pages(seq, at // (2 * size)), at % size].transpose(0, 1)


@LENGTHS(Kernel.attend, "FA#2470, FA#2421", applies=of_lengths(lambda q_len, kv_len: q_len and not kv_len), faults=EMPTY_ROWS)
def no_keys_is_nan(kernel: Kernel, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
    """A sequence without keys is divided by its denominator of 0."""
    out, lse = Kernel.attend(kernel, seq, rows)
    return (out, lse) if seq.kv_len else (out * math.nan, lse)


@LENGTHS(
    Kernel.sequences,
    "FA#2562, FA#2568",
    applies=lambda w: w.packs_keys and 0 in (w.q_lens or ())[:-1],
    faults="sequence-without-queries-left-out",
)
def sequence_without_queries_shifts_keys(kernel: Kernel, call: KernelCall) -> list[Sequence]:
    """Sequences without queries are dropped from the queries' list but not from the keys'."""
    every = Kernel.sequences(kernel, call)
    asked = [seq for seq in every if seq.q_len]
    return [a._replace(kv_start=b.kv_start, kv_len=b.kv_len) for a, b in zip(asked, every, strict=False)]


@LENGTHS(SplitKernel.parts, "FI#3890, FA#2550", applies=has_odd_tiles, faults=TAIL_MISSING)
def remainder_of_split_lost(kernel: SplitKernel, tiles: list[range]) -> list[list[range]]:
    """Tiles of keys that do not divide into the splits are left out."""
    size = len(tiles) // kernel.splits
    return [tiles[part * size : (part + 1) * size] for part in range(kernel.splits)]


def _with_padding(seq: Sequence) -> Sequence:
    """Return the sequence as long as the longest, where shorter ones are padded."""
    return seq if seq.workload.packs_keys else seq._replace(kv_len=seq.workload.kv_len)


@LENGTHS(Kernel.load_v, "cudnn-frontend#624, FI#945, FI#942", applies=is_padded, condition="poison")
def unused_values_read(kernel: Kernel, tile: Tile) -> Tensor:
    """Values past a sequence's end are multiplied by a probability of 0: NaN there, as in memory never written, spreads."""
    return kernel.load(_with_padding(tile.seq), tile.seq.call.v, tile.keys)


@LENGTHS.kernel("FI#942, vllm#37442", applies=is_padded, condition="poison")
class _UnusedKeysRead(Kernel):
    """Scores of keys past a sequence's end are hidden by adding -inf, which leaves NaN what it is."""

    def load_k(self, tile: Tile) -> Tensor:
        return self.load(_with_padding(tile.seq), tile.seq.call.k, tile.keys)

    def masked(self, tile: Tile, s: Tensor) -> Tensor:
        return s + s.new_zeros(()).where(self.visible(tile), -math.inf)
