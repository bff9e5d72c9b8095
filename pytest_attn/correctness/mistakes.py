"""The mistakes that attention kernels are known for, each said as the attention that it amounts to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Causal, MaskMod, Window
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


def likely_mistakes(inputs: Inputs, w: Workload) -> Iterator[tuple[str, Inputs, Workload]]:
    """Yield likely mistakes: a text that continues "it equals attention ...", the inputs and the workload it amounts to."""
    for text, changes in _option_mistakes(w):
        yield text, inputs, w.replace(**changes)
    for text, mask_mod in _mask_mistakes(w):
        yield text, inputs, w.replace(mask=mask_mod)
    if w.kv_lens and not w.is_packed and len(set(w.kv_lens)) > 1:
        yield "that ignores kv_lens and sees padding", dataclasses.replace(inputs, kv_lens=None), w
    if 1 < w.kv_heads < w.heads and not w.kv_pages and not w.is_packed:
        order = [h % w.kv_heads for h in range(w.heads)]
        mixed = dataclasses.replace(inputs, k=inputs.k[:, order], v=inputs.v[:, order])
        yield "in which query head h uses key head h % kv_heads (interleaved groups)", mixed, w.replace(kv_heads=w.heads)
    yield "with uniform probabilities: the scores have no effect", dataclasses.replace(inputs, q=inputs.q * 0), w
    if w.head_dim == w.v_head_dim:
        yield "with k in place of v", dataclasses.replace(inputs, v=inputs.k), w


def _option_mistakes(w: Workload) -> Iterator[tuple[str, dict[str, object]]]:
    scale = w.softmax_scale
    yield "with scale 1: the softmax scale is missing", {"scale": 1.0}
    yield "with the softmax scale applied twice", {"scale": scale * scale}
    yield "with scale * ln 2: exp2 without its factor log2 e", {"scale": scale * math.log(2)}
    if w.scale is not None:
        yield "with scale 1 / sqrt(head_dim): the option scale is ignored", {"scale": None}
    if w.softcap is not None:
        yield "without softcap", {"softcap": None}
    if w.alibi:
        yield "without ALiBi", {"alibi": False}
    if w.sinks:
        yield "without sinks", {"sinks": False}
    if w.bias:
        yield "without the bias", {"bias": None}
    if w.score_mod:
        yield "without score_mod", {"score_mod": None}
    if w.mask is not None:
        yield "without the mask", {"mask": None}
    if isinstance(w.mask, Causal) and w.q_len != w.kv_len:
        other = "causal" if w.mask.bottom_right else "causal-bottom-right"
        yield f"with the other causal alignment ({other})", {"mask": other}
    if w.mask is None:
        yield "with a causal mask that nobody asked for", {"mask": "causal"}


def _mask_mistakes(w: Workload) -> Iterator[tuple[str, MaskMod]]:
    if w.is_packed:
        return
    offset = w.kv_len - w.q_len

    def seen(condition: Callable[..., torch.Tensor]) -> MaskMod:
        def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return condition(b, h, q, kv)

        return mask_mod

    if isinstance(w.mask, Causal):
        shift = offset if w.mask.bottom_right else 0
        yield "with a causal mask that shows one key too many", seen(lambda b, h, q, kv: kv <= q + shift + 1)
        yield "with a causal mask that hides the diagonal", seen(lambda b, h, q, kv: kv < q + shift)
    if isinstance(w.mask, Window):
        left = w.mask.left if w.mask.left is not None else w.kv_len + w.q_len
        right = w.mask.right if w.mask.right is not None else w.kv_len + w.q_len
        for text, lo, hi in (
            ("whose window is one key too long on the left", left + 1, right),
            ("whose window is one key too short on the left", left - 1, right),
            ("whose window is one key too long on the right", left, right + 1),
            ("whose window is one key too short on the right", left, right - 1),
            ("whose left window is ignored", w.kv_len + w.q_len, right),
        ):
            yield text, seen(lambda b, h, q, kv, lo=lo, hi=hi: (kv >= q + offset - lo) & (kv <= q + offset + hi))
    if w.mask is None:
        yield "without the last key", seen(lambda b, h, q, kv: kv < w.kv_len - 1)
        yield "without the first key", seen(lambda b, h, q, kv: kv > 0)
        tail = w.kv_len // 64 * 64
        if tail not in (0, w.kv_len):
            yield f"without the keys of the last part-filled tile (from {tail})", seen(lambda b, h, q, kv: kv < tail)
