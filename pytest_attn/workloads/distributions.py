"""Input distributions: which values q, k and v have, each to bring out faults of another kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from pytest_attn.workloads.generator import Draw
from pytest_attn.workloads.heads import key_heads
from pytest_attn.workloads.masks import interval
from pytest_attn.workloads.needles import LongNeedles
from pytest_attn.workloads.positions import is_long
from pytest_attn.workloads.workload import Workload, sequence_lengths

if TYPE_CHECKING:
    import torch

#: elements of q that are aimed together
_NEEDLE_ELEMENTS = 1 << 24
Shape: TypeAlias = tuple[int, ...]
QKV: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"

DISTRIBUTIONS = {
    "structured": "randn with a mean per value head and needles: rows whose query points at one key, on the diagonal,"
    " the first or last key it may see, and the first it may not",
    "flat": "0.1 randn: a nearly uniform softmax",
    "randn": "standard normal",
    "peaky": "3 randn: softmax near one-hot",
    "flux": "randn times a random whole number from 1 to 4, as the Flux benchmark draws",
    "outlier": "one channel with keys near 30 and queries so that logits, and lse, lie near +120 or -120",
    "onehot": "randn q and k; each value row is a unit vector, so that out shows the probabilities",
    "large": "200 randn q and k: logits up to about 50,000",
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


def _scaled(factor: float, draw: Draw, q: Shape, k: Shape, v: Shape) -> QKV:
    return draw.normal("q", q, factor), draw.normal("k", k, factor), draw.normal("v", v, factor)


def _randn(draw: Draw, _w: Workload, *shapes: Shape) -> QKV:
    return _scaled(1.0, draw, *shapes)


def _flat(draw: Draw, _w: Workload, *shapes: Shape) -> QKV:
    return _scaled(0.1, draw, *shapes)


def _peaky(draw: Draw, _w: Workload, *shapes: Shape) -> QKV:
    return _scaled(3.0, draw, *shapes)


def _flux(draw: Draw, _w: Workload, *shapes: Shape) -> QKV:
    q, k, v = _scaled(1.0, draw, *shapes)
    return tuple(t * draw.whole(f"{n}-factor", s, 1, 4) for n, t, s in zip("qkv", (q, k, v), shapes, strict=True))  # type: ignore[return-value]


def _large(draw: Draw, _w: Workload, q: Shape, k: Shape, v: Shape) -> QKV:
    return draw.normal("q", q, 200.0), draw.normal("k", k, 200.0), draw.normal("v", v)


def _onehot(draw: Draw, _w: Workload, q: Shape, k: Shape, v: Shape) -> QKV:
    import torch

    values = torch.zeros(v, dtype=draw.dtype, device=draw.device)
    keys = torch.arange(v[-2], device=draw.device)
    values[..., keys, keys % v[-1]] = 1
    return draw.normal("q", q), draw.normal("k", k), values


def _outlier(draw: Draw, w: Workload, *shapes: Shape) -> QKV:
    q, k, v = _scaled(1.0, draw, *shapes)
    k[..., 0] += 30
    sign = 1 - 2 * (draw.bits("sign", w.heads) & 1).to(q)
    sign[0] = -1  # at least one head has lse far below -88, where exp(lse) underflows in float32
    q[..., 0] = (sign * 120 / (30 * w.softmax_scale))[:, None]
    return q, k, v


def _structured(draw: Draw, w: Workload, *shapes: Shape) -> QKV:
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
        if is_long(q_len, kv_len) and not w.is_packed:
            _plant_long(w, q[lane, :, :q_len], k[lane, :, :kv_len])
            continue
        rows = torch.arange(0, q_len, 2)
        targets = torch.tensor([_needle_target(w, int(row), q_len, kv_len) for row in rows])
        rows, targets = rows[targets >= 0], targets[targets >= 0]
        if len(rows):
            keys = k[lane, :, (targets + k_start).to(k.device)][key_heads(w)].double()
            height = math.log(kv_len + 1) + 1  # gives the needle most of the row's weight
            aimed = keys * (height / w.softmax_scale / keys.square().sum(-1, keepdim=True))
            at = (rows + q_start).to(q.device)
            q[lane, :, at] = (aimed + 0.25 * q[lane, :, at].double()).to(q.dtype)
        if w.is_packed:
            q_start, k_start = q_start + q_len, k_start + kv_len


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
        keys = k[of_head, targets.clamp(min=0)].double()
        aimed = keys.mul_(height / w.softmax_scale / keys.square().sum(-1, keepdim=True))
        own = q[:, rows]
        q[:, rows] = torch.where(targets[..., None] >= 0, aimed.add_(own.double(), alpha=0.25).to(q.dtype), own)


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


_DRAWN_BY: dict[str, Callable[..., QKV]] = {
    "structured": _structured,
    "flat": _flat,
    "randn": _randn,
    "peaky": _peaky,
    "flux": _flux,
    "outlier": _outlier,
    "onehot": _onehot,
    "large": _large,
}
