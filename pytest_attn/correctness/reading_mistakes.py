"""Likely mistakes with what is read: how far, of which heads and batch entries, and q, k and v changed before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pytest_attn.correctness.mask_mistakes import TILES, seen_by
from pytest_attn.correctness.packed_mistakes import Read, changed, packed_mistakes, page_mistakes
from pytest_attn.workloads.heads import key_heads
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Causal, MaskMod, Window
from pytest_attn.workloads.workload import Workload, sequence_lengths

if TYPE_CHECKING:
    import torch

_ROPE_BASE = 10000.0


def reading_mistakes(inputs: Inputs, w: Workload) -> Iterator[Read]:
    """Yield mistakes with what a kernel reads. Their texts depend on the workload alone."""
    yield from _lengths(inputs, w)
    yield from _heads(inputs, w)
    yield from _batch_entries(inputs, w)
    yield from packed_mistakes(inputs, w)
    yield from page_mistakes(inputs, w)
    yield from _contents(inputs, w)
    yield from _rotated(inputs, w)


# -- how far a sequence goes -----------------------------------------------------------------------------------------------


def _lengths(inputs: Inputs, w: Workload) -> Iterator[Read]:
    lens = inputs.kv_lens
    if lens is not None:
        if len(set(w.kv_lens or ())) > 1:
            yield "that ignores kv_lens and sees padding", changed(inputs, w, kv_lens=None)
            yield "with the length of the first batch entry for all", changed(inputs, w, kv_lens=lens[:1].expand_as(lens))
        yield "with kv_lens one too short: the newest key is not seen", changed(inputs, w, kv_lens=(lens - 1).clamp(min=0))
    if w.is_packed or w.kv_pages or not (w.mask is None or isinstance(w.mask, Causal | Window)):
        return
    ends = [kv_len for _, kv_len in sequence_lengths(w)]
    seen: set[tuple[int, ...]] = set()
    for tile in reversed(TILES):
        filled = tuple(-(-end // tile) * tile for end in ends)
        if filled not in seen and filled != tuple(ends):
            seen.add(filled)
            text = f"that counts the zeros which fill up the last tile of keys (to a multiple of {tile}): they are not masked"
            yield text, partial(_filled_with_zeros, inputs, w, filled)


def _filled_with_zeros(inputs: Inputs, w: Workload, filled: tuple[int, ...]) -> tuple[Inputs, Workload]:
    """Lengthen the keys by zeros, up to the end of each batch entry's last tile, and show these."""
    import torch
    import torch.nn.functional as F

    inside, longest = seen_by(inputs, w), max(w.kv_len, *filled)
    ends = torch.tensor([kv_len for _, kv_len in sequence_lengths(w)], device=inputs.device)
    stops = ends.new_tensor(filled)
    beyond = (ends.new_tensor(range(longest)) >= ends[:, None])[:, None, :, None]
    k, v = (F.pad(t, (0, 0, 0, longest - w.kv_len)).masked_fill(beyond, 0) for t in (inputs.k, inputs.v))
    bias = inputs.bias
    if bias is not None and bias.shape[-1] == w.kv_len:
        bias = F.pad(bias, (0, longest - w.kv_len))

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return inside(b, h, q, kv) & (kv < stops[b])

    longer = dataclasses.replace(inputs, k=k, v=v, bias=bias, kv_lens=None)
    seen: MaskMod = mask_mod
    return longer, w.replace(kv_len=longest, kv_lens=None, mask=seen)


# -- heads and batch entries -------------------------------------------------------------------------------------------------


def _heads(inputs: Inputs, w: Workload) -> Iterator[Read]:
    """Yield other key heads for the query heads."""
    at, own = 2 if w.kv_pages else 1, tuple(key_heads(w))
    maps = {
        "in which query head h uses key head h % kv_heads (interleaved groups)": lambda h: h % w.kv_heads,
        "in which query head h uses key head h // group (groups of neighbors)": lambda h: h // w.group,
        "in which query head h uses key head h // kv_heads, not h // group": lambda h: min(h // w.kv_heads, w.kv_heads - 1),
        "in which groups are rounded up to a power of two": lambda h: h >> (w.group - 1).bit_length(),
        "in which query head h uses key head h, as far as there are any": lambda h: min(h, w.kv_heads - 1),
        "in which all query heads use the first key head": lambda h: 0,
        "in which query heads use the next key head": lambda h: (own[h] + 1) % w.kv_heads,
    }
    tried: set[tuple[int, ...]] = set()
    for text, head_of in maps.items():
        order = tuple(map(head_of, range(w.heads)))
        if order != own and order not in tried:
            tried.add(order)
            yield text, partial(_with_key_heads, inputs, w, order, at)


def _with_key_heads(inputs: Inputs, w: Workload, order: tuple[int, ...], at: int) -> tuple[Inputs, Workload]:
    import torch

    index = torch.tensor(order, device=inputs.device)
    k, v = (t.index_select(at, index) for t in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, k=k, v=v), w.replace(kv_heads=w.heads)


def _batch_entries(inputs: Inputs, w: Workload) -> Iterator[Read]:
    """Yield keys and values of other batch entries."""
    if w.batch == 1 or w.is_packed or w.kv_pages:
        return
    k, v = inputs.k, inputs.v
    yield "with the keys of the first batch entry for all", changed(inputs, w, k=k[:1].expand_as(k))
    yield "with the values of the first batch entry for all", changed(inputs, w, v=v[:1].expand_as(v))
    yield "with k and v of the first batch entry for all", changed(inputs, w, k=k[:1].expand_as(k), v=v[:1].expand_as(v))
    yield "with k and v of the next batch entry", lambda: (dataclasses.replace(inputs, k=k.roll(-1, 0), v=v.roll(-1, 0)), w)
    if w.batch > 2:
        yield (
            "with k and v of the batch entry before",
            lambda: (dataclasses.replace(inputs, k=k.roll(1, 0), v=v.roll(1, 0)), w),
        )
        yield "with the batch in reverse", lambda: (dataclasses.replace(inputs, k=k.flip(0), v=v.flip(0)), w)


# -- q, k and v ------------------------------------------------------------------------------------------------------------


def _contents(inputs: Inputs, w: Workload) -> Iterator[Read]:
    q, k, v = inputs.q, inputs.k, inputs.v
    yield "with uniform probabilities: the scores have no effect", lambda: (dataclasses.replace(inputs, q=q * 0), w)
    if w.head_dim == w.v_head_dim:
        yield "with k in place of v", changed(inputs, w, v=k)
        yield "with v in place of k", changed(inputs, w, k=v)
    if w.v_in_k and w.head_dim > w.v_head_dim:
        yield "with the last elements of k for v, not the first", changed(inputs, w, v=k[..., -w.v_head_dim :])
    for step in (64, 32, 16):
        whole = w.head_dim // step * step
        if 0 < whole < w.head_dim:
            text = f"with q . k over the first {whole} of {w.head_dim} elements of a head"
            yield text, partial(_with_short_queries, inputs, w, whole)
    if w.v_head_dim != w.head_dim and not w.kv_pages and not w.is_packed:
        yield "that reads rows of v head_dim apart, as those of k", lambda: (dataclasses.replace(inputs, v=_far_rows(v, w)), w)
    if w.kv_heads == w.kv_len > 1 and not w.is_packed and not w.kv_pages:
        yield "with heads and rows of k swapped", lambda: (dataclasses.replace(inputs, k=k.transpose(1, 2).contiguous()), w)
    for bits in (8, 15, 16):
        if w.kv_len > 1 << bits and not w.is_packed and not w.kv_pages:
            yield f"whose key positions wrap round at {1 << bits}", partial(_wrapped, inputs, w, 1 << bits)


def _with_short_queries(inputs: Inputs, w: Workload, whole: int) -> tuple[Inputs, Workload]:
    q = inputs.q.clone()
    q[..., whole:] = 0
    return dataclasses.replace(inputs, q=q), w


def _far_rows(v: torch.Tensor, w: Workload) -> torch.Tensor:
    """Read v with the strides that it would have, were its rows head_dim long; what lies past the end wraps round."""
    import torch

    *rows, dim = v.shape
    at = torch.arange(math.prod(rows), device=v.device).view(*rows, 1) * w.head_dim + torch.arange(dim, device=v.device)
    return v.flatten()[at % v.numel()]


def _wrapped(inputs: Inputs, w: Workload, reach: int) -> tuple[Inputs, Workload]:
    import torch

    at = torch.arange(w.kv_len, device=inputs.k.device) % reach
    return dataclasses.replace(inputs, k=inputs.k[:, :, at], v=inputs.v[:, :, at]), w


def _rotated(inputs: Inputs, w: Workload) -> Iterator[Read]:
    """Yield q and k rotated by their positions: what a model does before attention, and a kernel must not do again."""
    if w.head_dim % 2 or w.is_packed or w.kv_pages:
        return
    for style in ("half-split", "interleaved"):
        for shift in sorted({0, max(w.kv_len - w.q_len, 0)}):
            for is_rounded in (False, True):
                at = f" and q from position {shift}" if shift else ""
                text = f"with RoPE inside: q and k rotated by position ({style} pairs, base 10000{at})"
                yield text, partial(_with_rope, inputs, w, shift, style, is_rounded)


def _with_rope(inputs: Inputs, w: Workload, shift: int, style: str, is_rounded: bool) -> tuple[Inputs, Workload]:
    q, k = _rope(inputs.q, shift, style), _rope(inputs.k, 0, style)
    if is_rounded:
        q, k = q.to(inputs.q.dtype), k.to(inputs.k.dtype)
    return dataclasses.replace(inputs, q=q, k=k), w


def _rope(x: torch.Tensor, shift: int, style: str) -> torch.Tensor:
    """Rotate (..., rows, head_dim) by position."""
    import torch

    *_, rows, dim = x.shape
    frequency = _ROPE_BASE ** -(torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angle = torch.arange(shift, shift + rows, device=x.device)[:, None] * frequency
    x = x.double()
    one, other = x.chunk(2, -1) if style == "half-split" else (x[..., 0::2], x[..., 1::2])
    turned = (one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin())
    return torch.cat(turned, -1) if style == "half-split" else torch.stack(turned, -1).flatten(-2)
