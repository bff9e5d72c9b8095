"""The mistakes that attention kernels are known for, each said as the attention that it amounts to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pytest_attn.correctness.descale_mistakes import descale_mistakes
from pytest_attn.correctness.exact import slopes_of
from pytest_attn.correctness.mask_mistakes import mask_mistakes, seen_by
from pytest_attn.correctness.reading_mistakes import reading_mistakes
from pytest_attn.workloads.heads import key_heads
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Causal
from pytest_attn.workloads.workload import Workload, sequence_lengths

if TYPE_CHECKING:
    import torch

    from pytest_attn.workloads.masks import ScoreMod

#: the inputs and the workload of another attention
Other: TypeAlias = "tuple[Inputs, Workload]"


class Mistake(NamedTuple):
    """A likely mistake: a text that continues "attention ...", and what makes the attention that it amounts to."""

    text: str
    attention: Callable[[], Other]


def likely_mistakes(inputs: Inputs, w: Workload) -> Iterator[Mistake]:
    """Yield likely mistakes, of those that amount to the same the plainest first. Their texts depend on the workload alone."""
    for text, changed in descale_mistakes(inputs, w):
        yield Mistake(text, changed)
    for text, changes in _option_mistakes(w):
        yield Mistake(text, partial(_with_options, inputs, w, changes))
    for _, text, mask in mask_mistakes(inputs, w):
        yield Mistake(text, partial(_with_options, inputs, w, {"mask": mask}))
    for text, changed in reading_mistakes(inputs, w):
        yield Mistake(text, changed)
    for text, changed in (*_changed_options(inputs, w), *_misplaced_options(inputs, w)):
        yield Mistake(text, changed)


def _with_options(inputs: Inputs, w: Workload, changes: dict[str, object]) -> Other:
    return inputs, w.replace(**changes)


def _option_mistakes(w: Workload) -> Iterator[tuple[str, dict[str, object]]]:
    scale = w.softmax_scale
    yield "with scale 1: the softmax scale is missing", {"scale": 1.0}
    yield "with the softmax scale applied twice", {"scale": scale * scale}
    yield "with scale * ln 2: exp2 without its factor log2 e", {"scale": scale * math.log(2)}
    yield "with scale * log2 e: exp where exp2 was meant", {"scale": scale / math.log(2)}
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
    if isinstance(w.mask, Causal) and any(q_len != kv_len for q_len, kv_len in sequence_lengths(w)):
        other = "causal" if w.mask.bottom_right else "causal-bottom-right"
        yield f"with the other causal alignment ({other})", {"mask": other}
    if w.mask is None:
        yield "with a causal mask that nobody asked for", {"mask": "causal"}


def _changed_options(inputs: Inputs, w: Workload) -> Iterator[tuple[str, Callable[[], Other]]]:
    """Yield mistakes with the values of bias, sinks and ALiBi's slopes."""

    def with_tensor(name: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Other]:
        return lambda: (_replaced(inputs, name, changed(getattr(inputs, name))), w)

    if w.dropout and inputs.keep is not None:
        yield "without dropout", lambda: (dataclasses.replace(inputs, keep=None), w)
        yield "whose dropout takes True in the keep mask for dropped", with_tensor("keep", lambda keep: ~keep)
        text = "whose dropout does not divide what is left by 1 - dropout"
        yield text, with_tensor("v", lambda v: v.double() * (1 - w.dropout))
        yield "whose dropout divides twice by 1 - dropout", with_tensor("v", lambda v: v.double() / (1 - w.dropout))
    of_key_head = key_heads(w)
    if w.bias:
        yield "whose bias is scaled like the scores", with_tensor("bias", lambda bias: bias.double() * w.softmax_scale)
    if w.bias and "h" in w.bias and w.heads > 1:
        yield "with the bias of the first head for all", with_tensor("bias", lambda bias: bias[:, :1])
    if w.bias and "b" in w.bias and w.batch > 1:
        yield "with the bias of the first batch entry for all", with_tensor("bias", lambda bias: bias[:1])
    if w.sinks:
        yield "whose sinks are scaled like the scores", with_tensor("sinks", lambda sinks: sinks.double() * w.softmax_scale)
        for times in (2, 3, 4, 8):
            text = f"that counts each sink {times} times, as if once for every split of the keys"
            yield text, with_tensor("sinks", partial(_counted, times))
        for dtype in ("bfloat16", "float16"):
            if dtype != (w.out_dtype if w.sinks is True else w.sinks):
                yield f"with sinks rounded to {dtype}", with_tensor("sinks", partial(_rounded, dtype))
    if w.sinks and w.group > 1:
        yield "with the sink of the key head, not of the query head", with_tensor("sinks", lambda sinks: sinks[of_key_head])
    if w.alibi == "batch":
        text = "with ALiBi's slopes of the first batch entry for all"
        yield text, with_tensor("alibi_slopes", lambda slopes: slopes[:1].expand_as(slopes))
    if w.alibi:
        yield "whose ALiBi has the wrong sign", with_tensor("alibi_slopes", lambda slopes: -slopes)
        text = "whose ALiBi slopes are 2 ** (-8 h / heads), not 2 ** (-8 (h + 1) / heads)"
        yield text, with_tensor("alibi_slopes", lambda slopes: slopes * 2 ** (8 / w.heads))
    if w.alibi and w.group > 1:
        yield (
            "with ALiBi's slope of the key head, not of the query head",
            with_tensor("alibi_slopes", lambda s: s[..., of_key_head]),
        )


def _replaced(inputs: Inputs, name: str, tensor: torch.Tensor) -> Inputs:
    changes: dict[str, Any] = {name: tensor}
    return dataclasses.replace(inputs, **changes)


def _counted(times: int, sinks: torch.Tensor) -> torch.Tensor:
    return sinks.double() + math.log(times)


def _rounded(dtype: str, tensor: torch.Tensor) -> torch.Tensor:
    import torch

    rounded: torch.Tensor = tensor.to(getattr(torch, dtype))
    return rounded


def _misplaced_options(inputs: Inputs, w: Workload) -> Iterator[tuple[str, Callable[[], Other]]]:
    """Yield mistakes with the order in which scores are modified, and with what is counted from where."""
    cap, mod = w.softcap, w.score_mod

    def first(step: ScoreMod, **changes: object) -> Callable[[], Other]:
        """Make the workload whose scores go through a step of its own, after softcap, bias and ALiBi, before score_mod."""

        def both(s: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
            s = step(s, *index)
            return s if mod is None else mod(s, *index)

        return lambda: (inputs, w.replace(score_mod=both, **changes))

    if cap is not None:
        text = "whose softcap is not multiplied back: tanh(s / cap)"
        step = _bias_then_capped if w.bias_before_softcap else _capped_after_bias
        yield text, first(step(inputs, w, 1.0), softcap=None, bias=None)
    if cap is not None and w.bias and w.bias_before_softcap:
        text = "with the softcap before the bias, not after"
        yield text, lambda: (inputs, w.replace(bias_before_softcap=False))
    elif cap is not None and w.bias:
        yield "with the softcap after the bias, not before", lambda: (inputs, w.replace(bias_before_softcap=True))
    if cap is not None and w.mask is not None:
        visible = seen_by(inputs, w)
        text = "with the softcap after the mask: hidden scores are -cap, not -inf"
        yield text, first(lambda s, *index: s.where(visible(*index), -cap), mask=None)
    if w.alibi:
        slopes, lengths = inputs.alibi_slopes, [kv_len - q_len for q_len, kv_len in sequence_lengths(w)]
        if any(lengths):
            text = "whose ALiBi counts rows from the first key, not up to the last"
            yield text, first(lambda s, b, h, q, kv: s - _of_heads(slopes, b, h) * (q - kv).abs(), alibi=False)
        text = "whose ALiBi is that of causal attention, which rewards the keys of the future"
        yield text, first(lambda s, b, h, q, kv: s - _of_heads(slopes, b, h) * (q + _at(lengths, b) - kv), alibi=False)
    if mod is not None:
        for tile in (128, 64, 32, 16):
            if w.q_len > tile:
                local = _with_local_rows(mod, tile)
                yield (
                    f"whose score_mod counts rows within tiles of {tile}",
                    partial(_with_options, inputs, w, {"score_mod": local}),
                )


def _capped_after_bias(inputs: Inputs, w: Workload, factor: float) -> ScoreMod:
    """Return the softcap with another factor, and the bias after it."""
    return lambda s, *index: factor * (s / w.softcap).tanh() + _bias_at(inputs, w, index)


def _bias_then_capped(inputs: Inputs, w: Workload, factor: float) -> ScoreMod:
    return lambda s, *index: factor * ((s + _bias_at(inputs, w, index)) / w.softcap).tanh()


def _bias_at(inputs: Inputs, w: Workload, index: tuple[torch.Tensor, ...]) -> torch.Tensor | float:
    if inputs.bias is None or not w.bias:
        return 0.0
    return inputs.bias.expand(w.batch, w.heads, w.q_len, w.kv_len)[index].double()


def _of_heads(slopes: torch.Tensor | None, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    assert slopes is not None
    return slopes_of(slopes.to(h.device).double(), b, h)


def _at(lengths: list[int], b: torch.Tensor) -> torch.Tensor:
    return b.new_tensor(lengths)[b]


def _with_local_rows(mod: ScoreMod, tile: int) -> ScoreMod:
    return lambda s, b, h, q, kv: mod(s, b, h, q % tile, kv)
