"""The same attention, said in another way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pytest_attn.invariants.derived import Derived, Variation, replaced
from pytest_attn.workloads.heads import repeated
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Causal, Window
from pytest_attn.workloads.workload import Workload, sequence_lengths

if TYPE_CHECKING:
    from torch import Tensor


class Equivalence(Derived):
    """A mask written as another, sequences one by one, keys out of their pages, heads repeated, the last row alone."""

    name = "equivalence"
    summary = "the same attention said in another way is as right: masks, sequences, pages, groups, decoding"
    calls = 2

    def variations(self, inputs: Inputs) -> Iterator[Variation]:
        """Say it in each other way; exact attention, and with it the budget, is that of the same values."""
        return (variation for vary in _VARIATIONS for variation in vary(inputs))


def _alone(inputs: Inputs) -> Iterator[Variation]:
    """One sequence of a packed, padded or paged batch, dense and without padding: the shortest, then the last."""
    w = inputs.workload
    if w.kv_lens is None or w.bias or inputs.descales is not None or not isinstance(w.plain_mask, Causal | Window | None):
        return
    lengths = sequence_lengths(w)
    whole = [batch for batch, (q_len, kv_len) in enumerate(lengths) if q_len and kv_len]
    shortest = min(whole, key=lambda batch: lengths[batch][1])
    for batch in dict.fromkeys((shortest, whole[-1])):
        yield Variation(f"sequence {batch} alone, without padding, packing and pages", one_sequence(inputs, batch))


def one_sequence(inputs: Inputs, batch: int) -> Inputs:
    """Return one sequence as a dense batch of 1."""
    w = inputs.workload
    q_len, kv_len = sequence_lengths(w)[batch]
    k, v = inputs.gathered()

    def taken(tensor: Tensor, lengths: tuple[int, ...] | None, length: int) -> Tensor:
        if not w.is_packed or tensor.dim() == 4:  # keys out of pages lie side by side
            return tensor[batch : batch + 1, :, :length].contiguous()
        start = sum((lengths or ())[:batch])
        return tensor[start : start + length].transpose(0, 1)[None].contiguous()

    changed = w.replace(batch=1, q_len=q_len, kv_len=kv_len, q_lens=None, kv_lens=None, kv_pages=None)
    bias = inputs.bias[batch : batch + 1] if inputs.bias is not None and "b" in (w.bias or "") else inputs.bias
    return dataclasses.replace(
        inputs,
        workload=changed,
        q=taken(inputs.q, w.q_lens, q_len),
        k=taken(k, w.kv_lens, kv_len),
        v=taken(v, w.kv_lens, kv_len),
        dout=taken(inputs.dout, w.q_lens, q_len),
        bias=bias,
        **dict.fromkeys(("cu_seqlens", "cu_seqlens_kv", "kv_lens", "page_table")),  # type: ignore[arg-type]
    )


def _pages_elsewhere(inputs: Inputs) -> Iterator[Variation]:
    """The same pages at other places of the pool."""
    if inputs.page_table is None or len(inputs.k) == 1:
        return
    pages, places = len(inputs.k), inputs.page_table
    k, v = (pool.roll(1, 0) for pool in (inputs.k, inputs.v))
    moved = dataclasses.replace(inputs, k=k, v=v, page_table=(places + 1) % pages)
    yield Variation("every page at the next place of the pool", moved)


def _mask_written_otherwise(inputs: Inputs) -> Iterator[Variation]:
    """A causal mask as a window, a window as a window of more keys than there are, a mask as a function."""
    w = inputs.workload
    if isinstance(w.mask, Causal) and (w.mask.bottom_right or w.q_len == w.kv_len) and w.kv_lens is None:
        yield replaced(inputs, "causal as a window without a left end", mask=Window(None, 0))
        yield replaced(inputs, "causal as a mask function", mask=_causal(w.kv_len - w.q_len))
    if w.mask is None and not w.is_packed:
        yield replaced(inputs, "no mask as a window of all keys", mask=Window(w.q_len + w.kv_len, w.q_len + w.kv_len))
    if isinstance(w.mask, Window) and w.kv_lens is None:
        yield replaced(inputs, "a window as a mask function", mask=_window(w.mask, w.kv_len - w.q_len))


def _causal(offset: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + offset


def _window(mask: Window, offset: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        at = q_idx + offset
        left = kv_idx >= 0 if mask.left is None else kv_idx >= at - mask.left
        return left if mask.right is None else left & (kv_idx <= at + mask.right)

    return seen


def _heads_repeated(inputs: Inputs) -> Iterator[Variation]:
    """Every query head with a key head of its own."""
    w = inputs.workload
    if w.group == 1 or inputs.descales is not None:
        return
    axis = 2 if w.kv_pages else 1
    k, v = (repeated(t, w, axis) for t in (inputs.k, inputs.v))
    changed = w.replace(kv_heads=w.heads)
    yield Variation("key heads repeated for every query head", dataclasses.replace(inputs, workload=changed, k=k, v=v))


def _last_row(inputs: Inputs) -> Iterator[Variation]:
    """The last row alone, as in decoding."""
    w = inputs.workload
    is_aligned = w.mask is None or isinstance(w.mask, Window) or (isinstance(w.mask, Causal) and _ends_together(w))
    if w.is_packed or w.q_len == 1 or not is_aligned or w.score_mod is not None or w.bias or inputs.descales is not None:
        return
    mask = Causal(bottom_right=True) if isinstance(w.mask, Causal) else w.mask
    q, dout = (t[:, :, -1:].contiguous() for t in (inputs.q, inputs.dout))
    changed = w.replace(q_len=1, kv_len=w.kv_len, mask=mask)
    yield Variation("the last row alone, as in decoding", dataclasses.replace(inputs, workload=changed, q=q, dout=dout))


def _ends_together(w: Workload) -> bool:
    """Whether the last row of a causal mask stands at the last key."""
    return w.mask.bottom_right or (w.q_len == w.kv_len and w.kv_lens is None)


_VARIATIONS: tuple[Callable[[Inputs], Iterator[Variation]], ...] = (
    _alone,
    _pages_elsewhere,
    _heads_repeated,
    _last_row,
    _mask_written_otherwise,
)
