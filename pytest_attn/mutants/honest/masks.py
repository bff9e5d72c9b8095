"""Which keys of a tile its rows see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.mutants.honest.tiles import Index, Sequence, Tile
from pytest_attn.workloads.masks import Causal, Document, Mask, MaskMod, Window

if TYPE_CHECKING:
    from torch import Tensor


class Masks:
    """The steps that apply a mask."""

    def mask(self, seq: Sequence) -> Mask | None:
        """Return the mask to apply."""
        return seq.workload.plain_mask

    def visible(self, tile: Tile) -> Tensor:
        """Return which keys the rows see, bool, broadcastable to (heads, rows, keys)."""
        return self.inside(tile) & self.unmasked(tile)

    def inside(self, tile: Tile) -> Tensor:
        """Return which keys of the tile the sequence has."""
        return tile.key_index < tile.seq.kv_len

    def unmasked(self, tile: Tile) -> Tensor:
        """Return which keys the mask leaves visible."""
        mask = self.mask(tile.seq)
        if mask is None:
            return tile.key_index >= 0
        if isinstance(mask, Causal | Window):
            return self.in_band(tile)
        return self.in_document(tile, mask) if isinstance(mask, Document) else self.in_custom_mask(tile, mask)

    def in_band(self, tile: Tile) -> Tensor:
        """Evaluate a causal mask or window."""
        rows, keys = tile.row_index, tile.key_index
        return (keys >= self.first_key(tile.seq, rows)) & (keys <= self.last_key(tile.seq, rows))

    def diagonal(self, seq: Sequence, row: Index) -> Index:
        """Return the key at which a query row stands."""
        mask = self.mask(seq)
        is_top_left = isinstance(mask, Causal) and not mask.bottom_right
        return row if is_top_left else row + (seq.kv_len - seq.q_len)

    def first_key(self, seq: Sequence, row: Index) -> Index:
        """Return the first key that a causal mask or window lets a row see; it may lie before the sequence."""
        mask = self.mask(seq)
        return self.diagonal(seq, row) - mask.left if isinstance(mask, Window) and mask.left is not None else 0

    def last_key(self, seq: Sequence, row: Index) -> Index:
        """Return the last key that a causal mask or window lets a row see; it may lie past the sequence."""
        mask = self.mask(seq)
        right = mask.right if isinstance(mask, Window) else 0
        return seq.kv_len - 1 if right is None else self.diagonal(seq, row) + right

    def in_document(self, tile: Tile, mask: Document) -> Tensor:
        """Evaluate a document mask."""
        _, _, q_idx, kv_idx = tile.index
        document = self.document_of(mask, tile.seq.call.q)
        seen = document[q_idx] == document[kv_idx]
        return seen & (kv_idx <= q_idx) if mask.causal else seen

    def document_of(self, mask: Document, like: Tensor) -> Tensor:
        """Return the number of each token's document, (tokens,)."""
        import torch

        return torch.repeat_interleave(torch.tensor(mask.lengths)).to(like.device)

    def in_custom_mask(self, tile: Tile, mask: Mask) -> Tensor:
        """Evaluate a mask that only its own predicate knows: a neighborhood, a tensor or a function."""
        return self.mask_mod(tile.seq, mask)(*tile.index)

    def mask_mod(self, seq: Sequence, mask: Mask) -> MaskMod:
        """Return the predicate of such a mask."""
        return seq.call.bound(mask)
