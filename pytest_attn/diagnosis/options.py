"""Options that a kernel ignores, misreads, or applies in the wrong place, each as the attention to which that amounts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from pytest_attn.correctness.exact import slopes_of
from pytest_attn.diagnosis.hypothesis import AttentionFault, Other, of_tensors, of_workload
from pytest_attn.diagnosis.masks import seen_by
from pytest_attn.workloads.heads import key_heads
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import ScoreMod
from pytest_attn.workloads.workload import Workload, sequence_lengths


def ignored_options(w: Workload) -> Iterator[AttentionFault]:
    """Yield options that are ignored, and other scales."""
    for fault, words, changes in _ignored(w):
        yield AttentionFault(fault, words, of_workload(w, **changes))


def _ignored(w: Workload) -> Iterator[tuple[str, str, dict[str, object]]]:
    scale = w.softmax_scale
    yield "scale-missing", "with scale 1: the softmax scale is missing", {"scale": 1.0}
    yield "scale-applied-twice", "with the softmax scale applied twice", {"scale": scale * scale}
    yield "log2e-missing", "with scale * ln 2: exp2 without its factor log2 e", {"scale": scale * math.log(2)}
    yield "log2e-not-meant", "with scale * log2 e: exp where exp2 was meant", {"scale": scale / math.log(2)}
    if w.scale is not None:
        words = "with scale 1 / sqrt(head_dim): the option scale is ignored"
        yield "scale-option-ignored", words, {"scale": None}
    if w.softcap is not None:
        yield "softcap-ignored", "without softcap", {"softcap": None}
    if w.alibi:
        yield "alibi-ignored", "without ALiBi", {"alibi": False}
    if w.sinks:
        yield "sinks-ignored", "without sinks", {"sinks": False}
    if w.bias:
        yield "bias-ignored", "without the bias", {"bias": None}
    if w.score_mod:
        yield "score-mod-ignored", "without score_mod", {"score_mod": None}
    if w.mask is not None:
        yield "mask-ignored", "without the mask", {"mask": None}
    if w.mask is None:
        yield "causal-not-asked-for", "with a causal mask that nobody asked for", {"mask": "causal"}


# -- their values ----------------------------------------------------------------------------------------------------------


def misread_options(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield other values of dropout's mask, the bias, sinks and ALiBi's slopes. drawn: as that of `attention_faults`."""
    if w.dropout and drawn.keep is not None:
        yield AttentionFault("dropout-ignored", "without dropout", of_tensors(w, lambda i: {"keep": None}))
        words = "whose dropout takes True in the keep mask for dropped"
        yield AttentionFault("keep-mask-inverted", words, _with(w, "keep", lambda keep: ~keep))
        words = "whose dropout does not divide what is left by 1 - dropout"
        yield AttentionFault("dropout-not-rescaled", words, _with(w, "v", lambda v: v.double() * (1 - w.dropout)))
        words = "whose dropout divides twice by 1 - dropout"
        yield AttentionFault("dropout-rescaled-twice", words, _with(w, "v", lambda v: v.double() / (1 - w.dropout)))
    if w.bias:
        words = "whose bias is scaled like the scores"
        yield AttentionFault("bias-scaled", words, _with(w, "bias", lambda bias: bias.double() * w.softmax_scale))
    if w.bias and "h" in w.bias and w.heads > 1:
        words = "with the bias of the first head for all"
        yield AttentionFault("bias-of-first-head", words, _with(w, "bias", lambda bias: bias[:, :1]))
    if w.bias and "b" in w.bias and w.batch > 1:
        words = "with the bias of the first batch entry for all"
        yield AttentionFault("bias-of-first-batch-entry", words, _with(w, "bias", lambda bias: bias[:1]))
    yield from _misread_sinks(w)
    yield from _misread_slopes(w)


def _with(w: Workload, name: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Other]:
    return of_tensors(w, lambda inputs: {name: changed(getattr(inputs, name))})


def _misread_sinks(w: Workload) -> Iterator[AttentionFault]:
    if not w.sinks:
        return
    words = "whose sinks are scaled like the scores"
    yield AttentionFault("sinks-scaled", words, _with(w, "sinks", lambda sinks: sinks.double() * w.softmax_scale))
    for times in (2, 3, 4, 8):
        words = f"that counts each sink {times} times, as if once for every split of the keys"
        yield AttentionFault("sink-in-every-split", words, _with(w, "sinks", partial(_counted, times)))
    for dtype in ("bfloat16", "float16"):
        if dtype != (w.out_dtype if w.sinks is True else w.sinks):
            words = f"with sinks rounded to {dtype}"
            yield AttentionFault("sinks-rounded", words, _with(w, "sinks", partial(_rounded, getattr(torch, dtype))))
    if w.group > 1:
        of_key_head = key_heads(w)
        words = "with the sink of the key head, not of the query head"
        yield AttentionFault("sink-of-key-head", words, _with(w, "sinks", lambda sinks: sinks[of_key_head]))


def _counted(times: int, sinks: torch.Tensor) -> torch.Tensor:
    return sinks.double() + math.log(times)


def _rounded(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype)


def _misread_slopes(w: Workload) -> Iterator[AttentionFault]:
    if not w.alibi:
        return
    if w.alibi == "batch":
        words = "with ALiBi's slopes of the first batch entry for all"
        of_first = _with(w, "alibi_slopes", lambda slopes: slopes[:1].expand_as(slopes))
        yield AttentionFault("alibi-slopes-of-first-batch-entry", words, of_first)
    words = "whose ALiBi has the wrong sign"
    yield AttentionFault("alibi-sign-flipped", words, _with(w, "alibi_slopes", lambda slopes: -slopes))
    words = "whose ALiBi slopes are 2 ** (-8 h / heads), not 2 ** (-8 (h + 1) / heads)"
    of_next = _with(w, "alibi_slopes", lambda slopes: slopes * 2 ** (8 / w.heads))
    yield AttentionFault("alibi-slope-of-next-power", words, of_next)
    if w.group > 1:
        of_key_head = key_heads(w)
        words = "with ALiBi's slope of the key head, not of the query head"
        yield AttentionFault("alibi-slope-of-key-head", words, _with(w, "alibi_slopes", lambda s: s[..., of_key_head]))


# -- their places ----------------------------------------------------------------------------------------------------------


def misplaced_options(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield another order in which scores are modified, and rows that are counted from elsewhere."""
    yield from _misplaced_softcap(w, drawn)
    if w.alibi:
        lengths = [kv_len - q_len for q_len, kv_len in sequence_lengths(w)]
        if any(lengths):
            words = "whose ALiBi counts rows from the first key, not up to the last"
            yield AttentionFault("alibi-from-first-key", words, partial(_with_alibi, w, _from_first_key))
        words = "whose ALiBi is that of causal attention, which rewards the keys of the future"
        yield AttentionFault("alibi-one-sided", words, partial(_with_alibi, w, partial(_one_sided, lengths)))
    if w.score_mod is not None:
        for tile in (128, 64, 32, 16):
            if w.q_len > tile:
                words = f"whose score_mod counts rows within tiles of {tile}"
                local = of_workload(w, score_mod=_with_local_rows(w.score_mod, tile))
                yield AttentionFault("score-mod-rows-within-tile", words, local)


def _misplaced_softcap(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    cap = w.softcap
    if cap is None:
        return
    words = "whose softcap is not multiplied back: tanh(s / cap)"
    yield AttentionFault("softcap-not-multiplied-back", words, partial(_with_softcap_as_factor_1, w))
    if w.bias and w.bias_before_softcap:
        words = "with the softcap before the bias, not after"
        yield AttentionFault("softcap-before-bias", words, of_workload(w, bias_before_softcap=False))
    elif w.bias:
        words = "with the softcap after the bias, not before"
        yield AttentionFault("softcap-after-bias", words, of_workload(w, bias_before_softcap=True))
    if w.mask is not None:
        visible = seen_by(drawn, w)
        words = "with the softcap after the mask: hidden scores are -cap, not -inf"
        after = _first(w, lambda s, *index: s.where(visible(*index), -cap))
        yield AttentionFault("softcap-after-mask", words, of_workload(w, mask=None, score_mod=after))


def _first(w: Workload, step: ScoreMod) -> ScoreMod:
    """Return what modifies scores by a step, after softcap, bias and ALiBi, and then by the workload's score_mod."""
    mod = w.score_mod

    def both(s: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        s = step(s, *index)
        return s if mod is None else mod(s, *index)

    return both


def _with_softcap_as_factor_1(w: Workload, inputs: Inputs) -> Other:
    cap = w.softcap
    assert cap is not None

    def bias(index: tuple[torch.Tensor, ...]) -> torch.Tensor | float:
        if inputs.bias is None or not w.bias:
            return 0.0
        return inputs.bias.expand(w.batch, w.heads, w.q_len, w.kv_len)[index].double()

    def capped(s: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        if w.bias_before_softcap:
            return ((s + bias(index)) / cap).tanh()
        return (s / cap).tanh() + bias(index)

    return inputs, w.replace(score_mod=_first(w, capped), softcap=None, bias=None)


def _with_alibi(w: Workload, distance: Callable[..., torch.Tensor], inputs: Inputs) -> Other:
    """Return attention whose ALiBi takes other distances, of (b, q, kv)."""
    slopes = inputs.alibi_slopes
    assert slopes is not None

    def biased(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return s - slopes_of(slopes.to(h.device).double(), b, h) * distance(b, q, kv)

    return inputs, w.replace(score_mod=_first(w, biased), alibi=False)


def _from_first_key(b: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q - kv).abs()


def _one_sided(lengths: list[int], b: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return q + b.new_tensor(lengths)[b] - kv


def _with_local_rows(mod: ScoreMod, tile: int) -> ScoreMod:
    return lambda s, b, h, q, kv: mod(s, b, h, q % tile, kv)
