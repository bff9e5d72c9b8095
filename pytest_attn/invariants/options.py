"""An option that is given acts, also where the call before had another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pytest_attn.invariants.derived import Derived, Variation, replaced
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import BooleanMask, Causal, Mask, MaskModMask, Window

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Options(Derived):
    """Each option makes the difference that it should, whatever was asked before.

    Exact attention with the option changed lies far from that without, so who is within the budget of one is not of the other.
    """

    name = "options"
    summary = "with another scale, mask, softcap, lengths, pages, bias, sinks or slopes the result is another, and right"
    calls = 3

    def variations(self, inputs: Inputs) -> Iterator[Variation]:
        """Change one option at a time."""
        return (variation for vary in _VARIATIONS for variation in vary(inputs))


def _lengths(inputs: Inputs) -> Iterator[Variation]:
    """Rotate the lengths of padded, packed or paged sequences, which changes no shape."""
    import torch

    w = inputs.workload
    if w.kv_lens is None or len(set(zip(w.q_lens or w.kv_lens, w.kv_lens, strict=True))) == 1:
        return
    kv_lens, q_lens = (*w.kv_lens[1:], w.kv_lens[0]), w.q_lens and (*w.q_lens[1:], w.q_lens[0])
    changes: dict[str, object] = {"workload": w.replace(kv_lens=kv_lens, q_lens=q_lens)}
    if inputs.kv_lens is not None:
        changes["kv_lens"] = torch.tensor(kv_lens, dtype=torch.int32, device=inputs.device)
    if q_lens is not None:
        changes["cu_seqlens"] = _cumulated(q_lens, inputs)
    if inputs.cu_seqlens_kv is not None:
        changes["cu_seqlens_kv"] = _cumulated(kv_lens, inputs)
    yield Variation(f"key lengths rotated to {kv_lens}", dataclasses.replace(inputs, **changes))  # type: ignore[arg-type]


def _cumulated(lengths: tuple[int, ...], inputs: Inputs) -> Tensor:
    import torch

    return torch.tensor((0, *lengths)).cumsum(0).to(inputs.device, torch.int32)


def _pages(inputs: Inputs) -> Iterator[Variation]:
    """Turn the page table round."""
    if inputs.page_table is not None:
        yield Variation("the page table turned round", dataclasses.replace(inputs, page_table=inputs.page_table.flip(0, 1)))


def _mask(inputs: Inputs) -> Iterator[Variation]:
    """Change the mask to one of its kind, then drop it."""
    w = inputs.workload
    if w.plain_mask is None:
        yield replaced(inputs, "causal", mask="causal-bottom-right")
        return
    for words, mask in _other_masks(w.plain_mask):
        yield replaced(inputs, words, mask=mask)


def _other_masks(mask: Mask) -> Iterator[tuple[str, Mask | None]]:
    if isinstance(mask, Window):
        yield "a window of another size", dataclasses.replace(mask, left=7 if mask.left is None else mask.left + 3)
    if isinstance(mask, BooleanMask):
        yield "a boolean mask that is lower triangular", BooleanMask(_triangle)
    if isinstance(mask, MaskModMask):
        yield "a mask function that hides every third key", MaskModMask(_two_of_three)
    if isinstance(mask, Causal):
        yield "no mask", None
        yield "a causal window of 8 keys", Window(7, 0)
    else:
        yield "no mask", None


def _triangle(batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    import torch

    return torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril()


def _two_of_three(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx % 3 != 1


def _scale(inputs: Inputs) -> Iterator[Variation]:
    """Make scores larger by a factor other than a power of two."""
    yield replaced(inputs, "a scale 1.7 times as large", scale=1.7 * inputs.workload.softmax_scale)


def _softcap(inputs: Inputs) -> Iterator[Variation]:
    """Cap scores where it shows, then not at all."""
    if inputs.workload.softcap is not None:
        yield replaced(inputs, "a softcap of 1.5", softcap=1.5)
        yield replaced(inputs, "no softcap", softcap=None)


def _left_out(inputs: Inputs) -> Iterator[Variation]:
    """Leave out what is added to scores, and sinks."""
    w = inputs.workload
    if w.sinks:
        yield replaced(dataclasses.replace(inputs, sinks=None), "no sinks", sinks=False)
    if w.bias:
        yield replaced(dataclasses.replace(inputs, bias=None), "no bias", bias=None)
    if w.alibi:
        yield replaced(dataclasses.replace(inputs, alibi_slopes=None), "no ALiBi", alibi=False)


_VARIATIONS: tuple[Callable[[Inputs], Iterator[Variation]], ...] = (_lengths, _pages, _softcap, _mask, _scale, _left_out)
