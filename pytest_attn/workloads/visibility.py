"""Which keys a query sees: masks with lengths, as FlexAttention's predicate, as an interval of keys, and as a count.

A bound mask is a predicate `(b, h, q_idx, kv_idx) -> bool tensor` in FlexAttention's signature. It is elementwise in its four
index tensors, so that it serves the reference (by broadcasting), FlexAttention (by vmap) and dense masks alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pytest_attn.workloads.functions import describe, function_label
from pytest_attn.workloads.masks import (
    BooleanMask,
    Causal,
    Document,
    Mask,
    MaskMod,
    MaskModMask,
    Neighborhood,
    Window,
    axes_of,
)

if TYPE_CHECKING:
    import torch

#: one length for all, or a tensor with one per batch entry
Lengths: TypeAlias = "int | torch.Tensor"


def bind(mask: Mask, batch: int, heads: int, q_len: int, kv_len: int, kv_lens: Lengths, device: torch.device) -> MaskMod:
    """Return the predicate of `mask` for sequences of q_len queries and kv_lens keys (an int, or one per batch entry)."""
    if isinstance(mask, Causal | Window):
        return _bind_band(mask, q_len, kv_lens)
    if isinstance(mask, Document):
        return _bind_documents(mask, device)
    if isinstance(mask, Neighborhood):
        return _bind_neighborhood(mask)
    if isinstance(mask, BooleanMask):
        return _bind_tensor(_dense_from_factory(mask, batch, heads, q_len, kv_len, device))
    return mask.fn


class Band(NamedTuple):
    """How many keys before and after its own a query sees, None for all, and from which end keys are counted."""

    left: int | None
    right: int | None
    top_left: bool


def band_of(mask: Causal | Window) -> Band:
    """Return a causal mask or window as a band."""
    if isinstance(mask, Window):
        return Band(mask.left, mask.right, top_left=False)
    return Band(None, 0, top_left=not mask.bottom_right)


def _bind_band(mask: Causal | Window, q_len: int, kv_lens: Lengths) -> MaskMod:
    import torch

    left, right, top_left = band_of(mask)

    def inside(b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        keys = kv_lens[b] if isinstance(kv_lens, torch.Tensor) else kv_lens
        position = q if top_left else q + (keys - q_len)
        visible = kv >= 0
        if right is not None:
            visible = visible & (kv <= position + right)
        if left is not None:
            visible = visible & (kv >= position - left)
        return visible

    return inside


def _bind_documents(mask: Document, device: torch.device) -> MaskMod:
    import torch

    ids = torch.repeat_interleave(torch.tensor(mask.lengths)).to(device)

    def same_document(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        same: torch.Tensor = ids[q] == ids[kv]
        return same & (kv <= q) if mask.causal else same

    return same_document


def _bind_neighborhood(mask: Neighborhood) -> MaskMod:
    import torch

    axes = axes_of(mask)[::-1]  # the innermost first, as positions count

    def near(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        visible = kv >= 0
        for size, kernel, stride, dilation, causal in axes:
            q_at, kv_at = q % size, kv % size
            q, kv = q // size, kv // size
            group = q_at % dilation
            q_pos, kv_pos = q_at // dilation, kv_at // dilation
            last = (size - 1 - group) // dilation  # last position of this dilation group
            if causal:
                leader = torch.minimum(q_pos // stride * stride + stride - 1, last)
                here = (kv_pos <= q_pos) & (leader - kv_pos < kernel)
            else:
                leader = torch.minimum(q_pos // stride * stride + stride // 2, last)
                start = torch.minimum(torch.clamp(leader - kernel // 2, min=0), last + 1 - kernel)
                here = (kv_pos >= start) & (kv_pos < start + kernel)
            visible = visible & here & (kv_at % dilation == group)
        return visible

    return near


def _bind_tensor(dense: torch.Tensor) -> MaskMod:
    def looked_up(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return dense[b, h, q, kv]

    return looked_up


def _dense_from_factory(
    mask: BooleanMask, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> torch.Tensor:
    import torch

    shape = (batch, heads, q_len, kv_len)
    made = mask.factory(batch, heads, q_len, kv_len, device)
    name = function_label(mask.factory)
    if not isinstance(made, torch.Tensor) or made.dtype != torch.bool:
        raise ValueError(f"BooleanMask: {name} must return a boolean tensor (True = visible), got {describe(made)}")
    try:
        return made.to(device).expand(shape)
    except RuntimeError:
        raise ValueError(
            f"BooleanMask: {name} must return a tensor that broadcasts to {shape}, got {describe(made)}"
        ) from None


def interval(mask: Mask | None, row: int, q_len: int, kv_len: int) -> tuple[int, int] | None:
    """Return the first and one past the last key that query `row` sees, or None where these do not describe the mask."""
    if mask is None:
        return 0, kv_len
    if isinstance(mask, Causal | Window):
        left, right, top_left = band_of(mask)
        position = row if top_left else row + kv_len - q_len
        start = 0 if left is None else max(0, position - left)
        end = kv_len if right is None else min(kv_len, position + right + 1)
        return min(start, kv_len), max(min(start, kv_len), end)
    if isinstance(mask, Document):
        start = 0
        for length in mask.lengths:
            if row < start + length:
                return start, row + 1 if mask.causal else start + length
            start += length
    return None


def has_intervals(mask: Mask | None) -> bool:
    """Whether what each row sees is an interval of keys."""
    return mask is None or isinstance(mask, Causal | Window | Document)


def intervals(mask: Mask | None, rows: torch.Tensor, q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `interval` says of each of these rows (n,), int64; of a mask that it does not describe, all keys."""
    import torch

    nothing, everything = torch.zeros_like(rows), torch.full_like(rows, kv_len)
    if isinstance(mask, Causal | Window):
        left, right, top_left = band_of(mask)
        position = rows if top_left else rows + kv_len - q_len
        start = nothing if left is None else (position - left).clamp(0, kv_len)
        end = everything if right is None else (position + right + 1).clamp(max=kv_len)
        return start, end.maximum(start)
    if isinstance(mask, Document):
        ends = torch.tensor(mask.lengths, device=rows.device).cumsum(0)
        last = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
        start = ends[last] - torch.tensor(mask.lengths, device=rows.device)[last]
        return start, rows + 1 if mask.causal else ends[last]
    return nothing, everything


def visible_pairs(mask: Mask | None, q_len: int, kv_len: int) -> int:
    """Count the (query, key) pairs that `mask` leaves visible in one head; a mask given by a function counts as full."""
    if mask is None or isinstance(mask, BooleanMask | MaskModMask):
        return q_len * kv_len
    if isinstance(mask, Document):
        return sum(n * (n + 1) // 2 if mask.causal else n * n for n in mask.lengths)
    if isinstance(mask, Neighborhood):
        return _neighborhood_pairs(mask)
    left, right, top_left = band_of(mask)
    shift = 0 if top_left else kv_len - q_len
    ends = q_len * kv_len if right is None else _clamped_sum(shift + right + 1, q_len, kv_len)
    starts = 0 if left is None else _clamped_sum(shift - left, q_len, kv_len)
    return max(0, ends - starts)


def _clamped_sum(shift: int, count: int, most: int) -> int:
    """Return the sum of min(max(i + shift, 0), most) over i = 0 ... count - 1."""
    first, last = max(0, -shift), min(count, most - shift)  # between these it grows by one
    growing = max(0, last - first)
    full = count - max(first, last, 0) if first < count else 0
    return growing * (first + shift) + growing * (growing - 1) // 2 + max(0, full) * most


def _neighborhood_pairs(mask: Neighborhood) -> int:
    total = 1
    for size, kernel, stride, dilation, causal in axes_of(mask):
        if not causal:
            total *= size * kernel
            continue
        pairs = 0
        for at in range(size):
            position, last = at // dilation, (size - 1 - at % dilation) // dilation
            leader = min(position // stride * stride + stride - 1, last)
            pairs += position - max(0, leader - kernel + 1) + 1
        total *= pairs
    return total
