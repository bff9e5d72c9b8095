"""The backward pass: P is computed again from lse, tile by tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.mutants.honest.forward import Forward
from pytest_attn.mutants.honest.tiles import QKV, Call, Rows, Tile

if TYPE_CHECKING:
    from torch import Tensor


class Backward(Forward):
    """The steps of the backward pass."""

    def backward(self, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> QKV:
        """Return dq, dk, dv in the layouts of q, k, v."""
        lse = self.saved_lse(call, lse)
        delta = self.delta(call, out, dout, dlse)
        sums = self.gradient_sums(call)
        for seq in self.sequences(call):
            for rows in self.row_tiles(seq):
                dout_rows = self.rows_of(seq, dout, rows).float()
                lse_rows, delta_rows = (self.rows_of(seq, t, rows) for t in (lse, delta))
                given = Rows(self.load_q(seq, rows), dout_rows, lse_rows, delta_rows)
                for keys in self.key_tiles_again(seq, rows):
                    self.backward_step(Tile(seq, rows, keys), given, sums)
        dq, dk, dv = (self.finish_gradient(call, total, of) for total, of in zip(sums, (call.q, call.k, call.v), strict=True))
        return dq, dk, dv

    def saved_lse(self, call: Call, lse: Tensor) -> Tensor:
        """Return the lse that the forward pass saved."""
        return lse

    def delta(self, call: Call, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        """Return sum(dout * out) over the head's dimensions, less the gradient of lse, in lse's layout."""
        delta = (dout.float() * out.float()).sum(-1)
        delta = delta.transpose(0, 1) if call.workload.is_packed else delta
        return delta if dlse is None else delta - dlse

    def gradient_sums(self, call: Call) -> QKV:
        """Return float32 zeros in which dq, dk and dv are summed up."""
        import torch

        dq, dk, dv = (torch.zeros(t.shape, device=t.device) for t in (call.q, call.k, call.v))
        return dq, dk, dv

    def backward_step(self, tile: Tile, given: Rows, sums: QKV) -> None:
        """Add one tile's share of the gradients."""
        k, v = self.load_k(tile), self.load_v(tile)
        scaled = self.scaled(tile, self.logits(given.q, k))
        p = self.recomputed(self.masked_again(tile, self.modified_again(tile, scaled)), given.lse)
        ds = self.dscores(p, given.dout @ v.transpose(-1, -2), given.delta)
        ds = self.rounded(tile, self.through_modifications(tile, ds, scaled))
        self.add_to_rows(tile, sums[0], self.dq(tile, ds, k))
        self.add_to_keys(tile, sums[1], self.summed_over_group(tile, self.dk(tile, ds, given.q)))
        self.add_to_keys(tile, sums[2], self.summed_over_group(tile, self.dv(tile, self.rounded(tile, p), given.dout)))

    def recomputed(self, s: Tensor, lse: Tensor) -> Tensor:
        """Return P again, from lse."""
        return (s - self.shift(lse)[..., None]).exp()

    def dscores(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        """Return the gradient of the final scores, P (dP - delta)."""
        return p * (dp - delta[..., None])

    def through_modifications(self, tile: Tile, ds: Tensor, scaled: Tensor) -> Tensor:
        """Return the gradient of the scaled q . k: the chain rule through score_mod and softcap."""
        scaled = self.before_softcap(tile, scaled)
        if tile.workload.score_mod is not None:
            ds = ds * self.score_mod_slope(tile, self.with_biases(tile, self.capped(tile, scaled)))
        cap = self.softcap(tile.seq.call)
        return ds if cap is None else ds * self.softcap_slope(scaled, cap)

    def softcap_slope(self, scaled: Tensor, cap: float) -> Tensor:
        """Return the derivative of cap * tanh(s / cap)."""
        return 1 - (scaled / cap).tanh().square()

    def score_mod_slope(self, tile: Tile, s: Tensor) -> Tensor:
        """Return the derivative of score_mod with respect to the score."""
        import torch

        assert tile.workload.score_mod is not None
        with torch.enable_grad():
            leaf = s.detach().requires_grad_()
            modified = tile.workload.score_mod(leaf, *tile.index) + 0 * leaf
            (slope,) = torch.autograd.grad(modified.sum(), leaf)
        return slope

    def dq(self, tile: Tile, ds: Tensor, k: Tensor) -> Tensor:
        """Return the tile's share of dq, (heads, rows, head_dim)."""
        return ds @ k * self.scale(tile.seq.call)

    def dk(self, tile: Tile, ds: Tensor, q: Tensor) -> Tensor:
        """Return the tile's share of dk for every query head, (heads, keys, head_dim)."""
        return ds.transpose(-1, -2) @ q * self.scale(tile.seq.call)

    def dv(self, tile: Tile, p: Tensor, dout: Tensor) -> Tensor:
        """Return the tile's share of dv for every query head, (heads, keys, v_head_dim)."""
        return p.transpose(-1, -2) @ dout

    def summed_over_group(self, tile: Tile, x: Tensor) -> Tensor:
        """Sum a gradient over the query heads that share a key head, (kv_heads, keys, dim)."""
        summed = x.new_zeros(tile.workload.kv_heads, *x.shape[1:])
        return summed.index_add_(0, self.kv_head_of(tile.seq), x)

    def add_to_rows(self, tile: Tile, total: Tensor, share: Tensor) -> None:
        """Add to the gradient of the tile's rows."""
        self.rows_of(tile.seq, total, tile.rows).add_(share)

    def add_to_keys(self, tile: Tile, total: Tensor, share: Tensor) -> None:
        """Add to the gradient of the tile's keys, those past the end left out."""
        there = self.keys_of(tile.seq, total, tile.keys)
        there.add_(share[:, : there.shape[1]])

    def finish_gradient(self, call: Call, total: Tensor, of: Tensor) -> Tensor:
        """Round a gradient to its tensor's dtype."""
        return total.to(of.dtype)
