"""Input distributions: which values q, k and v have, each to bring out faults of another kind; and how they are drawn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from pytest_attn.workloads.masks import intervals
from pytest_attn.workloads.positions import borders, far_positions, is_long, sampled_positions
from pytest_attn.workloads.workload import Workload, key_heads, sequence_lengths

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: elements of q that are aimed together
_NEEDLE_ELEMENTS = 1 << 24
Shape: TypeAlias = tuple[int, ...]
QKV: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"

DISTRIBUTIONS = {
    "structured": "randn with a mean per value head and needles: rows whose query points at one key, on the diagonal,"
    " the first or last key it may see, and the first it may not",
    "flat": "0.1 randn: a nearly uniform softmax; in every other head, but with ALiBi, beside one heavy key, which leaves a"
    " small sum to all others. Of more than 4,096 keys most rows point at one run each, which shows a missing one",
    "randn": "standard normal",
    "peaky": "3 randn: softmax near one-hot",
    "flux": "randn times a random whole number from 1 to 4, as the Flux benchmark draws",
    "outlier": "one channel with keys near 30 and queries so that logits, and lse, lie near +120 or -120",
    "onehot": "randn q and k; each value row is a unit vector, so that out shows the probabilities",
    "large": "200 randn q and k: logits up to about 50,000",
    "stepped": "blocks of keys with weights from 0.1 to 1e-7; a default of kernels that skip",
}
DEFAULT_DISTRIBUTIONS = ("structured", "flat")


def distribution_names(names: object) -> tuple[str, ...]:
    """Return checked names of input distributions; None gives the default pair. Raises ValueError for an unknown name."""
    if names is None:
        return DEFAULT_DISTRIBUTIONS
    chosen = (names,) if isinstance(names, str) else tuple(names)  # type: ignore[arg-type]
    unknown = [name for name in chosen if name not in DISTRIBUTIONS]
    if unknown or not chosen:
        what = f"unknown input distribution {unknown[0]!r}" if unknown else "no input distribution named"
        raise ValueError(f"{what}; known: {', '.join(DISTRIBUTIONS)}")
    return chosen


def draw_qkv(distribution: str, draw: Draw, w: Workload, q: Shape, k: Shape, v: Shape) -> QKV:
    """Draw q, k and v of these shapes, (batch, heads, tokens, dim), as a distribution has them."""
    return _DRAWN_BY[distribution](draw, w, q, k, v)


# -- the distributions: each takes the draw, the workload and the dense shapes of q, k, v ---------------------------------


def _scaled(of_qk: float, of_v: float, draw: Draw, _w: Workload, q: Shape, k: Shape, v: Shape) -> QKV:
    return draw.normal("q", q, of_qk), draw.normal("k", k, of_qk), draw.normal("v", v, of_v)


def _flux(draw: Draw, w: Workload, *shapes: Shape) -> QKV:
    q, k, v = _scaled(1.0, 1.0, draw, w, *shapes)
    return tuple(t * draw.whole(f"{n}-factor", s, 1, 4) for n, t, s in zip("qkv", (q, k, v), shapes, strict=True))  # type: ignore[return-value]


def _onehot(draw: Draw, _w: Workload, q: Shape, k: Shape, v: Shape) -> QKV:
    import torch

    values = torch.zeros(v, dtype=draw.dtype, device=draw.device)
    keys = torch.arange(v[-2], device=draw.device)
    values[..., keys, keys % v[-1]] = 1
    return draw.normal("q", q), draw.normal("k", k), values


def _outlier(draw: Draw, w: Workload, *shapes: Shape) -> QKV:
    q, k, v = _scaled(1.0, 1.0, draw, w, *shapes)
    k[..., 0] += 30
    sign = 1 - 2 * (draw.bits("sign", w.heads) & 1).to(q)
    sign[0] = -1  # at least one head has lse far below -88, where exp(lse) underflows in float32
    q[..., 0] = (sign * 120 / (30 * w.softmax_scale))[:, None]
    return q, k, v


def _structured(draw: Draw, w: Workload, *shapes: Shape) -> QKV:
    q, k, v = _scaled(1.0, 1.0, draw, w, *shapes)
    v += draw.whole("v-mean", (v.shape[0], v.shape[1], 1, 1), -4, 4) / 2
    _plant_needles(w, q, k)
    return q, k, v


def _stepped(draw: Draw, w: Workload, *shapes: Shape) -> QKV:
    """Have what leaves out tiles decide on each: their weights lie everywhere around a threshold."""
    q, k, v = _scaled(0.1, 1.0, draw, w, *shapes)
    for number, (own_q, own_k) in enumerate(_sequences(w, q, k)):
        kv_len, way = own_k.shape[1], draw.normal(f"way-{number}", (w.kv_heads, 1, w.head_dim))
        way[..., : w.v_in_k * min(w.v_head_dim, w.head_dim - 1)] = 0  # v must not lie in one direction: rows would err as one
        way /= way.norm(dim=-1, keepdim=True)
        depth = draw.normal(f"depth-{number}", (w.kv_heads, -(-kv_len // 48), 1), 3).abs() + 2.5
        own_k -= depth.repeat_interleave(48, 1)[:, :kv_len] * way
        own_k[:, kv_len // 3] = 0
        row, head = q.new_tensor(range(own_q.shape[1])), q.new_tensor(range(w.heads))[:, None]
        steepness = 1 + (row // 16 * _OF_ROWS + head * _OF_HEADS) % 1
        own_q += steepness[..., None] * way[key_heads(w)] / w.softmax_scale
    return q, k, v


def _sequences(w: Workload, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the queries (heads, q_len, dim) and keys (kv_heads, kv_len, dim) of each sequence that has both, as views."""
    q_start = k_start = 0
    for batch, (q_len, kv_len) in enumerate(sequence_lengths(w)):
        lane = 0 if w.is_packed else batch
        if q_len and kv_len:
            yield q[lane, :, q_start : q_start + q_len], k[lane, :, k_start : k_start + kv_len]
        if w.is_packed:
            q_start, k_start = q_start + q_len, k_start + kv_len


def _plant_needles(w: Workload, q: torch.Tensor, k: torch.Tensor) -> None:
    """Point every second query at one key, so that seeing that key, or not, changes the row beyond any rounding."""
    import torch

    mask = w.plain_mask
    for own_q, own_k in _sequences(w, q, k):
        q_len, kv_len = own_q.shape[1], own_k.shape[1]
        if is_long(q_len, kv_len) and not w.is_packed:
            _plant_long(w, own_q, own_k)
            continue
        rows = torch.arange(0, q_len, 2)
        tells_intervals = mask is None or mask.has_intervals
        span = intervals(mask, rows, q_len, kv_len) if tells_intervals else None
        targets = edge_targets(rows, span, q_len, kv_len)
        keys = own_k[:, targets.to(k.device)][key_heads(w)].double()
        height = math.log(kv_len + 1) + 1  # gives the needle most of the row's weight
        own_q[:, ::2] = _aimed(w, keys, height).add_(own_q[:, ::2].double(), alpha=0.25).to(q.dtype)


def _aimed(w: Workload, keys: torch.Tensor, height: float | torch.Tensor) -> torch.Tensor:
    """Return queries whose scaled product with each of the keys (..., dim), in float64 and overwritten, is `height`."""
    return keys.mul_(height / w.softmax_scale / keys.square().sum(-1, keepdim=True))


def _plant_long(w: Workload, q: torch.Tensor, k: torch.Tensor) -> None:
    """Point the queries of a long sequence at keys. q: (heads, q_len, dim), k: (kv_heads, kv_len, dim)."""
    import torch

    q_len, kv_len = q.shape[1], k.shape[1]
    needles, height = LongNeedles(w, q_len, kv_len), math.log(kv_len + 1) + 1
    of_head = torch.tensor(key_heads(w), device=k.device)[:, None]
    for rows in torch.arange(q_len).tensor_split(-(-q_len * w.heads * w.head_dim // _NEEDLE_ELEMENTS)):
        targets = needles.targets(rows)
        some = (targets >= 0).any(0)
        rows, targets = rows[some].to(q.device), targets[:, some].to(q.device)
        aimed = _aimed(w, k[of_head, targets.clamp(min=0)].double(), height)
        own = q[:, rows]
        q[:, rows] = torch.where(targets[..., None] >= 0, aimed.add_(own.double(), alpha=0.25).to(q.dtype), own)


def edge_targets(rows: Tensor, span: tuple[Tensor, Tensor] | None, q_len: int, kv_len: int) -> Tensor:
    """Choose the key that each row's query points at: a different edge of the mask for each kind of row.

    rows, returned: (n,). span: the first and one past the last key that each row sees; None for a mask that tells none.
    """
    import torch

    diagonal = (rows + kv_len - q_len).clamp(0, kv_len - 1)
    last = torch.full_like(rows, kv_len - 1)
    if span is None:
        edges = torch.stack((diagonal, last, torch.zeros_like(rows), rows * 7919 % kv_len))
    else:
        first, end = span
        edges = torch.stack((diagonal, end - 1, first, end, first - 1, last))
    chosen = edges.gather(0, (rows // 2 % len(edges))[None])[0]
    return torch.where((chosen >= 0) & (chosen < kv_len), chosen, diagonal)


# -- small weights that add up ------------------------------------------------------------------------------------------------

# What skips keys of a small weight is wrong where many of them add up to what the dtype shows: in rows with one heavy key,
# beside which all others have that sum. Each row has a sum of its own, and few rows share a key, so that no rounding is shared
# by all. These rows lie together, and so do their keys, as kernels skip whole tiles.
# That one of very many keys is missed, a row shows that sees a run of them, of which few share a column of v.

#: by how much heavy keys are larger than others; what keys of a run have in common
_HEAVY, _COMMON = 10, 0.6
#: keys up to which there are no runs; keys that a run has at least
_NO_RUNS, _RUN = 1 << 12, 1 << 11
#: one column of v in so many has a mean: it shows what small weights add up to
_WITHOUT_MEAN = 8
#: parts of a head's rows of which each has sums of another size
_PARTS = 8
#: irrational numbers, whose multiples are evenly spread modulo 1
_OF_ROWS, _OF_HEADS = 0.6180339887498949, 0.7548776662466927


def _flat(draw: Draw, w: Workload, *shapes: Shape) -> QKV:
    q, k, v = _scaled(0.1, 0.1, draw, w, *shapes)
    has_runs = v.shape[2] > _NO_RUNS and not w.is_packed
    if has_runs and not w.v_in_k:
        _give_columns(v)
    v[..., ::_WITHOUT_MEAN] += 1 if has_runs else 0.1
    if w.alibi:
        return q, k, v  # whose gradient is a sum over all keys by their distance: heavy ones let little be known of it
    for number, (own_q, own_k) in enumerate(_sequences(w, q, k)):
        aim = _Aim(w, own_q, own_k, 4 if has_runs else 2)
        aim.at_heavy_keys()
        if has_runs:
            aim.at_runs(draw.normal(f"runs-{number}", (w.kv_heads, -(-own_k.shape[1] // _RUN), w.head_dim), _COMMON))
    return q, k, v


def _give_columns(v: Tensor) -> None:
    """Let each value be 1 or -1 in one column, which few others have, and 0 elsewhere. v: (..., keys, dim).

    Half a run on follows the opposite: so that out, and what is rounded of it, is small.
    """
    import torch

    columns = torch.arange(v.shape[-1], device=v.device)
    columns = columns[columns % _WITHOUT_MEAN > 0] if len(columns) > 1 else columns
    keys, signs = torch.arange(v.shape[-2], device=v.device), v[..., 0].sign()
    pairs = signs[..., : len(keys) // _RUN * _RUN].view(*signs.shape[:-1], -1, 2, _RUN // 2)
    pairs[..., 1, :] = -pairs[..., 0, :]
    v.zero_()[..., keys, columns[keys % (_RUN // 2) % len(columns)]] = signs


class _Aim:
    """The queries of one sequence (heads, q_len, dim), and its keys (kv_heads, kv_len, dim), of which they point at some.

    parts: of the heads, or of the queries where there are fewer heads, of which one points at heavy keys.
    """

    def __init__(self, w: Workload, q: Tensor, k: Tensor, parts: int) -> None:
        import torch

        self.w, self.q, self.k, self.kv_len = w, q, k, k.shape[1]
        rows, heads = torch.arange(q.shape[1]), torch.arange(w.heads)[:, None]
        part = parts * rows // q.shape[1] if w.heads < parts else torch.zeros_like(rows)
        self.is_at_heavy_key = (part + heads) % parts == parts - 1
        self.first, end = intervals(w.plain_mask, rows, q.shape[1], self.kv_len)
        self.seen = (end - self.first).clamp(min=1)
        self.key_head = torch.tensor(key_heads(w))

    def at_heavy_keys(self) -> None:
        """Make keys of the second quarter heavy, or others where a row does not see these, and point queries at one each."""
        import torch

        head, row = self.is_at_heavy_key.nonzero(as_tuple=True)
        first, seen, quarter = self.first[row], self.seen[row], max(1, self.kv_len // 4)
        target = self.kv_len // 4 + (row + 5 * head) % quarter
        is_seen = (target >= first) & (target < first + seen)
        target = torch.where(is_seen, target, first + (row * 7919 + head) % seen).clamp(max=self.kv_len - 1)
        is_heavy = torch.zeros(self.k.shape[:2], dtype=torch.bool)
        is_heavy[self.key_head[head], target] = True
        self.k.mul_(torch.where(is_heavy, _HEAVY, 1)[..., None].to(self.k))
        self._point(head, row, self.k, target, 1)

    def at_runs(self, common: Tensor) -> None:
        """Give runs of keys something in common, (kv_heads, runs, dim), and point queries at one each: together, at all."""
        import torch

        head, row = (~self.is_at_heavy_key).nonzero(as_tuple=True)
        of = self.key_head[head]
        counts = torch.bincount(of, minlength=self.w.kv_heads)
        runs = min(common.shape[1], *counts[counts > 0].tolist())
        size, order, number = -(-self.kv_len // runs), of.argsort(stable=True), torch.empty_like(of)
        number[order] = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of[order]]
        for run in range(runs):
            self.k[:, run * size : (run + 1) * size] += common[:, run, None]
        middle = self.first[row] + (2 * (number % runs) + 1) * self.seen[row] // (2 * runs)
        self._point(head, row, common, middle // size, size)

    def _point(self, head: Tensor, row: Tensor, keys: Tensor, target: Tensor, size: int) -> None:
        """Add to queries what gives `size` keys like their target most of the weight, and to all others the rest.

        That is down to what the dtype shows; in float32, to what sums in order do not lose beside the heavy key.
        """
        import torch

        eps, in_order = torch.finfo(self.q.dtype).eps, 32 if self.kv_len > _NO_RUNS else 1 / 16
        least = max(eps**0.85, eps * self.kv_len * in_order * (self.q.dtype == torch.float32))
        step = (row * _PARTS // self.q.shape[1] * 5 + head * 3) % _PARTS  # alike in rows that lie together
        depth = 0.5 - math.log(min(0.25, least)) * (step + (row * _OF_ROWS + head * _OF_HEADS) % 1) / _PARTS
        height = (self.seen[row] / size).clamp(min=1).log() + depth
        for part in torch.arange(len(row)).tensor_split(max(1, -(-len(row) * self.w.head_dim // _NEEDLE_ELEMENTS))):
            of = (self.key_head[head], target, height, head, row)
            key_head, key, high, heads, rows = (one[part].to(keys.device) for one in of)
            aimed = _aimed(self.w, keys[key_head, key].double(), high[:, None])
            self.q[heads, rows] = aimed.add_(self.q[heads, rows].double()).to(self.q.dtype)


_DRAWN_BY: dict[str, Callable[..., QKV]] = {
    "structured": _structured,
    "flat": _flat,
    "randn": partial(_scaled, 1.0, 1.0),
    "peaky": partial(_scaled, 3.0, 3.0),
    "flux": _flux,
    "outlier": _outlier,
    "onehot": _onehot,
    "large": partial(_scaled, 200.0, 1.0),
    "stepped": _stepped,
}


# -- needles of long sequences ------------------------------------------------------------------------------------------------

# Random attention over many keys is flat: one key of a million moves out by less than its rounding. A needle, a row whose
# query points at a key on a border, has about half of its row's weight. Both ends of every tile that is looked at are the
# needle of some row, near the diagonal and far from it.

#: rows up to which each query of each head has a border of its own, as in decoding
_FEW_ROWS = 64
#: how many of the borders next to the diagonal a needle may be at
_NEAR = 16


class LongNeedles:
    """The keys that the queries of one long sequence point at.

    Rows that are looked at have a border of the keys, another one in each head. Even rows in between have an edge of the mask,
    as in short sequences. The others have none.
    """

    def __init__(self, w: Workload, q_len: int, kv_len: int) -> None:
        import torch

        self.heads, self.q_len, self.kv_len, self.mask = w.heads, q_len, kv_len, w.plain_mask
        far_rows = far_positions(w, w.heads, q_len, w.head_dim)
        far_keys = far_positions(w, w.kv_heads, kv_len, w.head_dim)
        self.looked_at = torch.tensor(sampled_positions(q_len, far=far_rows))
        self.borders = torch.tensor(sorted({0, *borders(kv_len), *(p for p in far_keys if p < kv_len), kv_len - 1}))

    def targets(self, rows: Tensor) -> Tensor:
        """Return the key of each head's row, -1 for none. rows: (n,) in ascending order; returned: (heads, n)."""
        import torch

        first, end = intervals(self.mask, rows, self.q_len, self.kv_len)
        edges = edge_targets(rows, (first, end), self.q_len, self.kv_len)
        plain = torch.where(rows % 2 == 0, edges, -1).expand(self.heads, -1)  # even rows, as in short sequences
        at = torch.searchsorted(self.looked_at, rows).clamp(max=len(self.looked_at) - 1)
        is_looked_at = (self.looked_at[at] == rows) & (end > first)
        aimed = self._few(rows) if self.q_len <= _FEW_ROWS else self._at_borders(rows, at, first, end)
        is_seen = is_looked_at & (aimed >= first) & (aimed < end)
        return torch.where(is_seen, aimed, plain)

    def _few(self, rows: Tensor) -> Tensor:
        """Return both ends of as many equal parts of the keys as there are pairs of (row, head)."""
        import torch

        number = rows * self.heads + torch.arange(self.heads)[:, None]
        parts = max(1, self.q_len * self.heads // 2)
        part, is_end = number // 2 % parts, number % 2
        return (part + is_end) * self.kv_len // parts - is_end

    def _at_borders(self, rows: Tensor, at: Tensor, first: Tensor, end: Tensor) -> Tensor:
        """Return for each head's row the border next to the diagonal, one near it, any that it sees, or the plain edge (-1).

        Rows at borders take the first, in odd heads the border before it: so none is left out in any head.
        """
        import torch

        head = torch.arange(self.heads)[:, None]
        mixed = (at * 7919 + head * 104_729 + 13).remainder(1 << 20)
        low = torch.searchsorted(self.borders, first)
        high = torch.searchsorted(self.borders, end) - 1  # the last border that is seen
        diagonal = (rows + self.kv_len - self.q_len).clamp(0, self.kv_len - 1)
        here = torch.searchsorted(self.borders, diagonal, right=True) - 1
        seen = (high - low + 1).clamp(min=1)
        nearest = (here.minimum(high) - head % 2).maximum(low)
        near = high - mixed % seen.clamp(max=_NEAR)
        anywhere = low + mixed % seen
        is_border = self.borders[here.clamp(min=0)] == diagonal
        kind = torch.where(is_border, 1, (at + head) % 4)
        index = torch.where(kind == 1, nearest, torch.where(kind == 2, near, anywhere))
        aimed = self.borders[index.clamp(0, len(self.borders) - 1)]
        return torch.where((kind == 0) | (high < low), -1, aimed)


# -- random tensors that are the same for every backend, process, device and torch version ------------------------------------

# Values come from a counter-based generator (SplitMix64 of the element's index, then the normal quantile), not from torch's
# own, whose streams differ between CPU and CUDA and whose CPU stream is too slow for a billion elements.

#: elements computed at a time on a CPU
_CHUNK = 1 << 18


class Draw:
    """Random tensors that depend on a key, a tensor's name and an element's index, and on nothing else."""

    def __init__(self, key: str, dtype: torch.dtype, device: torch.device) -> None:
        self.key, self.dtype, self.device = key, dtype, device

    def bits(self, name: str, count: int, start: int = 0) -> torch.Tensor:
        """Return `count` 64-bit integers (int64), elements start .. start + count of the stream `name`."""
        import torch

        digest = hashlib.sha256(f"{self.key}/{name}".encode()).digest()
        offset = int.from_bytes(digest[:8], "little", signed=True)
        device = torch.device("cpu") if self.device.type == "mps" else self.device  # MPS has no float64
        z = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
        z = z.mul_(_signed(0x9E3779B97F4A7C15)).add_(offset)
        z = z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
        z = z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(0x94D049BB133111EB))
        return z.bitwise_xor_(_shift_right(z, 31))

    def normal(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        """Return standard normal values times `scale`, rounded to the dtype."""
        import torch

        out = torch.empty(math.prod(shape), dtype=self.dtype, device=self.device)
        chunk = _CHUNK if self.device.type == "cpu" else _CHUNK << 6
        for start in range(0, out.numel(), chunk):
            part = out[start : start + chunk]
            uniform = _shift_right(self.bits(name, part.numel(), start), 11).to(torch.float64)
            uniform = uniform.add_(0.5).mul_(2.0**-52).sub_(1.0)
            part.copy_(uniform.erfinv_().mul_(math.sqrt(2) * scale))
        return out.view(shape)

    def whole(self, name: str, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        """Return whole numbers from low to high, both included, in the dtype."""
        return (self.bits(name, math.prod(shape)).remainder(high - low + 1) + low).view(shape).to(self.device, self.dtype)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 as if it were unsigned."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
