"""Masks, lengths and heads: keys and values that rows see, or read, and should not, and such that they miss."""

import dataclasses
import math

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS, LENGTHS_MISREAD, OTHER_ALIGNMENT, TAIL_MISSING
from pytest_attn.guests.mutants import reach
from pytest_attn.guests.mutants.kernel import (
    QKV,
    TILE,
    Index,
    Kernel,
    KernelCall,
    Sequence,
    Softmax,
    SplitKernel,
    Tile,
    positions,
)
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.wrong_memory import contiguous_strides, read_with_strides
from pytest_attn.workloads.masks import Mask, MaskMod, Neighborhood
from pytest_attn.workloads.workload import Workload, is_interleaved, sequence_lengths

#: edges one key off, alignments mixed up, tiles left out, tails counted, rows that see nothing
MASKS = Defects("masks")


@MASKS(
    Kernel.last_key,
    "FA#1133, sglang#34273",
    applies=reach.has_right_edge,
    faults=("causal-shows-next-key", "window-right-one-too-long"),
)
def right_edge_one_key_late(kernel: Kernel, seq: Sequence, row: Index) -> Index:
    """Each row of a causal mask or window sees one key too many on its right."""
    return Kernel.last_key(kernel, seq, row) + 1


@MASKS(Kernel.last_key, "vllm#3385, transformers#29623", faults=("causal-hides-diagonal", "window-right-one-too-short"))
def right_edge_one_key_early(kernel: Kernel, seq: Sequence, row: Index) -> Index:
    """Rows do not see the key at which they stand: < in place of <=."""
    return Kernel.last_key(kernel, seq, row) - 1


@MASKS(Kernel.first_key, "sglang#34273, transformers#39408", applies=reach.has_left_edge, faults="window-left-one-too-long")
def left_edge_one_key_early(kernel: Kernel, seq: Sequence, row: Index) -> Index:
    """A window is one key too wide on its left."""
    return Kernel.first_key(kernel, seq, row) - 1


@MASKS(Kernel.first_key, "vllm#3385, transformers#39408", applies=reach.has_left_edge, faults="window-left-one-too-short")
def left_edge_one_key_late(kernel: Kernel, seq: Sequence, row: Index) -> Index:
    """A window is one key too narrow: its size counts the row's own key."""
    return Kernel.first_key(kernel, seq, row) + (1 if kernel.band(seq).left else 0)


@MASKS.kernel("SageAttention#372, SageAttention#131, FA#2463", applies=reach.is_bottom_right, faults=OTHER_ALIGNMENT)
class BottomRightTakenForTopLeft(Kernel):
    """Causal masks and windows are aligned to the first key where they should be to the last, as in chunked prefill."""

    def diagonal(self, seq: Sequence, row: Index) -> Index:
        return row


@MASKS(Kernel.diagonal, "PT#103082, ffpa#316", applies=reach.is_top_left, faults=("causal-other-alignment", "mask-ignored"))
def top_left_taken_for_bottom_right(kernel: Kernel, seq: Sequence, row: Index) -> Index:
    """Causal masks are aligned to the last key where they should be to the first."""
    return row + (seq.kv_len - seq.q_len)


@MASKS(Kernel.in_band, "vllm#47332", applies=reach.has_several_row_tiles, faults="mask-rows-within-tile")
def rows_counted_within_their_tile(kernel: Kernel, tile: Tile) -> Tensor:
    """The mask compares keys with a row's place in its tile, not with its place in the sequence."""
    return Kernel.in_band(kernel, dataclasses.replace(tile, rows=range(len(tile.rows))))


@MASKS(Kernel.in_band, "vllm#51257, vllm-project/flash-attention#154", applies=reach.has_edge_before_last_tile)
def mask_on_last_tile_only(kernel: Kernel, tile: Tile) -> Tensor:
    """Only the last tile of keys is masked, though an edge runs through earlier ones as well."""
    is_last = tile.keys == kernel.key_tiles(tile.seq, tile.rows)[-1]
    return Kernel.in_band(kernel, tile) if is_last else tile.key_index >= 0


@MASKS(
    Kernel.last_key,
    "vllm#51257",
    applies=reach.all_of(reach.has_right_edge, reach.is_window),
    faults=("window-right-ignored", "window-right-one-too-long", "mask-ignored"),
)
def window_right_edge_open(kernel: Kernel, seq: Sequence, row: Index) -> Index:
    """A window hides the past but not the future."""
    return Kernel.last_key(kernel, seq, row) if kernel.band(seq).is_causal else seq.kv_len - 1


@MASKS(Kernel.key_tiles, "zml#763", applies=reach.has_unaligned_left_edge, faults="first-window-tile-missing")
def window_first_tile_skipped(kernel: Kernel, seq: Sequence, rows: range) -> list[range]:
    """The tile in which a window begins is skipped: its start is rounded up to a tile."""
    first = kernel.key_range(seq, rows).start
    return [keys for keys in Kernel.key_tiles(kernel, seq, rows) if keys.start >= first]


@MASKS(Kernel.key_tiles, "FA@a4f148b6, FI#3890", applies=reach.has_key_tail, faults=TAIL_MISSING)
def last_key_tile_missing(kernel: Kernel, seq: Sequence, rows: range) -> list[range]:
    """Keys after the last full tile are left out: the number of tiles is rounded down."""
    return [keys for keys in Kernel.key_tiles(kernel, seq, rows) if keys.stop <= seq.kv_len]


@MASKS(Kernel.inside, "FI#3716, FI#3717, FluxML/NNkernels.jl#16", applies=reach.shows_tail, faults="tail-zeros-counted")
def tail_keys_counted(kernel: Kernel, tile: Tile) -> Tensor:
    """The zeros that fill up the last tile of keys are counted in the denominator."""
    return tile.key_index >= 0


@MASKS(Kernel.key_range, "xf#850, PT#191937", applies=reach.has_tile_of_one_key, faults=TAIL_MISSING)
def tile_of_one_key_lost(kernel: Kernel, seq: Sequence, rows: range) -> range:
    """A last tile of which one key is seen is not visited: lengths of 64 n + 1."""
    span = Kernel.key_range(kernel, seq, rows)
    return range(span.start, max(span.start, span.stop - 1))


@MASKS(Kernel.in_custom_mask, "rasbt/LLMs-from-scratch#1062", applies=lambda w: w.mask.kind == "boolean")
def mask_inverted(kernel: Kernel, tile: Tile, mask: Mask) -> Tensor:
    """True in a boolean mask is taken for hidden."""
    seen = Kernel.in_custom_mask(kernel, tile, mask)
    return ~seen if mask.kind == "boolean" else seen


@MASKS(Kernel.mask, "PT#107884, transformers#30652", applies=reach.is_custom, faults="mask-ignored")
def mask_dropped(kernel: Kernel, seq: Sequence) -> Mask | None:
    """A mask given as a tensor or function never reaches the kernel."""
    mask = Kernel.mask(kernel, seq)
    return mask if mask is not None and (mask.band or mask.documents) else None


@MASKS(Kernel.mask_mod, "xf#952, xf#854", applies=reach.is_grouped)
def mask_of_key_head(kernel: Kernel, seq: Sequence, mask: Mask) -> MaskMod:
    """A mask that differs between heads is looked up by the key head."""
    mask_mod, group = Kernel.mask_mod(kernel, seq, mask), seq.workload.group
    return lambda b, h, q_idx, kv_idx: mask_mod(b, h // group, q_idx, kv_idx)


@MASKS(Kernel.document_of, "FA#1990", faults="documents-begin-late")
def document_begins_one_token_late(kernel: Kernel, mask: Mask, like: Tensor) -> Tensor:
    """The first token of each document belongs to the one before."""
    return Kernel.document_of(kernel, mask, like)[[0, *range(mask.tokens - 1)]]


@MASKS(Kernel.document_of, "mosaicml/llm-foundry#1464, Tencent-Hunyuan/HunyuanVideo#310", faults="documents-see-each-other")
def documents_not_separated(kernel: Kernel, mask: Mask, like: Tensor) -> Tensor:
    """Documents in one sequence see each other; only causality is left."""
    return Kernel.document_of(kernel, mask, like) * 0


@MASKS(Kernel.mask, "transformers#39408", applies=lambda w: isinstance(w.mask, Neighborhood), faults="neighborhood-one-larger")
def neighborhood_one_token_larger(kernel: Kernel, seq: Sequence) -> Mask | None:
    """A neighborhood reaches one token further along its last axis."""
    mask = Kernel.mask(kernel, seq)
    if not isinstance(mask, Neighborhood):
        return mask
    return dataclasses.replace(mask, kernel=(*mask.kernel[:-1], mask.kernel[-1] + 1))


@MASKS(Kernel.finish, "PT#101967, PT#103963, PT#109517", applies=reach.has_fully_masked_rows, faults=EMPTY_ROWS)
def empty_row_is_nan(kernel: Kernel, state: Softmax) -> tuple[Tensor, Tensor]:
    """A row that sees no key is divided by its denominator of 0."""
    return state.acc / state.total[..., None], kernel.lse(state)


@MASKS(Kernel.masked, "FI#4267", applies=reach.has_fully_masked_row_in_visited_tile, faults="empty-rows-mean-of-v")
def empty_row_averages_values(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """Hidden scores are -1e30, not -inf: where all are hidden, all weigh the same."""
    return s.masked_fill(~kernel.visible(tile), -1e30)


@MASKS(Kernel.shift, "xf#564, xf#722, PT#136232", applies=reach.has_row_fully_masked_in_first_tile, faults="blind-tile")
def blind_tile_is_nan(kernel: Kernel, top: Tensor) -> Tensor:
    """A row that has seen no key yet subtracts -inf from -inf."""
    return top


#: padding counted, sequences that see each other, offsets of other sequences, pages lost or mixed up
LENGTHS = Defects("lengths")


@LENGTHS(Kernel.lengths, "TE#3331, TE#2186, FI#3871", applies=reach.is_padded, faults=LENGTHS_MISREAD)
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


@LENGTHS(Kernel.lengths, "FI#3871, Tencent-Hunyuan/HunyuanVideo#310", applies=reach.is_padded, faults=LENGTHS_MISREAD)
def length_of_first_sequence(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """All sequences of a batch are as long as the first."""
    return Kernel.lengths(kernel, call, batch if call.workload.packs_keys else 0)._replace(batch=batch)


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


@LENGTHS(Kernel.lengths, "FA#1990", applies=reach.is_packed, faults="keys-begin-late")
def keys_begin_one_token_late(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """Each packed sequence but the last reads the keys from its second to the first of the next."""
    extent, w = Kernel.lengths(kernel, call, batch), call.workload
    return extent._replace(kv_start=extent.kv_start + 1) if w.packs_keys and batch + 1 < w.batch else extent


@LENGTHS(
    Kernel.addresses,
    "jax#39521",
    applies=reach.all_of(reach.is_packed, reach.is_grouped),
    faults="keys-with-stride-of-queries",
)
def key_offset_with_queries_heads(kernel: Kernel, seq: Sequence, keys: range) -> Tensor:
    """A packed sequence's first key is found with the stride of the queries, which have more heads."""
    w, at = seq.workload, Kernel.addresses(kernel, seq, keys)
    return (seq.kv_start * w.group + at) % len(seq.call.k) - seq.kv_start if w.packs_keys else at


@LENGTHS(
    Kernel.sequences, "Tencent-Hunyuan/HunyuanVideo#310, FI#942", applies=reach.is_packed, faults="sequences-see-each-other"
)
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
    if not reach.is_band(w) or w.mask.band.top_left:
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


@LENGTHS(Kernel.pages, "FA#2709, FA#2711", applies=reach.is_padded, faults="page-table-stride-ignored")
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


@LENGTHS(
    Kernel.attend, "FA#2470, FA#2421", applies=reach.of_lengths(lambda q_len, kv_len: q_len and not kv_len), faults=EMPTY_ROWS
)
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


@LENGTHS(SplitKernel.parts, "FI#3890, FA#2550", applies=reach.has_odd_tiles, faults=TAIL_MISSING)
def remainder_of_split_lost(kernel: SplitKernel, tiles: list[range]) -> list[list[range]]:
    """Tiles of keys that do not divide into the splits are left out."""
    size = len(tiles) // kernel.splits
    return [tiles[part * size : (part + 1) * size] for part in range(kernel.splits)]


def _with_padding(seq: Sequence) -> Sequence:
    """Return the sequence as long as the longest, where shorter ones are padded."""
    return seq if seq.workload.packs_keys else seq._replace(kv_len=seq.workload.kv_len)


@LENGTHS(Kernel.load_v, "cudnn-frontend#624, FI#945, FI#942", applies=reach.is_padded, condition="poison")
def unused_values_read(kernel: Kernel, tile: Tile) -> Tensor:
    """Values past a sequence's end are multiplied by a probability of 0: NaN there, as in memory never written, spreads."""
    return kernel.load(_with_padding(tile.seq), tile.seq.call.v, tile.keys)


@LENGTHS.kernel("FI#942, vllm#37442", applies=reach.is_padded, condition="poison")
class _UnusedKeysRead(Kernel):
    """Scores of keys past a sequence's end are hidden by adding -inf, which leaves NaN what it is."""

    def load_k(self, tile: Tile) -> Tensor:
        return self.load(_with_padding(tile.seq), tile.seq.call.k, tile.keys)

    def masked(self, tile: Tile, s: Tensor) -> Tensor:
        return s + s.new_zeros(()).where(self.visible(tile), -math.inf)


#: query heads that read another key head, head dimensions cut or misread
HEADS = Defects("heads")


@HEADS(
    Kernel.kv_head_of,
    "HipKittens#22, FI#1148",
    applies=reach.all_of(reach.is_grouped_twice, lambda w: not is_interleaved(w)),
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


@HEADS(
    Kernel.kv_head_of,
    "FI#1148, FI#1614",
    applies=reach.all_of(reach.is_grouped_twice, lambda w: bool(w.group & (w.group - 1))),
)
def group_rounded_to_power_of_two(kernel: Kernel, seq: Sequence) -> Tensor:
    """Groups of 3, 5 or 7 query heads are taken for groups of 4 or 8."""
    return positions(range(seq.workload.heads), seq.call.q) >> (seq.workload.group - 1).bit_length()


@HEADS(Kernel.kv_head_of, "SageAttention#302, xf#854", applies=reach.is_grouped_twice)
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
    applies=reach.all_of(reach.is_dense, lambda w: w.v_head_dim != w.head_dim),
    faults="v-with-head-dim-of-k",
)
def values_read_with_keys_head_dim(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Rows of v are taken to lie head_dim apart, as those of k do."""
    if v.shape[-1] == k.shape[-1]:
        return q, k, v
    return q, k, read_with_strides(v, contiguous_strides((*v.shape[:-1], k.shape[-1])))


@HEADS(Kernel.load_k, "TE#3216, jax#36702", applies=reach.all_of(reach.is_dense, lambda w: w.batch > 1))
def keys_of_first_batch_entry(kernel: Kernel, tile: Tile) -> Tensor:
    """Every batch entry reads the keys of the first: a stride of 0."""
    seq = tile.seq if tile.workload.kv_pages else tile.seq._replace(batch=0)
    return kernel.load(seq, seq.call.k, tile.keys)


@HEADS(Kernel.sinks, "FI#4525", applies=reach.is_grouped)
def sink_of_key_head(kernel: Kernel, seq: Sequence) -> Tensor | None:
    """A query head takes the sink with the number of its key head."""
    sinks = Kernel.sinks(kernel, seq)
    return None if sinks is None else sinks[kernel.kv_head_of(seq)]


@HEADS(Kernel.alibi_slopes, "vllm#1938", applies=reach.is_grouped)
def alibi_slope_of_key_head(kernel: Kernel, tile: Tile, slopes: Tensor) -> Tensor:
    """A query head takes the slope with the number of its key head."""
    return slopes[kernel.kv_head_of(tile.seq)]


@HEADS(
    Kernel.bias,
    "jax#36702, xf#788",
    applies=lambda w: w.heads > 1 and "h" in (w.bias or ""),
    faults="bias-of-another-head",
)
def bias_of_first_head(kernel: Kernel, tile: Tile, bias: Tensor) -> Tensor:
    """A bias that differs between heads is read for the first."""
    return Kernel.bias(kernel, tile, bias[:, :1])
