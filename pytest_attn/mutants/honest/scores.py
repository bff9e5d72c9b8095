"""The scores of a tile: q . k, scaled, capped, biased, modified and masked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_attn.mutants.honest.masks import Masks
from pytest_attn.mutants.honest.tiles import Call, Tile

if TYPE_CHECKING:
    from torch import Tensor


class Scores(Masks):
    """The steps from q and k to the scores that the softmax is taken of."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Multiply q and k, (heads, rows, keys)."""
        return q @ k.transpose(-1, -2)

    def scale(self, call: Call) -> float:
        """Return the factor on q . k."""
        return call.workload.softmax_scale

    def scaled(self, tile: Tile, s: Tensor) -> Tensor:
        """Scale q . k."""
        return s * self.scale(tile.seq.call)

    def modified(self, tile: Tile, s: Tensor) -> Tensor:
        """Apply softcap, bias, ALiBi and score_mod to scaled scores."""
        w = tile.workload
        s = self.with_biases(tile, self.capped(tile, self.before_softcap(tile, s)))
        return s if w.score_mod is None else w.score_mod(s, *tile.index)

    def before_softcap(self, tile: Tile, s: Tensor) -> Tensor:
        """Add the bias where it comes first."""
        bias = tile.seq.call.inputs.bias
        return s if bias is None or not tile.workload.bias_before_softcap else s + self.bias(tile, bias)

    def modified_again(self, tile: Tile, s: Tensor) -> Tensor:
        """Do the same in the backward pass."""
        return self.modified(tile, s)

    def softcap(self, call: Call) -> float | None:
        """Return the softcap."""
        return call.workload.softcap

    def capped(self, tile: Tile, s: Tensor) -> Tensor:
        """Apply the softcap."""
        cap = self.softcap(tile.seq.call)
        return s if cap is None else cap * (s / cap).tanh()

    def with_biases(self, tile: Tile, s: Tensor) -> Tensor:
        """Add bias and ALiBi."""
        inputs = tile.seq.call.inputs
        if inputs.bias is not None and not tile.workload.bias_before_softcap:
            s = s + self.bias(tile, inputs.bias)
        if (slopes := inputs.alibi_slopes) is not None:
            slopes = slopes[tile.seq.batch] if slopes.dim() == 2 else slopes
            s = s + self.alibi(tile, self.alibi_slopes(tile, slopes))
        return s

    def bias(self, tile: Tile, bias: Tensor) -> Tensor:
        """Return the tile's part of the bias, (heads, rows, keys)."""
        w = tile.workload
        b, h, q_idx, kv_idx = tile.index
        return bias.expand(w.batch, w.heads, w.q_len, w.kv_len)[b, h, q_idx, kv_idx].float()

    def alibi_slopes(self, tile: Tile, slopes: Tensor) -> Tensor:
        """Return the slope of every query head, (heads,)."""
        return slopes

    def alibi(self, tile: Tile, slopes: Tensor) -> Tensor:
        """Return ALiBi's penalty, (heads, rows, keys)."""
        return -slopes[:, None, None] * self.distance(tile).abs()

    def distance(self, tile: Tile) -> Tensor:
        """Return how far before a row each key stands, (1, rows, keys); the last row stands at the last key."""
        return tile.row_index + (tile.seq.kv_len - tile.seq.q_len) - tile.key_index

    def masked(self, tile: Tile, s: Tensor) -> Tensor:
        """Exclude what the rows do not see."""
        return s.masked_fill(~self.visible(tile), -math.inf)

    def masked_again(self, tile: Tile, s: Tensor) -> Tensor:
        """Do the same in the backward pass."""
        return self.masked(tile, s)
