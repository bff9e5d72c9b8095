"""A fault-free attention kernel on plain torch, cut into steps so small that a fault is one step written anew.

The algorithm is FlashAttention's: tiles of query rows and keys, an online softmax in float32, P rounded to the tensors'
dtype before P v, and a backward pass that computes P again from lse. Every workload is served, tensors lie as `Inputs` has
them, and rows that see no key give out = 0, lse = -inf and gradients of 0.

A mutant is `Kernel` with a step written anew; the steps are those of `Masks`, `Memory`, `Scores`, `Forward` and `Backward`.
Names in them: s are scores, p probabilities, `top` and `total` the running maximum and denominator of the softmax (m and l in
the papers), and dX is the gradient of X. Between loading and storing, tensors are float32 and lie heads-first: q (heads,
rows, head_dim), k (heads, keys, head_dim), with one key head per query head, s (heads, rows, keys), lse (heads, rows).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.kv_layout import appended
from pytest_attn.workloads.masks import Band, Mask, MaskMod, Sequences
from pytest_attn.workloads.workload import Workload

#: a position, or a tensor of positions
Index: TypeAlias = "int | Tensor"
#: q, k and v, or their gradients
QKV: TypeAlias = "tuple[Tensor, Tensor, Tensor]"

#: Rows and keys of a tile, unless a kernel is made with others.
TILE = 64


@dataclass(frozen=True)
class KernelCall:
    """One call: what the workload lends (masks, lengths, page table, ...), and q, k, v in their native layout."""

    inputs: Inputs
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def workload(self) -> Workload:
        """The workload that is asked."""
        return self.inputs.workload

    @cached_property
    def _bound(self) -> dict[Mask, MaskMod]:
        return {}

    def bound(self, mask: Mask) -> MaskMod:
        """Return a mask as a predicate of (b, h, q_idx, kv_idx), made once."""
        w = self.workload
        if mask not in self._bound:
            self._bound[mask] = mask.bind(Sequences(w.batch, w.heads, w.q_len, w.kv_len, self.inputs.device))
        return self._bound[mask]


class Sequence(NamedTuple):
    """One batch entry of a call, its length, and where it begins along the tokens of packed tensors (0 elsewhere)."""

    call: KernelCall
    batch: int
    q_start: int
    q_len: int
    kv_start: int
    kv_len: int

    @property
    def workload(self) -> Workload:
        """The workload that is asked."""
        return self.call.workload


@dataclass(frozen=True)
class Tile:
    """Some rows and some keys of one sequence, as positions in it. The last tile of keys reaches past the sequence's end."""

    seq: Sequence
    rows: range
    keys: range

    @property
    def workload(self) -> Workload:
        """The workload that is asked."""
        return self.seq.call.workload

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return self.seq.call.q.dtype

    @property
    def row_index(self) -> Tensor:
        """Positions of the rows, (1, rows, 1)."""
        return positions(self.rows, self.seq.call.q)[None, :, None]

    @property
    def key_index(self) -> Tensor:
        """Positions of the keys, (1, 1, keys)."""
        return positions(self.keys, self.seq.call.q)[None, None, :]

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, q_idx, kv_idx as mask_mods take them. Keys past the end become the last one, which masks and biases have."""
        like = self.seq.call.q
        batch = positions(range(self.seq.batch, self.seq.batch + 1), like)[:, None, None]
        heads = positions(range(self.workload.heads), like)[:, None, None]
        return batch, heads, self.row_index, self.key_index.clamp(max=self.workload.kv_len - 1)


def positions(span: range, like: Tensor) -> Tensor:
    """Return the numbers of a range, int64, on the device of `like`."""
    return torch.arange(span.start, span.stop, device=like.device)


class Softmax(NamedTuple):
    """The online softmax of some rows: top, total (heads, rows) and acc (heads, rows, v_head_dim), not divided by total."""

    top: Tensor
    total: Tensor
    acc: Tensor


class Rows(NamedTuple):
    """Tensors that the backward pass loads of some query rows: q, dout (heads, rows, dim), lse and delta (heads, rows)."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


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
        if mask.band is not None:
            return self.in_band(tile)
        return self.in_document(tile, mask) if mask.documents else self.in_custom_mask(tile, mask)

    def in_band(self, tile: Tile) -> Tensor:
        """Evaluate a causal mask or window."""
        rows, keys = tile.row_index, tile.key_index
        return (keys >= self.first_key(tile.seq, rows)) & (keys <= self.last_key(tile.seq, rows))

    def band(self, seq: Sequence) -> Band:
        """Return the causal mask or window to apply as a band."""
        mask = self.mask(seq)
        assert mask is not None
        assert mask.band is not None
        return mask.band

    def diagonal(self, seq: Sequence, row: Index) -> Index:
        """Return the key at which a query row stands."""
        return row if self.band(seq).top_left else row + (seq.kv_len - seq.q_len)

    def first_key(self, seq: Sequence, row: Index) -> Index:
        """Return the first key that a causal mask or window lets a row see; it may lie before the sequence."""
        left = self.band(seq).left
        return 0 if left is None else self.diagonal(seq, row) - left

    def last_key(self, seq: Sequence, row: Index) -> Index:
        """Return the last key that a causal mask or window lets a row see; it may lie past the sequence."""
        right = self.band(seq).right
        return seq.kv_len - 1 if right is None else self.diagonal(seq, row) + right

    def in_document(self, tile: Tile, mask: Mask) -> Tensor:
        """Evaluate a document mask."""
        _, _, q_idx, kv_idx = tile.index
        document = self.document_of(mask, tile.seq.call.q)
        seen = document[q_idx] == document[kv_idx]
        return seen & (kv_idx <= q_idx) if mask.is_causal else seen

    def document_of(self, mask: Mask, like: Tensor) -> Tensor:
        """Return the number of each token's document, (tokens,)."""
        return torch.repeat_interleave(torch.tensor(mask.documents)).to(like.device)

    def in_custom_mask(self, tile: Tile, mask: Mask) -> Tensor:
        """Evaluate a mask that only its own predicate knows: a neighborhood, a tensor or a function."""
        return self.mask_mod(tile.seq, mask)(*tile.index)

    def mask_mod(self, seq: Sequence, mask: Mask) -> MaskMod:
        """Return the predicate of such a mask."""
        return seq.call.bound(mask)


class Memory:
    """The steps that read and write memory."""

    # -- tensors in and out --------------------------------------------------------------------------------------------

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        """Take q, k and v as the caller laid them out."""
        return q, k, v

    def receive_again(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        """Take q, k and v once more, in the backward pass."""
        return self.receive(q, k, v)

    def receive_dout(self, dout: Tensor) -> Tensor:
        """Take the gradient of out as autograd laid it out."""
        return dout

    def allocate(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory with whatever it holds."""
        return like.new_empty(shape, dtype=dtype)

    def allocate_results(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        """Return memory for out and lse."""
        *rows, _ = call.q.shape
        out = self.allocate((*rows, call.workload.v_head_dim), call.q)
        if call.workload.is_packed:
            rows.reverse()  # (heads, tokens)
        return out, self.allocate(tuple(rows), call.q, torch.float32)

    def heads_first(self, seq: Sequence, tensor: Tensor) -> Tensor:
        """View the batch entry's part of a native tensor as (heads, tokens, ...); packed, these are the tokens of all."""
        if not seq.workload.is_packed:
            return tensor[seq.batch]
        return tensor.transpose(0, 1) if tensor.dim() == 3 else tensor

    def rows_of(self, seq: Sequence, tensor: Tensor, rows: range) -> Tensor:
        """View some query rows of a native tensor, (heads, rows, ...)."""
        return self.heads_first(seq, tensor)[:, seq.q_start + rows.start : seq.q_start + rows.stop]

    def keys_of(self, seq: Sequence, tensor: Tensor, keys: range) -> Tensor:
        """View some keys of a native tensor, (kv_heads, keys, ...), as far as the sequence has them."""
        stop = min(keys.stop, seq.kv_len)
        return self.heads_first(seq, tensor)[:, seq.kv_start + keys.start : seq.kv_start + stop]

    # -- sequences -----------------------------------------------------------------------------------------------------

    def sequences(self, call: KernelCall) -> list[Sequence]:
        """List the batch entries."""
        return [self.lengths(call, batch) for batch in range(call.workload.batch)]

    def lengths(self, call: KernelCall, batch: int) -> Sequence:
        """Find out how long a batch entry is, and where it begins."""
        w, inputs = call.workload, call.inputs
        kv_len = w.kv_len if inputs.kv_lens is None else int(inputs.kv_lens[batch])
        if inputs.cu_seqlens is None:
            return Sequence(call, batch, 0, w.q_len, 0, kv_len)
        q_start, q_stop = inputs.cu_seqlens[batch : batch + 2].tolist()
        if inputs.cu_seqlens_kv is None:
            return Sequence(call, batch, q_start, q_stop - q_start, 0, kv_len)
        kv_start, kv_stop = inputs.cu_seqlens_kv[batch : batch + 2].tolist()
        return Sequence(call, batch, q_start, q_stop - q_start, kv_start, kv_stop - kv_start)

    # -- loading -------------------------------------------------------------------------------------------------------

    def load_q(self, seq: Sequence, rows: range) -> Tensor:
        """Load query rows, (heads, rows, head_dim)."""
        return self.rows_of(seq, seq.call.q, rows).float()

    def load_k(self, tile: Tile) -> Tensor:
        """Load the tile's keys, (heads, keys, head_dim)."""
        return self.load(tile.seq, tile.seq.call.k, tile.keys)

    def load_v(self, tile: Tile) -> Tensor:
        """Load the tile's values, (heads, keys, v_head_dim)."""
        return self.load(tile.seq, tile.seq.call.v, tile.keys)

    def load(self, seq: Sequence, tensor: Tensor, keys: range) -> Tensor:
        """Load keys or values for every query head, zeros past the sequence's end."""
        at = self.addresses(seq, keys)
        if seq.workload.kv_pages is not None:
            found = self.gather_pages(seq, tensor, at)
        else:
            found = self.heads_first(seq, tensor)[:, seq.kv_start + at]
        outside = positions(keys, tensor) >= seq.kv_len
        return found.float().masked_fill_(outside[:, None], 0)[self.kv_head_of(seq)]

    def addresses(self, seq: Sequence, keys: range) -> Tensor:
        """Return the positions to read from, none of them past the sequence's end."""
        return positions(keys, seq.call.k).clamp_(max=seq.kv_len - 1)

    def gather_pages(self, seq: Sequence, pool: Tensor, at: Tensor) -> Tensor:
        """Read positions from a pool (pages, page size, kv_heads, dim) through the page table."""
        _, size, _, _ = pool.shape
        return pool[self.pages(seq, at // size), at % size].transpose(0, 1)

    def pages(self, seq: Sequence, number: Tensor) -> Tensor:
        """Return which pages of the pool hold the sequence's pages of these numbers."""
        table = seq.call.inputs.page_table
        assert table is not None
        return table[seq.batch, number].long()

    def kv_head_of(self, seq: Sequence) -> Tensor:
        """Return the key head of every query head, (heads,)."""
        w, heads = seq.workload, positions(range(seq.workload.heads), seq.call.q)
        return heads % w.kv_heads if w.head_groups == "interleaved" else heads // w.group


class Scores(Masks):
    """The steps from q and k to the scores that the softmax is taken of."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Multiply q and k, (heads, rows, keys)."""
        return q @ k.transpose(-1, -2)

    def scale(self, call: KernelCall) -> float:
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

    def softcap(self, call: KernelCall) -> float | None:
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
        mask = self.mask(seq)
        if mask is None or mask.band is None:
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

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
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


class Backward(Forward):
    """The steps of the backward pass."""

    def backward(self, call: KernelCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> QKV:
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

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        """Return the lse that the forward pass saved."""
        return lse

    def delta(self, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        """Return sum(dout * out) over the head's dimensions, less the gradient of lse, in lse's layout."""
        delta = (dout.float() * out.float()).sum(-1)
        delta = delta.transpose(0, 1) if call.workload.is_packed else delta
        return delta if dlse is None else delta - dlse

    def gradient_sums(self, call: KernelCall) -> QKV:
        """Return float32 zeros in which dq, dk and dv are summed up."""
        dq, dk, dv = (torch.zeros(t.shape, device=t.device) for t in (call.q, call.k, call.v))
        return dq, dk, dv

    def backward_step(self, tile: Tile, given: Rows, sums: QKV) -> None:
        """Add one tile's share of the gradients."""
        k, v = self.load_k(tile), self.load_v(tile)
        scaled = self.scaled(tile, self.logits(given.q, k))
        p = self.recomputed(self.masked_again(tile, self.modified_again(tile, scaled)), given.lse)
        ds = self.dscores(p, given.dout @ v.transpose(-1, -2), given.delta)
        ds = self.rounded(tile, self.through_modifications(tile, ds, scaled))
        self.rows_of(tile.seq, sums[0], tile.rows).add_(self.dq(tile, ds, k))
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

    def add_to_keys(self, tile: Tile, total: Tensor, share: Tensor) -> None:
        """Add to the gradient of the tile's keys, those past the end left out."""
        there = self.keys_of(tile.seq, total, tile.keys)
        there.add_(share[:, : there.shape[1]])

    def finish_gradient(self, call: KernelCall, total: Tensor, of: Tensor) -> Tensor:
        """Round a gradient to its tensor's dtype."""
        return total.to(of.dtype)


class Kernel(Backward):
    """Tiled attention: `kernel(inputs, q, k, v)` returns (out, lse), both differentiable.

    `kept` is what a library keeps from one call to the next, workspaces or compiled kernels; an honest one keeps nothing.
    """

    def __init__(self, row_tile: int = TILE, key_tile: int = TILE) -> None:
        self.row_tile, self.key_tile = row_tile, key_tile
        self.kept: dict[Any, Any] = {}

    def __call__(self, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out in q's layout, and lse, float32, (batch, heads, q_len) or, where packed, (heads, tokens)."""
        out, lse = _KernelFunction.apply(self, inputs, q, k, v)  # type: ignore[no-untyped-call]
        return out, lse


class _KernelFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, inputs: Inputs, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, lse = kernel.forward(KernelCall(inputs, *kernel.receive(*tensors)))
        ctx.kernel, ctx.inputs = kernel, inputs
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        call = KernelCall(ctx.inputs, *kernel.receive_again(*tensors))
        dout = torch.zeros_like(out) if dout is None else kernel.receive_dout(dout)
        return None, None, *kernel.backward(call, out, lse, dout, dlse)


class SplitKernel(Kernel):
    """A kernel that attends to each part of the keys alone."""

    splits = 2

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        merged = self.merge(*self.partials(seq, rows))
        return self.finish(self.with_sinks(seq, merged))

    def partials(self, seq: Sequence, rows: range) -> tuple[list[Tensor], list[Tensor]]:
        """Return out and lse over each part of the keys; a part without keys has out = 0, lse = -inf."""
        results = [self.finish(self.softmax(seq, rows, tiles)) for tiles in self.parts(self.key_tiles(seq, rows))]
        return [out for out, _ in results], [lse for _, lse in results]

    def parts(self, tiles: list[range]) -> list[list[range]]:
        """Cut the tiles of keys into parts, the last of which may be shorter or empty."""
        size = -(-len(tiles) // self.splits)
        return [tiles[part * size : (part + 1) * size] for part in range(self.splits)]

    def merge(self, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
        """Weight each part by exp(lse), relative to the largest."""
        lse = torch.stack(lses)
        top = lse.amax(0)
        weights = (lse - self.shift(top)).exp()
        return Softmax(top, weights.sum(0), (weights[..., None] * torch.stack(outs)).sum(0))


HONEST_NAME = "honest"


class KernelBackend(Backend):
    """A kernel of this package as a backend. It keeps its kernel, and with it what that keeps from call to call."""

    library = "pytest_attn"
    needs = "any device"

    def __init__(self, name: str, kernel: Kernel, precision: str = "flash", returns_lse: bool = True) -> None:
        self.name, self.kernel, self.precision, self.returns_lse = name, kernel, precision, returns_lse

    def version(self) -> str:
        return "-"

    def pads_by_mask(self, workload: Workload) -> bool:
        return False

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            out, lse = self.kernel(inputs, q, *appended(inputs, k, v))
            return (out, lse) if self.returns_lse else out

        return call


def honest_backend() -> KernelBackend:
    """Return a new backend of the kernel without a fault, which every test must let pass."""
    return KernelBackend(HONEST_NAME, Kernel())
