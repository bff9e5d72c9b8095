"""Masks: edges one key off, alignments mixed up, tiles left out, tails counted, rows that see nothing."""

import dataclasses

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS, OTHER_ALIGNMENT, TAIL_MISSING
from pytest_attn.guests.mutants.kernel import Index, Kernel, Sequence, Softmax, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import (
    all_of,
    has_edge_before_last_tile,
    has_fully_masked_row_in_visited_tile,
    has_fully_masked_rows,
    has_key_tail,
    has_left_edge,
    has_right_edge,
    has_row_fully_masked_in_first_tile,
    has_several_row_tiles,
    has_tile_of_one_key,
    has_unaligned_left_edge,
    is_band,
    is_bottom_right,
    is_custom,
    is_document,
    is_grouped,
    is_top_left,
    is_window,
    shows_tail,
)
from pytest_attn.workloads.masks import Mask, MaskMod, Neighborhood

MASKS = Defects("masks")


@MASKS("FA#1133", "sglang#34273", applies=has_right_edge, faults=("causal-shows-next-key", "window-right-one-too-long"))
class _RightEdgeOneKeyLate(Kernel):
    """Each row of a causal mask or window sees one key too many on its right."""

    def last_key(self, seq: Sequence, row: Index) -> Index:
        return super().last_key(seq, row) + 1


@MASKS("vllm#3385", "transformers#29623", applies=is_band, faults=("causal-hides-diagonal", "window-right-one-too-short"))
class _RightEdgeOneKeyEarly(Kernel):
    """Rows do not see the key at which they stand: < in place of <=."""

    def last_key(self, seq: Sequence, row: Index) -> Index:
        return super().last_key(seq, row) - 1


@MASKS("sglang#34273", "transformers#39408", applies=has_left_edge, faults=("window-left-one-too-long",))
class _LeftEdgeOneKeyEarly(Kernel):
    """A window is one key too wide on its left."""

    def first_key(self, seq: Sequence, row: Index) -> Index:
        return super().first_key(seq, row) - 1


@MASKS("vllm#3385", "transformers#39408", applies=has_left_edge, faults=("window-left-one-too-short",))
class _LeftEdgeOneKeyLate(Kernel):
    """A window is one key too narrow: its size counts the row's own key."""

    def first_key(self, seq: Sequence, row: Index) -> Index:
        return super().first_key(seq, row) + (1 if self.band(seq).left else 0)


@MASKS("SageAttention#372", "SageAttention#131", "FA#2463", applies=is_bottom_right, faults=OTHER_ALIGNMENT)
class BottomRightTakenForTopLeft(Kernel):
    """Causal masks and windows are aligned to the first key where they should be to the last, as in chunked prefill."""

    def diagonal(self, seq: Sequence, row: Index) -> Index:
        return row


@MASKS("PT#103082", "ffpa#316", applies=is_top_left, faults=("causal-other-alignment", "mask-ignored"))
class _TopLeftTakenForBottomRight(Kernel):
    """Causal masks are aligned to the last key where they should be to the first."""

    def diagonal(self, seq: Sequence, row: Index) -> Index:
        return row + (seq.kv_len - seq.q_len)


@MASKS("vllm#47332", applies=all_of(is_band, has_several_row_tiles), faults=("mask-rows-within-tile",))
class _RowsCountedWithinTheirTile(Kernel):
    """The mask compares keys with a row's place in its tile, not with its place in the sequence."""

    def in_band(self, tile: Tile) -> Tensor:
        return super().in_band(dataclasses.replace(tile, rows=range(len(tile.rows))))


@MASKS("vllm#51257", "vllm-project/flash-attention#154", applies=has_edge_before_last_tile, faults=("mask-on-last-tile-only",))
class _MaskOnLastTileOnly(Kernel):
    """Only the last tile of keys is masked, though an edge runs through earlier ones as well."""

    def in_band(self, tile: Tile) -> Tensor:
        is_last = tile.keys == self.key_tiles(tile.seq, tile.rows)[-1]
        return super().in_band(tile) if is_last else tile.key_index >= 0


@MASKS(
    "vllm#51257",
    applies=all_of(has_right_edge, is_window),
    faults=("window-right-ignored", "window-right-one-too-long", "mask-ignored"),
)  # one key more may be all that are there
class _WindowRightEdgeOpen(Kernel):
    """A window hides the past but not the future."""

    def last_key(self, seq: Sequence, row: Index) -> Index:
        return super().last_key(seq, row) if self.band(seq).is_causal else seq.kv_len - 1


@MASKS("zml#763", applies=has_unaligned_left_edge, faults=("first-window-tile-missing",))
class _WindowFirstTileSkipped(Kernel):
    """The tile in which a window begins is skipped: its start is rounded up to a tile."""

    def key_tiles(self, seq: Sequence, rows: range) -> list[range]:
        first = self.key_range(seq, rows).start
        return [keys for keys in super().key_tiles(seq, rows) if keys.start >= first]


@MASKS("FA@a4f148b6", "FI#3890", applies=has_key_tail, faults=TAIL_MISSING)
class _LastKeyTileMissing(Kernel):
    """Keys after the last full tile are left out: the number of tiles is rounded down."""

    def key_tiles(self, seq: Sequence, rows: range) -> list[range]:
        return [keys for keys in super().key_tiles(seq, rows) if keys.stop <= seq.kv_len]


@MASKS("FI#3716", "FI#3717", "FluxML/NNkernels.jl#16", applies=shows_tail, faults=("tail-zeros-counted",))
class _TailKeysCounted(Kernel):
    """The zeros that fill up the last tile of keys are counted in the denominator."""

    def inside(self, tile: Tile) -> Tensor:
        return tile.key_index >= 0


@MASKS("xf#850", "PT#191937", applies=has_tile_of_one_key, faults=TAIL_MISSING)
class _TileOfOneKeyLost(Kernel):
    """A last tile of which one key is seen is not visited: lengths of 64 n + 1."""

    def key_range(self, seq: Sequence, rows: range) -> range:
        span = super().key_range(seq, rows)
        return range(span.start, max(span.start, span.stop - 1))


@MASKS(
    "rasbt/LLMs-from-scratch#1062", applies=all_of(is_custom, lambda w: w.mask.kind == "boolean"), faults=("mask-inverted",)
)
class _MaskInverted(Kernel):
    """True in a boolean mask is taken for hidden."""

    def in_custom_mask(self, tile: Tile, mask: Mask) -> Tensor:
        seen = super().in_custom_mask(tile, mask)
        return ~seen if mask.kind == "boolean" else seen


@MASKS("PT#107884", "transformers#30652", applies=is_custom, faults=("mask-ignored",))
class _MaskDropped(Kernel):
    """A mask given as a tensor or function never reaches the kernel."""

    def mask(self, seq: Sequence) -> Mask | None:
        mask = super().mask(seq)
        return mask if mask is not None and (mask.band or mask.documents) else None


@MASKS("xf#952", "xf#854", applies=all_of(is_grouped, is_custom), faults=("mask-of-key-head",))
class _MaskOfKeyHead(Kernel):
    """A mask that differs between heads is looked up by the key head."""

    def mask_mod(self, seq: Sequence, mask: Mask) -> MaskMod:
        mask_mod, group = super().mask_mod(seq, mask), seq.workload.group
        return lambda b, h, q_idx, kv_idx: mask_mod(b, h // group, q_idx, kv_idx)


@MASKS("FA#1990", applies=is_document, faults=("documents-begin-late",))
class _DocumentBeginsOneTokenLate(Kernel):
    """The first token of each document belongs to the one before."""

    def document_of(self, mask: Mask, like: Tensor) -> Tensor:
        return super().document_of(mask, like)[[0, *range(mask.tokens - 1)]]


@MASKS(
    "mosaicml/llm-foundry#1464", "Tencent-Hunyuan/HunyuanVideo#310", applies=is_document, faults=("documents-see-each-other",)
)
class _DocumentsNotSeparated(Kernel):
    """Documents in one sequence see each other; only causality is left."""

    def document_of(self, mask: Mask, like: Tensor) -> Tensor:
        return super().document_of(mask, like) * 0


@MASKS("transformers#39408", applies=lambda w: isinstance(w.mask, Neighborhood), faults=("neighborhood-one-larger",))
class _NeighborhoodOneTokenLarger(Kernel):
    """A neighborhood reaches one token further along its last axis."""

    def mask(self, seq: Sequence) -> Mask | None:
        mask = super().mask(seq)
        if not isinstance(mask, Neighborhood):
            return mask
        return dataclasses.replace(mask, kernel=(*mask.kernel[:-1], mask.kernel[-1] + 1))


@MASKS("PT#101967", "PT#103963", "PT#109517", applies=has_fully_masked_rows, faults=EMPTY_ROWS)
class _EmptyRowIsNan(Kernel):
    """A row that sees no key is divided by its denominator of 0."""

    def finish(self, state: Softmax) -> tuple[Tensor, Tensor]:
        return state.acc / state.total[..., None], self.lse(state)


@MASKS("FI#4267", applies=has_fully_masked_row_in_visited_tile, faults=("empty-rows-mean-of-v",))
class _EmptyRowAveragesValues(Kernel):
    """Hidden scores are -1e30, not -inf: where all are hidden, all weigh the same."""

    def masked(self, tile: Tile, s: Tensor) -> Tensor:
        return s.masked_fill(~self.visible(tile), -1e30)


@MASKS("xf#564", "xf#722", "PT#136232", applies=has_row_fully_masked_in_first_tile, faults=("blind-tile",))
class _BlindTileIsNan(Kernel):
    """A row that has seen no key yet subtracts -inf from -inf."""

    def shift(self, top: Tensor) -> Tensor:
        return top
