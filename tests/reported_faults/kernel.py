"""A fault-free attention kernel in plain torch, in tiles and splits, that takes every option of a workload.

It is independent of `pytest_attn.guests.mutants` and `pytest_attn.diagnosis`. Each step is a small method, so that a fault is
one of them, written anew. Tiles of one batch entry are computed for all heads at once, in float32; P and dS are rounded to the
dtype of out before they are multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_attn import Backend, Capabilities, Inputs, Workload, split_cache
from pytest_attn.backends.capabilities import FEATURES, QUANTIZED


class Entry(NamedTuple):
    """One batch entry: its number, its first row and first key in memory, and how many it has of both."""

    b: int
    row: int
    n: int
    key: int
    m: int


@dataclass
class Call:
    """What one call is given; keep is what dropout has left, (batch, heads, rows, keys)."""

    inputs: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    slopes: Tensor | None
    keep: Tensor | None = None

    @property
    def w(self) -> Workload:
        return self.inputs.workload

    @property
    def packs_keys(self) -> bool:
        """Whether keys lie end to end."""
        return self.k.dim() == 3


class Tile(NamedTuple):
    """Some rows and some keys of one batch entry."""

    call: Call
    e: Entry
    rows: range
    keys: range

    @property
    def w(self) -> Workload:
        return self.call.inputs.workload

    @property
    def i(self) -> Tensor:
        """Row numbers, (1, rows, 1)."""
        return torch.arange(self.rows.start, self.rows.stop)[None, :, None]

    @property
    def j(self) -> Tensor:
        """Key numbers, (1, 1, keys)."""
        return torch.arange(self.keys.start, self.keys.stop)[None, None, :]

    @property
    def h(self) -> Tensor:
        """Query heads, (heads, 1, 1)."""
        return torch.arange(self.w.heads)[:, None, None]


class Part(NamedTuple):
    """Attention over some of the keys: out (heads, rows, v_head_dim) and lse (heads, rows)."""

    out: Tensor
    lse: Tensor


def cut(length: int, size: int) -> list[range]:
    return [range(at, min(at + size, length)) for at in range(0, length, size)]


class Attention:
    """The kernel. `kept` is what faults remember from call to call; without a fault it stays empty."""

    row_tile, key_tile, splits = 64, 64, 1

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    # -- memory --------------------------------------------------------------------------------------------------------

    def entries(self, call: Call) -> list[Entry]:
        return [self.entry(call, b) for b in range(call.w.batch)]

    def entry(self, call: Call, b: int) -> Entry:
        inputs, w = call.inputs, call.w
        row, n, key, m = 0, w.q_len, 0, w.kv_len
        if inputs.cu_seqlens is not None:
            row, end = inputs.cu_seqlens[b : b + 2].tolist()
            n = end - row
        if inputs.kv_lens is not None:
            m = int(inputs.kv_lens[b])
        if inputs.cu_seqlens_kv is not None:
            key, end = inputs.cu_seqlens_kv[b : b + 2].tolist()
            m = end - key
        if not call.packs_keys:
            key = w.kv_len - m if w.pad == "left" else 0
        return Entry(b, row, n, key, m)

    def rows_in(self, call: Call, e: Entry, tensor: Tensor) -> Tensor:
        """View an entry's rows of q, out or dout, (heads, n, dim)."""
        if call.w.is_packed:
            return tensor[e.row : e.row + e.n].transpose(0, 1)
        return tensor[e.b]

    def rows_of_lse(self, call: Call, e: Entry, tensor: Tensor) -> Tensor:
        """View an entry's rows of lse or delta, (heads, n)."""
        return tensor[:, e.row : e.row + e.n] if call.w.is_packed else tensor[e.b]

    def keys_in(self, call: Call, e: Entry, tensor: Tensor) -> Tensor:
        """Return an entry's keys of k or v, (kv_heads, m, dim): a view unless they are in pages."""
        if call.w.kv_pages is not None:
            return self.gathered(call, e, tensor)
        if call.packs_keys:
            return tensor[e.key : e.key + e.m].transpose(0, 1)
        return tensor[e.b, :, e.key : e.key + e.m]

    def gathered(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        at = torch.arange(e.m)
        size = self.page_size(call)
        return self.slots(call, pool)[self.page_numbers(call, e, at // size), at % size].transpose(0, 1)

    def page_size(self, call: Call) -> int:
        return call.w.kv_pages.size

    def page_numbers(self, call: Call, e: Entry, number: Tensor) -> Tensor:
        return call.inputs.page_table[e.b, number].long()

    def slots(self, call: Call, pool: Tensor) -> Tensor:
        """View a pool as (pages, size, kv_heads, dim)."""
        return pool.transpose(1, 2) if call.w.kv_pages.layout == "HND" else pool

    def kv_heads_of(self, call: Call) -> Tensor:
        """Return the key head of each query head."""
        heads = torch.arange(call.w.heads)
        return heads % call.w.kv_heads if call.w.head_groups == "interleaved" else heads // call.w.group

    def load_q(self, t: Tile) -> Tensor:
        q = self.rows_in(t.call, t.e, t.call.q)[:, t.rows.start : t.rows.stop].float()
        return q if self.descale(t, "q") is None else q * self.descale(t, "q")

    def load_k(self, t: Tile) -> Tensor:
        return self.load(t, "k", t.call.k)

    def load_v(self, t: Tile) -> Tensor:
        return self.load(t, "v", t.call.v)

    def load(self, t: Tile, name: str, tensor: Tensor) -> Tensor:
        """Load a tile of k or v for every query head, (heads, keys, dim)."""
        found = self.keys_in(t.call, t.e, tensor)[:, t.keys.start : t.keys.stop].float()
        factor = self.descale(t, name)
        return (found if factor is None else found * factor)[self.kv_heads_of(t.call)]

    def descale(self, t: Tile, name: str) -> Tensor | None:
        """Return what a tile of q (by query head), or of k or v (by key head), is multiplied by."""
        descales = t.call.inputs.descales
        factor = None if descales is None else getattr(descales, name)
        if factor is None or factor.dim() == 0:
            return factor
        span = t.rows if name == "q" else t.keys
        if t.w.descales == "head":
            found = factor[t.e.b][:, None, None]
            return found[self.kv_heads_of(t.call)] if name == "q" else found
        if name != "q" and t.w.kv_pages is not None:
            return self.descales_in_pages(t.call, t.e, factor)[:, span.start : span.stop, None]
        return factor[t.e.b, :, span.start : span.stop, None]

    def descales_in_pages(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        """Return an entry's descales, (kv_heads, m), from (pages, size, kv_heads)."""
        at, size = torch.arange(e.m), self.page_size(call)
        return pool[self.page_numbers(call, e, at // size), at % size].transpose(0, 1)

    def append(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys into the cache, and return the cache, laid out as k and v of a call without one."""
        w = inputs.workload
        if w.cached is None:
            return k, v
        layout = "thd" if w.is_packed else "bhsd"
        cache = split_cache(inputs, k, v, layout)
        self.write(w, cache, cache.k_cache, cache.k_new, layout)
        self.write(w, cache, cache.v_cache, cache.v_new, layout)
        if w.kv_pages is None and w.is_packed:
            return self.end_to_end(w, cache.k_cache), self.end_to_end(w, cache.v_cache)
        return cache.k_cache, cache.v_cache

    def write(self, w: Workload, cache: Any, into: Tensor, new: Tensor, layout: str) -> None:
        slots = self.cache_slots(w, into, layout)
        at = self.slots_of_new(w, cache)
        new = new if layout == "thd" else new.transpose(1, 2).flatten(0, 1)
        slots[at // slots.shape[1], at % slots.shape[1]] = new

    def slots_of_new(self, w: Workload, cache: Any) -> Tensor:
        return cache.slot_mapping

    def cache_slots(self, w: Workload, into: Tensor, layout: str) -> Tensor:
        """View a cache as (pages or entries, slots of each, kv_heads, dim)."""
        turned = w.kv_pages.layout == "HND" if w.kv_pages else layout == "bhsd"
        return into.transpose(1, 2) if turned else into

    def end_to_end(self, w: Workload, cache: Tensor) -> Tensor:
        return torch.cat([entry[:m] for entry, m in zip(cache, w.kv_lens, strict=True)])

    # -- scores --------------------------------------------------------------------------------------------------------

    def scale(self, call: Call) -> float:
        return call.w.scale if call.w.scale is not None else call.w.head_dim**-0.5

    def logits(self, t: Tile) -> Tensor:
        """Return scaled q . k, (heads, rows, keys)."""
        return self.load_q(t) @ self.load_k(t).mT * self.scale(t.call)

    def capped(self, t: Tile, x: Tensor) -> Tensor:
        return x if t.w.softcap is None else t.w.softcap * torch.tanh(x / t.w.softcap)

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        """Return a tile of the bias, (heads or 1, rows or 1, keys or 1), float32."""
        b, _, rows, keys = bias.shape
        found = bias[t.e.b if b > 1 else 0].float()
        found = found[:, t.rows.start : t.rows.stop] if rows > 1 else found
        return found[:, :, t.keys.start : t.keys.stop] if keys > 1 else found

    def slopes(self, t: Tile, slopes: Tensor) -> Tensor:
        """Return ALiBi's slopes, (heads,)."""
        return slopes if slopes.dim() == 1 else slopes[t.e.b]

    def distance(self, t: Tile) -> Tensor:
        return (t.i + t.e.m - t.e.n - t.j).abs().float()

    def alibi(self, t: Tile, slopes: Tensor) -> Tensor:
        return -slopes.float()[:, None, None] * self.distance(t)

    def score_mod(self, t: Tile, x: Tensor) -> Tensor:
        return t.w.score_mod(x, torch.tensor(t.e.b), self.head_of_mod(t), t.i, t.j)

    def head_of_mod(self, t: Tile) -> Tensor:
        return t.h

    def modified(self, t: Tile, x: Tensor, bias: Tensor | None, slopes: Tensor | None) -> Tensor:
        """Return scores after softcap, bias, ALiBi and score_mod. bias, slopes: of the tile."""
        if bias is not None and t.w.bias_before_softcap:
            x = x + bias
        x = self.capped(t, x)
        if bias is not None and not t.w.bias_before_softcap:
            x = x + bias
        if slopes is not None:
            x = x + self.alibi(t, slopes)
        return x if t.w.score_mod is None else self.score_mod(t, x)

    def tile_bias(self, t: Tile) -> Tensor | None:
        return None if t.call.bias is None else self.bias(t, t.call.bias)

    def tile_slopes(self, t: Tile) -> Tensor | None:
        return None if t.call.slopes is None else self.slopes(t, t.call.slopes)

    def scores(self, t: Tile) -> Tensor:
        """Return the scores, -inf where a key is hidden."""
        x = self.modified(t, self.logits(t), self.tile_bias(t), self.tile_slopes(t))
        return x.masked_fill(~self.visible(t), -math.inf)

    # -- masks ---------------------------------------------------------------------------------------------------------

    def visible(self, t: Tile) -> Tensor:
        """Return which keys the rows see, broadcastable to (heads, rows, keys)."""
        if t.w.mask is None:
            return t.j >= 0
        return self.in_band(t) if t.w.mask.band is not None else self.in_other_mask(t)

    def place(self, t: Tile) -> Tensor:
        """Return the key at which each row stands."""
        return t.i if t.w.mask.band.top_left else t.i + t.e.m - t.e.n

    def window(self, t: Tile) -> tuple[int | None, int | None]:
        """Return how many keys before and after its place a row sees."""
        return t.w.mask.band.left, t.w.mask.band.right

    def in_band(self, t: Tile) -> Tensor:
        left, right = self.window(t)
        place = self.place(t)
        seen = t.j >= (place - left if left is not None else 0)
        return seen & (t.j <= place + right) if right is not None else seen & (t.i >= 0)

    def in_other_mask(self, t: Tile) -> Tensor:
        mod = t.call.inputs.mask_mod(t.e.n)
        return mod(torch.tensor(t.e.b), t.h, t.i, t.j)

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return out, and lse: (batch, heads, rows), packed (heads, rows)."""
        self.draw_dropout(call)
        out, lse = self.allocate(call)
        for e in self.entries(call):
            for rows in self.row_tiles(call, e):
                self.store(call, e, rows, out, lse, self.attend(call, e, rows))
        return out, lse

    def draw_dropout(self, call: Call) -> None:
        w = call.w
        if w.dropout:
            call.keep = torch.rand(w.batch, w.heads, w.q_len, w.kv_len) >= w.dropout

    def allocate(self, call: Call) -> tuple[Tensor, Tensor]:
        *rows, _ = call.q.shape
        out = torch.empty((*rows, call.w.v_head_dim), dtype=getattr(torch, call.w.out_dtype))
        return out, torch.empty(rows[::-1] if call.w.is_packed else rows)

    def row_tiles(self, call: Call, e: Entry) -> list[range]:
        return cut(e.n, self.row_tile)

    def store(self, call: Call, e: Entry, rows: range, out: Tensor, lse: Tensor, part: Part) -> None:
        self.rows_in(call, e, out)[:, rows.start : rows.stop] = self.rounded_out(part.out, out.dtype)
        self.rows_of_lse(call, e, lse)[:, rows.start : rows.stop] = part.lse

    def rounded_out(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        return out.to(dtype)

    def attend(self, call: Call, e: Entry, rows: range) -> Part:
        """Attend to each split of the keys, merge, and let the sink take its share."""
        parts = [self.online(call, e, rows, tiles) for tiles in self.split(self.key_tiles(call, e, rows))]
        return self.with_sinks(call, e, rows, parts[0] if len(parts) == 1 else self.merged(call, e, rows, parts))

    def key_tiles(self, call: Call, e: Entry, rows: range) -> list[range]:
        return cut(e.m, self.key_tile)

    def split(self, tiles: list[range]) -> list[list[range]]:
        size = -(-len(tiles) // self.splits)
        return [tiles[at * size : (at + 1) * size] for at in range(self.splits)]

    def online(self, call: Call, e: Entry, rows: range, tiles: list[range]) -> Part:
        """Visit tiles of keys one after the other."""
        top = torch.full((call.w.heads, len(rows)), self.lowest_maximum(call))
        total, acc = torch.zeros_like(top), torch.zeros(*top.shape, call.w.v_head_dim)
        for keys in tiles:
            t = Tile(call, e, rows, keys)
            s = self.scores(t)
            new = top.maximum(s.amax(-1))
            shift = new.masked_fill(new == -math.inf, 0)
            p, factor = self.exp(s - shift[..., None]), self.exp(top - shift)
            total = total * factor + p.sum(-1)
            share = self.rounded(t, self.dropped(t, p)) @ self.unseen_cleared(t, self.load_v(t))
            acc = self.summed(t, acc * factor[..., None] + share)
            top = new
        return self.finished(top, total, acc)

    def unseen_cleared(self, t: Tile, v: Tensor) -> Tensor:
        """Clear values that no row of the tile sees: NaN there, times a probability of 0, would be NaN."""
        seen = self.visible(t).expand(t.w.heads, len(t.rows), len(t.keys)).any(1)
        return v.masked_fill(~seen[..., None], 0)

    def summed(self, t: Tile, acc: Tensor) -> Tensor:
        """Return the running sum of P v, as it is kept."""
        return acc

    def lowest_maximum(self, call: Call) -> float:
        return -math.inf

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def finished(self, top: Tensor, total: Tensor, acc: Tensor) -> Part:
        return Part(acc / total.masked_fill(total == 0, 1)[..., None], top + total.log())

    def dropped(self, t: Tile, p: Tensor) -> Tensor:
        return p if t.call.keep is None else p * self.kept_weights(t) / (1 - t.w.dropout)

    def kept_weights(self, t: Tile) -> Tensor:
        return t.call.keep[t.e.b, :, t.rows.start : t.rows.stop, t.keys.start : t.keys.stop]

    def rounded(self, t: Tile, p: Tensor) -> Tensor:
        """Round P or dS to what tensor cores take."""
        return p.to(getattr(torch, t.w.out_dtype)).float()

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        lses = torch.stack([part.lse for part in parts])
        top = lses.amax(0)
        weights = (lses - top.masked_fill(top == -math.inf, 0)).exp()
        total = weights.sum(0)
        acc = (weights[..., None] * torch.stack([part.out for part in parts])).sum(0)
        return self.finished(top, total, acc)

    def with_sinks(self, call: Call, e: Entry, rows: range, part: Part) -> Part:
        sinks = self.sinks(call, e, rows)
        if sinks is None:
            return part
        lse = torch.logaddexp(part.lse, sinks)
        return Part(part.out * (part.lse - lse).exp()[..., None], lse)

    def sinks(self, call: Call, e: Entry, rows: range) -> Tensor | None:
        """Return the sink of every head and row, (heads, 1 or rows)."""
        return None if call.sinks is None else call.sinks.float()[:, None]

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
        sums = {name: torch.zeros(t.shape) for name, t in self.inputs_with_gradients(call)}
        delta = self.delta(call, out, dout, dlse)
        for e in self.entries(call):
            for rows in cut(e.n, self.row_tile):
                rows_of = {
                    name: self.rows_of_lse(call, e, t)[:, rows.start : rows.stop]
                    for name, t in (("lse", lse), ("delta", delta))
                }
                do = self.rows_in(call, e, dout)[:, rows.start : rows.stop].float()
                for keys in self.key_tiles_again(call, e, rows):
                    self.backward_tile(Tile(call, e, rows, keys), do, **rows_of, sums=sums)
                if call.sinks is not None:
                    sums["sinks"] += self.dsinks(call, e, rows, **rows_of)
        return sums

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, needed: dict[str, bool]
    ) -> dict[str, Tensor]:
        """Return the gradients by name, at least those that are needed."""
        return self.backward(call, out, lse, dout, dlse)

    def inputs_with_gradients(self, call: Call) -> list[tuple[str, Tensor]]:
        named = (
            ("q", call.q),
            ("k", call.k),
            ("v", call.v),
            ("bias", call.bias),
            ("sinks", call.sinks),
            ("slopes", call.slopes),
        )
        return [(name, t) for name, t in named if t is not None]

    def key_tiles_again(self, call: Call, e: Entry, rows: range) -> list[range]:
        return cut(e.m, self.key_tile)

    def delta(self, call: Call, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        """Return sum(dout * out) less the gradient of lse, laid out as lse."""
        delta = (dout.float() * out.float()).sum(-1)
        delta = delta.transpose(0, 1) if call.w.is_packed else delta
        return delta if dlse is None else delta - dlse

    def backward_tile(self, t: Tile, do: Tensor, lse: Tensor, delta: Tensor, sums: dict[str, Tensor]) -> None:
        """Add a tile's share of all gradients."""
        x = self.logits_again(t)
        p = self.probabilities_again(t, x, lse)
        dp = self.dropped_gradient(t, do @ self.load_v_again(t).mT)
        ds = self.dscores(t, p, dp, delta)
        dx, dbias, dslopes = self.through(t, x, ds)
        dx = self.rounded(t, dx)
        self.add_dq(t, sums["q"], dx @ self.load_k_again(t) * self.scale(t.call))
        self.add_to_keys(t, sums["k"], dx.mT @ self.load_q(t) * self.scale(t.call))
        self.add_to_keys(t, sums["v"], self.rounded(t, self.dropped_again(t, p)).mT @ do)
        if dbias is not None:
            self.add_dbias(t, sums["bias"], dbias)
        if dslopes is not None:
            self.add_dslopes(t, sums["slopes"], dslopes)

    def logits_again(self, t: Tile) -> Tensor:
        return self.load_q(t) @ self.load_k_again(t).mT * self.scale(t.call)

    def load_k_again(self, t: Tile) -> Tensor:
        return self.load_k(t)

    def load_v_again(self, t: Tile) -> Tensor:
        return self.load_v(t)

    def probabilities_again(self, t: Tile, x: Tensor, lse: Tensor) -> Tensor:
        s = self.modified(t, x, self.tile_bias(t), self.tile_slopes(t)).masked_fill(~self.visible(t), -math.inf)
        return (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()

    def dropped_gradient(self, t: Tile, dp: Tensor) -> Tensor:
        return dp if t.call.keep is None else dp * self.kept_weights(t) / (1 - t.w.dropout)

    def dropped_again(self, t: Tile, p: Tensor) -> Tensor:
        return self.dropped(t, p)

    def dscores(self, t: Tile, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return p * (dp - delta[..., None])

    def through(self, t: Tile, x: Tensor, ds: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of the scaled q . k and of the tile's bias and slopes, by the chain rule."""
        bias, slopes = self.tile_bias(t), self.tile_slopes(t)
        given = [one.detach().requires_grad_() for one in (x, bias, slopes) if one is not None]
        leaves = iter(given)
        with torch.enable_grad():
            y = self.modified(t, next(leaves), *(None if one is None else next(leaves) for one in (bias, slopes)))
            y = y.expand_as(ds)
        found = iter(torch.autograd.grad(y, given, ds, allow_unused=True))
        dx = next(found)
        return torch.zeros_like(x) if dx is None else dx, *(None if one is None else next(found) for one in (bias, slopes))

    def add_dq(self, t: Tile, total: Tensor, share: Tensor) -> None:
        self.rows_in(t.call, t.e, total)[:, t.rows.start : t.rows.stop] += share

    def add_to_keys(self, t: Tile, total: Tensor, share: Tensor) -> None:
        """Add to dk or dv, summed over the query heads of each key head."""
        grouped = torch.zeros(t.w.kv_heads, *share.shape[1:]).index_add_(0, self.kv_heads_of(t.call), share)
        self.keys_in(t.call, t.e, total)[:, t.keys.start : t.keys.stop] += grouped

    def add_dbias(self, t: Tile, total: Tensor, share: Tensor) -> None:
        b, _, rows, keys = total.shape
        there = total[t.e.b if b > 1 else 0]
        there = there[:, t.rows.start : t.rows.stop] if rows > 1 else there
        there = there[:, :, t.keys.start : t.keys.stop] if keys > 1 else there
        there += share

    def add_dslopes(self, t: Tile, total: Tensor, share: Tensor) -> None:
        there = total if total.dim() == 1 else total[t.e.b]
        there += share

    def dsinks(self, call: Call, e: Entry, rows: range, lse: Tensor, delta: Tensor) -> Tensor:
        return -((self.sinks(call, e, rows) - lse).exp() * delta).sum(-1)

    def finished_gradient(self, total: Tensor, like: Tensor) -> Tensor:
        return total.to(like.dtype)

    # -- called --------------------------------------------------------------------------------------------------------

    def __call__(self, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, **leaves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return out, lse, and what dropout has left. leaves: bias, sinks or slopes in place of those of the inputs."""
        k, v = self.append(inputs, k, v)
        own = {"bias": inputs.bias, "sinks": inputs.sinks, "slopes": inputs.alibi_slopes, **leaves}
        return _Node.apply(self, inputs, q, k, v, own["bias"], own["sinks"], own["slopes"])


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Attention, inputs: Inputs, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        call = Call(inputs, *tensors)
        out, lse = kernel.forward(call)
        ctx.kernel, ctx.inputs, ctx.keep = kernel, inputs, call.keep
        ctx.save_for_backward(*tensors, out, lse)
        keep = torch.empty(0, dtype=torch.bool) if call.keep is None else call.keep
        ctx.mark_non_differentiable(keep)
        return out, lse, keep

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        call = Call(ctx.inputs, *tensors, keep=ctx.keep)
        dout = torch.zeros_like(out) if dout is None else dout
        needed = dict(zip(("q", "k", "v", "bias", "sinks", "slopes"), ctx.needs_input_grad[2:], strict=True))
        sums = ctx.kernel.gradients(call, out, lse, dout, dlse, needed)
        made = dict(ctx.kernel.inputs_with_gradients(call))
        found = (ctx.kernel.finished_gradient(sums[name], made[name]) if needed[name] else None for name in needed)
        return None, None, *found


class KernelBackend(Backend):
    """A kernel as a user registers one."""

    needs = "any device"
    library = "tests"
    returns_lse = True
    capabilities = Capabilities(
        masks=frozenset({"any"}),
        features=frozenset(FEATURES),
        dtypes=("bfloat16", "float16", "float32"),
        head_dim=None,
        head_dim_step=1,
        v_head_dim=True,
        quantized=frozenset(QUANTIZED),
    )

    def __init__(self, name: str, kernel: Attention) -> None:
        self.name, self.kernel = name, kernel

    def version(self) -> str:
        return "-"

    def pads_by_mask(self, workload: Workload) -> bool:
        return False

    def prepare(self, inputs: Inputs, backward: bool = False) -> Any:
        return lambda q, k, v: self.kernel(inputs, q, k, v)[:2]
