"""Masks: edges one key off, alignments mixed up, tiles left out, tails counted, rows that see nothing."""

import dataclasses

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS, OTHER_ALIGNMENT, TAIL_MISSING
from pytest_attn.guests.mutants import reach
from pytest_attn.guests.mutants.kernel import Index, Kernel, Sequence, Softmax, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.workloads.masks import Mask, MaskMod, Neighborhood

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
