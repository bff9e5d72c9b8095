"""The forward pass: tiles of keys one after the other, and an online softmax in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_attn.mutants.honest.memory import Memory
from pytest_attn.mutants.honest.scores import Scores
from pytest_attn.mutants.honest.tiles import Call, Sequence, Softmax, Tile
from pytest_attn.workloads.masks import Causal, Window

if TYPE_CHECKING:
    from torch import Tensor


class Forward(Memory, Scores):
    """The steps of the forward pass."""

    row_tile: int
    key_tile: int

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def row_tiles(self, seq: Sequence) -> list[range]:
        """Cut the query rows into tiles; the last one is shorter."""
        starts = range(0, seq.q_len, self.row_tile)
        return [range(start, min(start + self.row_tile, seq.q_len)) for start in starts]

    def key_range(self, seq: Sequence, rows: range) -> range:
        """Return the keys that any of these rows may see, where the mask is a band; all keys otherwise."""
        if not isinstance(self.mask(seq), Causal | Window):
            return range(seq.kv_len)
        first, last = int(self.first_key(seq, rows[0])), int(self.last_key(seq, rows[-1]))
        return range(max(first, 0), min(last + 1, seq.kv_len))

    def key_tiles(self, seq: Sequence, rows: range) -> list[range]:
        """List the tiles of keys to visit, each of full size."""
        span = self.key_range(seq, rows)
        starts = range(span.start // self.key_tile * self.key_tile, span.stop, self.key_tile)
        return [range(start, start + self.key_tile) for start in starts]

    def key_tiles_again(self, seq: Sequence, rows: range) -> list[range]:
        """List the tiles of keys to visit in the backward pass."""
        return self.key_tiles(seq, rows)

    # -- the online softmax --------------------------------------------------------------------------------------------

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return out and lse."""
        out, lse = self.allocate_results(call)
        for seq in self.sequences(call):
            for rows in self.row_tiles(seq):
                self.store(seq, rows, out, lse, *self.attend(seq, rows))
        return out, lse

    def store(self, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor) -> None:
        """Write rows of the results, rounding out to its dtype."""
        self.rows_of(seq, out, rows).copy_(out_rows)
        self.rows_of(seq, lse, rows).copy_(lse_rows)

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        """Return out (heads, rows, v_head_dim) and lse (heads, rows) of some rows."""
        state = self.softmax(seq, rows, self.key_tiles(seq, rows))
        return self.finish(self.with_sinks(seq, state))

    def softmax(self, seq: Sequence, rows: range, tiles: list[range]) -> Softmax:
        """Visit tiles of keys one after the other."""
        q, state = self.load_q(seq, rows), self.start(seq, rows)
        for keys in tiles:
            state = self.step(Tile(seq, rows, keys), q, state)
        return state

    def start(self, seq: Sequence, rows: range) -> Softmax:
        """Return the softmax of rows that have seen nothing."""
        import torch

        w, device = seq.workload, seq.call.q.device
        nothing = torch.zeros(w.heads, len(rows), device=device)
        return Softmax(nothing - math.inf, nothing, torch.zeros(w.heads, len(rows), w.v_head_dim, device=device))

    def step(self, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
        """Visit one tile of keys."""
        k, v = self.load_k(tile), self.load_v(tile)
        s = self.masked(tile, self.modified(tile, self.scaled(tile, self.logits(q, k))))
        top = self.row_max(state.top, s)
        factor = self.rescale(state.top, top)
        p = self.probabilities(tile, s, top)
        total = self.denominator(tile, state.total * factor, p)
        return Softmax(top, total, self.accumulate(tile, state.acc * factor[..., None], self.rounded(tile, p), v))

    def row_max(self, top: Tensor, s: Tensor) -> Tensor:
        """Return the largest score so far."""
        return top.maximum(s.amax(-1))

    def shift(self, top: Tensor) -> Tensor:
        """Return what to subtract before the exponential: 0 where a row has seen nothing, as -inf less -inf is NaN."""
        return top.masked_fill(top == -math.inf, 0)

    def rescale(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the factor that brings sums relative to the old maximum to the new one."""
        return (old - self.shift(new)).exp()

    def probabilities(self, tile: Tile, s: Tensor, top: Tensor) -> Tensor:
        """Return exp(s - top)."""
        return (s - self.shift(top)[..., None]).exp()

    def denominator(self, tile: Tile, total: Tensor, p: Tensor) -> Tensor:
        """Add the tile's probabilities, before they are rounded, to the denominator."""
        return total + p.sum(-1)

    def rounded(self, tile: Tile, p: Tensor) -> Tensor:
        """Round P, or dS, to the dtype in which tensor cores take it."""
        return p.to(tile.dtype).float()

    def accumulate(self, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
        """Add P v."""
        return acc + p @ v

    def sinks(self, seq: Sequence) -> Tensor | None:
        """Return the sink of every query head, float32 (heads,)."""
        sinks = seq.call.inputs.sinks
        return None if sinks is None else sinks.float()

    def with_sinks(self, seq: Sequence, state: Softmax) -> Softmax:
        """Let a sink, where there is one, take its share of the denominator."""
        sinks = self.sinks(seq)
        if sinks is None:
            return state
        top = state.top.maximum(sinks[:, None])
        factor = self.rescale(state.top, top)
        total = state.total * factor + (sinks[:, None] - top).exp()
        return Softmax(top, total, state.acc * factor[..., None])

    def finish(self, state: Softmax) -> tuple[Tensor, Tensor]:
        """Divide by the denominator, and return lse beside it."""
        total = state.total.masked_fill(state.total == 0, 1)  # acc is 0 there
        return state.acc / total[..., None], self.lse(state)

    def lse(self, state: Softmax) -> Tensor:
        """Return the natural logarithm of the whole denominator."""
        return state.top + state.total.log()
