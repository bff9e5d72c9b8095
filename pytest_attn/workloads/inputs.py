"""The tensors of a workload: seeded, the same for every backend, process, device and torch version.

Values come from a counter-based generator (SplitMix64 of the element's index, then the normal quantile), not from torch's
own, whose streams differ between CPU and CUDA and whose CPU stream is too slow for a billion elements.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.workloads.masks import MaskMod, bind, interval
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

DISTRIBUTIONS = {
    "structured": "randn with a mean per value head and needles: rows whose query points at one key, on the diagonal,"
    " the first or last key it may see, and the first it may not",
    "flat": "0.1 randn: a nearly uniform softmax",
    "randn": "standard normal",
    "peaky": "3 randn: softmax near one-hot",
    "flux": "randn times a random whole number from 1 to 4, as the Flux benchmark draws",
    "outlier": "one channel with keys near 30 and queries so that logits, and lse, lie near +120 or -120",
    "onehot": "randn q and k; each value row is a unit vector, so that out shows the probabilities",
    "large": "200 randn q and k: logits up to some 50,000",
}
DEFAULT_DISTRIBUTIONS = ("structured", "flat")
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Inputs:
    """What a kernel is given for one workload, in its native layout ("bhsd", or "thd" where packed).

    q, k, v, dout: the workload's dtype; k and v are page pools where the workload has kv_pages.
    bias: broadcasts to (batch, heads, q_len, kv_len), the workload's dtype. sinks: (heads,), likewise.
    alibi_slopes: (heads,) float32. cu_seqlens, cu_seqlens_kv: (batch + 1,) int32, where packed.
    kv_lens: (batch,) int32, where padded or paged. page_table: (batch, pages per sequence) int32, where paged.
    """

    workload: Workload
    device: torch.device
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None

    def mask_mod(self) -> MaskMod | None:
        """Return the mask, with padding, as FlexAttention's mask_mod over dense tensors; None where all is visible."""
        w = self.workload
        lens = self.kv_lens if self.kv_lens is not None else w.kv_len
        inner = None if w.plain_mask is None else bind(w.plain_mask, w.batch, w.heads, w.q_len, w.kv_len, lens, self.device)
        if self.kv_lens is None or w.is_packed:
            return inner
        kv_lens = self.kv_lens

        def padded(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            inside = kv < kv_lens[b]
            return inside if inner is None else inside & inner(b, h, q, kv)

        return padded

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v as dense (batch, kv_heads, kv_len, dim) tensors, read through the page table where paged."""
        if self.page_table is None:
            return self.k, self.v
        table = self.page_table.long()
        k, v = (pool[table].flatten(1, 2)[:, : self.workload.kv_len].transpose(1, 2) for pool in (self.k, self.v))
        return k, v


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


def draw_inputs(
    workload: Workload, distribution: str = "structured", seed: int = 0, device: torch.device | str = "cpu"
) -> Inputs:
    """Draw the tensors of `workload`. Raises ValueError for an unknown distribution."""
    import torch

    distribution_names(distribution)
    device = torch.device(device)
    w = workload
    dense_q = (1, w.heads, sum(w.q_lens)) if w.q_lens else (w.batch, w.heads, w.q_len)
    dense_k = (1, w.kv_heads, sum(w.kv_lens)) if w.q_lens and w.kv_lens else (w.batch, w.kv_heads, w.kv_len)
    draw = _Draw(f"{w.name or w.shape_id}/{seed}", getattr(torch, w.dtype), device)
    q, k, v = _SHAPERS[distribution](draw, w, (*dense_q, w.head_dim), (*dense_k, w.head_dim), (*dense_k, w.v_head_dim))
    dout = draw.normal("dout", (*dense_q, w.v_head_dim))
    extra = _auxiliary(draw, w, device)
    if w.is_packed:
        q, k, v, dout = (t[0].transpose(0, 1).contiguous() for t in (q, k, v, dout))
    if w.kv_pages:
        k, v = (_into_pages(t, extra["page_table"], w.kv_pages.size) for t in (k, v))
    return Inputs(w, device, q, k, v, dout, **extra)


def _auxiliary(draw: _Draw, w: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    import torch

    made: dict[str, torch.Tensor] = {}
    if w.bias:
        sizes = {"b": w.batch, "h": w.heads, "q": w.q_len, "k": w.kv_len}
        made["bias"] = draw.normal("bias", tuple(sizes[d] if d in w.bias else 1 for d in "bhqk"))
    if w.sinks:
        made["sinks"] = draw.normal("sinks", (w.heads,)) + math.log(w.kv_len + 1)  # as heavy as all keys of a flat row
    if w.alibi:
        made["alibi_slopes"] = torch.tensor([2.0 ** (-8 * (h + 1) / w.heads) for h in range(w.heads)], device=device)
    if w.q_lens and w.kv_lens:
        for name, lengths in (("cu_seqlens", w.q_lens), ("cu_seqlens_kv", w.kv_lens)):
            ends = torch.tensor((0, *lengths)).cumsum(0)
            made[name] = ends.to(device, torch.int32)
    elif w.kv_lens:
        made["kv_lens"] = torch.tensor(w.kv_lens, dtype=torch.int32, device=device)
    if w.kv_pages:
        per_sequence = math.ceil(w.kv_len / w.kv_pages.size)
        order = draw.bits("page_table", w.batch * per_sequence).argsort()
        made["page_table"] = order.view(w.batch, per_sequence).to(device, torch.int32)
    return made


def _into_pages(dense: torch.Tensor, table: torch.Tensor, size: int) -> torch.Tensor:
    """Scatter (batch, kv_heads, kv_len, d) into a pool (pages, size, kv_heads, d) that the table reads back."""
    batch, heads, length, dim = dense.shape
    per_sequence = table.shape[1]
    padded = dense.new_zeros(batch, heads, per_sequence * size, dim)
    padded[:, :, :length] = dense
    pages = padded.view(batch, heads, per_sequence, size, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
    pool = dense.new_zeros(pages.shape)
    pool[table.flatten().long()] = pages
    return pool


class _Draw:
    """Random tensors that depend on a key, a tensor's name and an element's index, and on nothing else."""

    def __init__(self, key: str, dtype: torch.dtype, device: torch.device) -> None:
        self.key, self.dtype, self.device = key, dtype, device

    def bits(self, name: str, count: int, start: int = 0) -> torch.Tensor:
        """Return `count` 64-bit integers (int64), elements start .. start + count of the stream `name`."""
        import torch

        digest = hashlib.sha256(f"{self.key}/{name}".encode()).digest()
        offset = int.from_bytes(digest[:8], "little", signed=True)
        z = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=self._device64)
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

    @property
    def _device64(self) -> torch.device:
        import torch

        return torch.device("cpu") if self.device.type == "mps" else self.device  # MPS has no float64


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 as if it were unsigned."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


# -- the distributions: each takes the draw, the workload and the dense shapes of q, k, v ---------------------------------

Shape = tuple[int, ...]


def _scaled(factor: float, draw: _Draw, q: Shape, k: Shape, v: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw.normal("q", q, factor), draw.normal("k", k, factor), draw.normal("v", v, factor)


def _randn(draw: _Draw, _w: Workload, *shapes: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _scaled(1.0, draw, *shapes)


def _flat(draw: _Draw, _w: Workload, *shapes: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _scaled(0.1, draw, *shapes)


def _peaky(draw: _Draw, _w: Workload, *shapes: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _scaled(3.0, draw, *shapes)


def _flux(draw: _Draw, _w: Workload, *shapes: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = _scaled(1.0, draw, *shapes)
    return tuple(t * draw.whole(f"{n}-factor", s, 1, 4) for n, t, s in zip("qkv", (q, k, v), shapes, strict=True))  # type: ignore[return-value]


def _large(draw: _Draw, _w: Workload, q: Shape, k: Shape, v: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw.normal("q", q, 200.0), draw.normal("k", k, 200.0), draw.normal("v", v)


def _onehot(draw: _Draw, _w: Workload, q: Shape, k: Shape, v: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    values = torch.zeros(v, dtype=draw.dtype, device=draw.device)
    keys = torch.arange(v[-2], device=draw.device)
    values[..., keys, keys % v[-1]] = 1
    return draw.normal("q", q), draw.normal("k", k), values


def _outlier(draw: _Draw, w: Workload, *shapes: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = _scaled(1.0, draw, *shapes)
    k[..., 0] += 30
    sign = 1 - 2 * (draw.bits("sign", w.heads) & 1).to(q)
    sign[0] = -1  # at least one head has lse far below -88, where exp(lse) underflows in float32
    q[..., 0] = (sign * 120 / (30 * w.softmax_scale))[:, None]
    return q, k, v


def _structured(draw: _Draw, w: Workload, *shapes: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = _scaled(1.0, draw, *shapes)
    v += draw.whole("v-mean", (v.shape[0], v.shape[1], 1, 1), -4, 4) / 2
    _plant_needles(w, q, k)
    return q, k, v


def _plant_needles(w: Workload, q: torch.Tensor, k: torch.Tensor) -> None:
    """Point every second query at one key, so that seeing that key, or not, changes the row beyond any rounding."""
    import torch

    q_start = k_start = 0
    for batch, (q_len, kv_len) in enumerate(sequence_lengths(w)):
        lane = 0 if w.is_packed else batch
        rows = torch.arange(0, q_len, 2)
        targets = torch.tensor([_needle_target(w, int(row), q_len, kv_len) for row in rows])
        rows, targets = rows[targets >= 0], targets[targets >= 0]
        if len(rows):
            keys = k[lane, :, (targets + k_start).to(k.device)].repeat_interleave(w.group, dim=0).double()
            height = math.log(kv_len + 1) + 1  # gives the needle most of the row's weight
            aimed = keys * (height / w.softmax_scale / keys.square().sum(-1, keepdim=True))
            at = (rows + q_start).to(q.device)
            q[lane, :, at] = (aimed + 0.25 * q[lane, :, at].double()).to(q.dtype)
        if w.is_packed:
            q_start, k_start = q_start + q_len, k_start + kv_len


def _needle_target(w: Workload, row: int, q_len: int, kv_len: int) -> int:
    """Choose the key that this row's query points at, -1 for none: a different edge of the mask for each kind of row."""
    if kv_len == 0:
        return -1
    span = interval(w.plain_mask, row, q_len, kv_len)
    diagonal = min(max(row + kv_len - q_len, 0), kv_len - 1)
    if span is None:
        return (diagonal, kv_len - 1, 0, (row * 7919) % kv_len)[row // 2 % 4]
    first, end = span
    edges = (diagonal, end - 1, first, end, first - 1, kv_len - 1)
    target = edges[row // 2 % len(edges)]
    return target if 0 <= target < kv_len else diagonal


def sequence_lengths(w: Workload) -> list[tuple[int, int]]:
    """Return (q_len, kv_len) of each batch entry."""
    q_lens = w.q_lens or (w.q_len,) * w.batch
    kv_lens = w.kv_lens or (w.kv_len,) * w.batch
    return list(zip(q_lens, kv_lens, strict=True))


_SHAPERS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "structured": _structured,
    "flat": _flat,
    "randn": _randn,
    "peaky": _peaky,
    "flux": _flux,
    "outlier": _outlier,
    "onehot": _onehot,
    "large": _large,
}
