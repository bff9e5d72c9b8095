"""Lengths: padding counted, sequences that see each other, offsets of other sequences, pages lost or mixed up."""

import dataclasses
import math

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS, LENGTHS_MISREAD, TAIL_MISSING
from pytest_attn.guests.mutants.kernel import TILE, Extent, Index, Kernel, KernelCall, Sequence, SplitKernel, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import all_of, has_odd_tiles, is_band, is_grouped, is_packed, is_padded, is_paged
from pytest_attn.workloads.workload import Workload, sequence_lengths

LENGTHS = Defects("lengths")


@LENGTHS("TE#3331", "TE#2186", "FI#3871", applies=is_padded, faults=LENGTHS_MISREAD)
class _KvLengthIgnored(Kernel):
    """Padded keys are seen."""

    def lengths(self, call: KernelCall, batch: int) -> Extent:
        extent = super().lengths(call, batch)
        return extent if call.workload.packs_keys else extent._replace(kv_len=call.workload.kv_len)


@LENGTHS(
    "fla#766",
    "FI#3393",
    applies=lambda w: w.kv_lens is not None and not w.packs_keys,
    faults=("newest-key-missing", "last-key-missing", "causal-hides-diagonal"),
)
class _NewestKeyNotSeen(Kernel):
    """The length of a cache is one short: it was read before the new token was appended."""

    def lengths(self, call: KernelCall, batch: int) -> Extent:
        extent = super().lengths(call, batch)
        return extent if call.inputs.kv_lens is None else extent._replace(kv_len=max(extent.kv_len - 1, 0))


@LENGTHS("FI#3871", "Tencent-Hunyuan/HunyuanVideo#310", applies=is_padded, faults=LENGTHS_MISREAD)
class _LengthOfFirstSequence(Kernel):
    """All sequences of a batch are as long as the first."""

    def lengths(self, call: KernelCall, batch: int) -> Extent:
        return super().lengths(call, batch if call.workload.packs_keys else 0)


@LENGTHS(
    "vllm-project/vllm-omni#3525",
    applies=lambda w: w.packs_keys and w.q_lens != w.kv_lens,
    faults=("keys-at-offsets-of-queries",),
)
class _QueriesOffsetsForKeys(Kernel):
    """Packed keys are found with the cumulated lengths of the queries."""

    def lengths(self, call: KernelCall, batch: int) -> Extent:
        extent = super().lengths(call, batch)
        return extent._replace(kv_start=extent.q_start, kv_len=extent.q_len) if call.workload.packs_keys else extent

    def addresses(self, seq: Sequence, keys: range) -> Tensor:
        tokens = seq.call.k.shape[0] if seq.workload.packs_keys else seq.kv_len
        return super().addresses(seq, keys).clamp_(max=tokens - 1 - seq.kv_start)


@LENGTHS("FA#1990", applies=is_packed, faults=("keys-begin-late",))
class _KeysBeginOneTokenLate(Kernel):
    """Each packed sequence but the last reads the keys from its second to the first of the next."""

    def lengths(self, call: KernelCall, batch: int) -> Extent:
        extent, w = super().lengths(call, batch), call.workload
        return extent._replace(kv_start=extent.kv_start + 1) if w.packs_keys and batch + 1 < w.batch else extent


@LENGTHS("jax#39521", applies=all_of(is_packed, is_grouped), faults=("keys-with-stride-of-queries",))
class _KeyOffsetWithQueriesHeads(Kernel):
    """A packed sequence's first key is found with the stride of the queries, which have more heads."""

    def addresses(self, seq: Sequence, keys: range) -> Tensor:
        w, at = seq.workload, super().addresses(seq, keys)
        return (seq.kv_start * w.group + at) % len(seq.call.k) - seq.kv_start if w.packs_keys else at


@LENGTHS("Tencent-Hunyuan/HunyuanVideo#310", "FI#942", applies=is_packed, faults=("sequences-see-each-other",))
class _SequencesNotSeparated(Kernel):
    """Packed sequences are one: the cumulated lengths are ignored."""

    def sequences(self, call: KernelCall) -> list[Sequence]:
        if not call.workload.packs_keys:
            return super().sequences(call)
        return [Sequence(call, 0, 0, len(call.q), 0, len(call.k))]


def _tail_is_followed(w: Workload) -> bool:
    """Return whether a packed sequence with a tail that no mask hides is followed by another."""
    is_top_left = w.band is not None and w.band.top_left
    return w.packs_keys and not is_top_left and any(kv_len % TILE for _, kv_len in sequence_lengths(w)[:-1])


@LENGTHS("FI#942", "FI#1206", applies=_tail_is_followed, faults=("tail-reads-next-sequence",))
class _TailReadsNextSequence(Kernel):
    """The last tile of a packed sequence is filled up with, and sees, the keys of the next."""

    def lengths(self, call: KernelCall, batch: int) -> Extent:
        extent = super().lengths(call, batch)
        if not call.workload.packs_keys:
            return extent
        filled = math.ceil(extent.kv_len / self.key_tile) * self.key_tile
        return extent._replace(kv_len=min(filled, len(call.k) - extent.kv_start))


def _aligns_to_its_end(w: Workload) -> bool:
    """Return whether some sequence's last row stands elsewhere, from its first key, than that of the longest."""
    if not is_band(w) or w.mask.band.top_left:
        return False
    return any(kv_len - q_len != w.kv_len - w.q_len for q_len, kv_len in sequence_lengths(w))


@LENGTHS(
    "TE#1281",
    "TensorRT-LLM#10102",
    applies=_aligns_to_its_end,
    faults=("aligned-as-longest-sequence", "causal-other-alignment", "window-other-alignment"),
)
class _AlignmentOfLongestSequence(Kernel):
    """Rows stand where those of the longest sequence do, not at the end of their own."""

    def diagonal(self, seq: Sequence, row: Index) -> Index:
        w = seq.workload
        longest = dataclasses.replace(seq, q_len=w.q_len, kv_len=w.kv_len)
        return super().diagonal(longest, row)


@LENGTHS(
    "FA#2550",
    "hw-native-sys/pypto#470",
    applies=lambda w: w.kv_pages is not None and any(n % w.kv_pages.size for n in w.kv_lens or ()),
    faults=("last-page-skipped", "tail-tile-missing"),
)
class _LastPageSkipped(Kernel):
    """A last page that is not full is not read."""

    def lengths(self, call: KernelCall, batch: int) -> Extent:
        extent, pages = super().lengths(call, batch), call.workload.kv_pages
        return extent if pages is None else extent._replace(kv_len=extent.kv_len // pages.size * pages.size)


@LENGTHS("FA#2550", "FI#3136", applies=all_of(is_paged, lambda w: w.batch > 1), faults=("pages-of-first-sequence",))
class _PagesOfFirstSequence(Kernel):
    """Every sequence reads the pages of the first."""

    def pages(self, seq: Sequence, number: Tensor) -> Tensor:
        return super().pages(dataclasses.replace(seq, batch=0), number)


@LENGTHS("hw-native-sys/pypto#470", applies=is_paged, faults=("pages-taken-in-order",))
class _PagesTakenInOrder(Kernel):
    """A sequence's pages are taken to follow each other in the pool: only the first is looked up."""

    def pages(self, seq: Sequence, number: Tensor) -> Tensor:
        return (super().pages(seq, number * 0) + number) % len(seq.call.k)


@LENGTHS("FA#2709", "FA#2711", applies=all_of(is_paged, is_padded), faults=("page-table-stride-ignored",))
class _PageTableWithoutItsStride(Kernel):
    """A row of the page table is found by the pages that the sequence uses, not by those that the row has room for."""

    def pages(self, seq: Sequence, number: Tensor) -> Tensor:
        table, pages = seq.call.inputs.page_table, seq.workload.kv_pages
        assert table is not None
        assert pages is not None
        used = math.ceil(seq.kv_len / pages.size)
        return table.flatten()[seq.batch * used + number].long()


@LENGTHS("FA#2745", applies=is_paged, faults=("page-of-another-size",))
class _PageOfAnotherSize(Kernel):
    """Pages are taken to be twice as long as they are: a row of the page table is stepped through at half the pace."""

    def gather_pages(self, seq: Sequence, pool: Tensor, at: Tensor) -> Tensor:
        _, size, _, _ = pool.shape
        return pool[self.pages(seq, at // (2 * size)), at % size].transpose(0, 1)


@LENGTHS("FA#2470", "FA#2421", applies=lambda w: any(q and not kv for q, kv in sequence_lengths(w)), faults=EMPTY_ROWS)
class _NoKeysIsNan(Kernel):
    """A sequence without keys is divided by its denominator of 0."""

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        out, lse = super().attend(seq, rows)
        return (out, lse) if seq.kv_len else (out * math.nan, lse)


@LENGTHS(
    "FA#2562",
    "FA#2568",
    applies=lambda w: w.packs_keys and 0 in (w.q_lens or ())[:-1],
    faults=("sequence-without-queries-left-out",),
)
class _SequenceWithoutQueriesShiftsKeys(Kernel):
    """Sequences without queries are dropped from the queries' list but not from the keys'."""

    def sequences(self, call: KernelCall) -> list[Sequence]:
        every = super().sequences(call)
        asked = [seq for seq in every if seq.q_len]
        return [dataclasses.replace(a, kv_start=b.kv_start, kv_len=b.kv_len) for a, b in zip(asked, every, strict=False)]


@LENGTHS("FI#3890", "FA#2550", applies=has_odd_tiles, faults=TAIL_MISSING)
class _RemainderOfSplitLost(SplitKernel):
    """Tiles of keys that do not divide into the splits are left out."""

    def parts(self, tiles: list[range]) -> list[list[range]]:
        size = len(tiles) // self.splits
        return [tiles[part * size : (part + 1) * size] for part in range(self.splits)]


def _with_padding(seq: Sequence) -> Sequence:
    """Return the sequence as long as the longest, where shorter ones are padded."""
    return seq if seq.workload.packs_keys else dataclasses.replace(seq, kv_len=seq.workload.kv_len)


@LENGTHS("cudnn-frontend#624", "FI#945", "FI#942", applies=is_padded, condition="poison")
class _UnusedValuesRead(Kernel):
    """Values past a sequence's end are multiplied by a probability of 0: NaN there, as in memory never written, spreads."""

    def load_v(self, tile: Tile) -> Tensor:
        return self.load(_with_padding(tile.seq), tile.seq.call.v, tile.keys)


@LENGTHS("FI#942", "vllm#37442", applies=is_padded, condition="poison")
class _UnusedKeysRead(Kernel):
    """Scores of keys past a sequence's end are hidden by adding -inf, which leaves NaN what it is."""

    def load_k(self, tile: Tile) -> Tensor:
        return self.load(_with_padding(tile.seq), tile.seq.call.k, tile.keys)

    def masked(self, tile: Tile, s: Tensor) -> Tensor:
        return s + s.new_zeros(()).where(self.visible(tile), -math.inf)
