"""Which hints are right, fault by fault, and faults beside the mutants, for diagnosis.py.

A hint is right where it says what the kernel does wrong, in the words of the fault or of what it amounts to on that workload.
What is only counted or observed (NaN, zeros, calls that differ) asserts no cause: it is no hint, unless the fault's own entry
lists it. Faults that are not listed have no right hint: whatever is asserted of them is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pytest_attn.workloads.workload import Workload

#: observations, which are true of any fault
OBSERVED = (
    r"holds [\d,]+ NaN|is all zeros|is 0 in all of these rows|equal calls return different|sees no key at all: \w+ must be"
)

_STRIDES = r"contiguous tensors give the right result"
_CALLS = r"equal calls return different"
_NO_KEY = r"sees no key at all"
_TAIL = r"last part-filled tile|without the last (tile|key)|last tile of \d+ keys that a row sees"
_LENGTH = r"ignores kv_lens|length of the first batch entry"
_FROM = r"wrong from element [\d,]+ \(2\^\d+\)"

#: regular expressions of right hints, by mutant
RIGHT = {
    # masks
    "right-edge-one-key-late": r"one key too (many|long on the right)",
    "right-edge-one-key-early": r"hides the diagonal|one key too short on the right",
    "left-edge-one-key-early": r"one key too long on the left",
    "left-edge-one-key-late": r"one key too short on the left",
    "bottom-right-taken-for-top-left": r"other causal alignment|aligned to the first key|as the longest one",
    "top-left-taken-for-bottom-right": r"other causal alignment",
    "rows-counted-within-their-tile": r"counts rows within tiles of 64",
    "mask-on-last-tile-only": r"masks the last tile of \d+ keys only",
    "window-right-edge-open": r"right window is ignored|without the mask",
    "window-first-tile-skipped": r"tile of \d+ keys in which the window begins",
    "last-key-tile-missing": _TAIL,
    "tail-keys-counted": r"counts the zeros which fill up the last tile",
    "tile-of-one-key-lost": _TAIL,
    "mask-inverted": r"mask inverted",
    "mask-dropped": r"without the mask",
    "mask-of-key-head": r"mask of the key head",
    "document-begins-one-token-late": r"documents begin one token late",
    "documents-not-separated": r"documents see each other",
    "neighborhood-one-token-larger": r"one token larger along axis",
    "empty-row-is-nan": _NO_KEY,
    "empty-row-averages-values": _NO_KEY + ".*mean of v",
    "blind-tile-is-nan": r"no key in the first tile of (64|\d+) keys that is visited",
    # lengths
    "kv-length-ignored": _LENGTH,
    "newest-key-not-seen": r"newest key is not seen|without the last key",
    "length-of-first-sequence": _LENGTH,
    "queries-offsets-for-keys": r"cumulated lengths of the queries",
    "keys-begin-one-token-late": r"from their second key to the first of the next",
    "key-offset-with-queries-heads": r"stride of the queries",
    "sequences-not-separated": r"packed sequences see each other",
    "tail-reads-next-sequence": r"see the next one's keys",
    "alignment-of-longest-sequence": r"as the longest one|aligned to the first key|other causal alignment",
    "last-page-skipped": r"last part-filled tile|last page where it is not full",
    "pages-of-first-sequence": r"pages of the first sequence",
    "pages-taken-in-order": r"pages to follow each other",
    "page-table-without-its-stride": r"by the pages in use",
    "page-of-another-size": r"twice as long",
    "no-keys-is-nan": _NO_KEY,
    "sequence-without-queries-shifts-keys": r"leaves sequences without queries out",
    "remainder-of-split-lost": _TAIL,
    # heads
    "groups-interleaved": r"interleaved groups",
    "group-taken-for-number-of-key-heads": r"h // kv_heads",
    "group-rounded-to-power-of-two": r"rounded up to a power of two",
    "groups-ignored": r"key head h, as far",
    "last-odd-head-lost": r"is 0 in all of these rows",
    "head-dim-tail-not-read": r"q \. k over the first|uniform probabilities",
    "values-read-with-keys-head-dim": r"rows of v head_dim apart",
    "keys-of-first-batch-entry": r"keys of the first batch entry",
    "sink-of-key-head": r"sink of the key head",
    "alibi-slope-of-key-head": r"slope of the key head",
    "bias-of-first-head": r"bias of the first head",
    # options
    "scale-ignored": r"option scale is ignored",
    "scale-hard-coded": r"with scale 0\.125|softmax scale|option scale",
    "scale-dropped": r"softmax scale is missing",
    "scale-applied-twice": r"softmax scale applied twice",
    "scale-with-log2e": r"scale \* log2 e",
    "causal-ignored": r"without the mask",
    "window-ignored": r"left window is ignored|without the mask",
    "softcap-ignored": r"without softcap",
    "softcap-not-multiplied-back": r"not multiplied back",
    "softcap-after-mask": r"softcap after the mask",
    "softcap-after-bias": r"softcap after the bias",
    "bias-ignored": r"without the bias",
    "bias-scaled": r"bias is scaled",
    "alibi-sign": r"ALiBi has the wrong sign",
    "alibi-slope-of-next-power": r"slopes are 2 \*\* \(-8 h / heads\)",
    "alibi-from-first-key": r"ALiBi counts rows from the first key",
    "alibi-one-sided": r"ALiBi is that of causal attention",
    "sink-ignored": r"without sinks",
    "sink-scaled": r"sinks are scaled",
    "sink-counted-in-every-split": r"counts each sink 2 times",
    "score-mod-with-tile-rows": r"score_mod counts rows within tiles of 64",
    # lse
    "lse-in-base-2": r"it is in base 2",
    "lse-without-maximum": r"maximum is not added",
    "lse-off-by-ln-2": r"ln 2 too large",
    "lse-without-sink": r"lse is that of attention without sinks",
    "lse-without-last-tile": r"lse is that of attention .*(" + _TAIL + r")",
    "lse-in-the-tensors-dtype": r"rounded to (bfloat16|float16)",
    "lse-of-empty-row-is-nan": _NO_KEY,
    "sum-not-rescaled": r"sum of P v is not brought to a new maximum",
    "denominator-not-rescaled": r"denominator is not brought to a new maximum",
    "rescaled-inversely": r"inverse of the factor",
    "merge-in-base-2": r"as if it were one of base 2",
    "merge-without-weights": r"averages the results of 2 splits",
    "merge-of-empty-splits-is-nan": _NO_KEY,
    # magnitude
    "no-maximum-subtracted": r"lse beyond 88",
    "maximum-taken-for-10": r"lse beyond 88",
    "scores-in-float16": r"precision profile 'eager'",  # which says that scores are rounded
    "exponent-in-the-tensors-dtype": r"precision profile 'eager'",
    "products-in-tf32": r"precision profile 'tf32'",
    "p-from-exponential-of-lse": r"lse (beyond|below)",
    "tail-not-masked-again": r"exp\(-lse\) overflows",
    # overflow
    "query-offset-wraps": _FROM,
    "out-offset-wraps": _FROM,
    "gradient-offset-wraps": _FROM,
    "key-position-wraps": r"key positions wrap round",
    "grid-too-large": _CALLS,  # memory that this call did not write
    # memory and state
    "last-row-tile-unwritten": _CALLS,
    "empty-rows-unwritten": _NO_KEY,
    "gradient-of-padding-unwritten": _CALLS,
    "lse-unwritten": _CALLS,
    "split-merged-before-it-is-written": _CALLS,
    "share-of-out-lost": _CALLS,
    "values-of-previous-tile": _CALLS,
    "share-of-dk-lost": _CALLS,
    "delta-read-before-it-is-written": _CALLS,
    "result-kept-by-address": _CALLS + "|its result was right|the same call was right",
    "gradient-sums-not-cleared": _CALLS,
    "out-buffer-reused": r"has changed while others were computed",
    # layout
    **dict.fromkeys(
        (
            "strides-of-first-call",
            "q-assumed-contiguous",
            "v-read-with-strides-of-k",
            "out-written-with-strides-of-q",
            "head-stride-from-batch-stride",
            "storage-offset-ignored",
            "expanded-read-as-contiguous",
            "innermost-stride-ignored",
            "keys-read-again-with-strides-of-q",
            "dout-assumed-contiguous",
            "dq-written-with-strides-of-q",
        ),
        _STRIDES,
    ),
    "keys-centred-in-place": r"changed its input",
    "keys-transposed-where-square": r"heads and rows of k swapped",
    "out-transposed-where-square": r"heads and rows swapped",
    # gradients
    "delta-missing": r"without D",
    "delta-of-next-head": r"D of the next head",
    "lse-of-first-batch-entry": r"lse of the first batch entry",
    "null-lse": r"without lse",
    "lse-without-sink-again": r"without the sink's share of lse",
    "scale-missing-in-dk": r"softmax_scale is missing",
    "dq-scaled-twice": r"softmax_scale was applied twice",
    "group-overwritten": r"only the last query head of each group",
    "group-summed-interleaved": r"key head h % kv_heads",
    "row-tiles-overwrite-dk": r"only the last tile of \d+ rows",
    "mask-missing-in-backward": r"computes P again (without the mask|that masks nothing|whose (left|right) window is ignored)",
    "always-causal-in-backward": r"causal mask that nobody asked for",
    "aligned-top-left-in-backward": r"other causal alignment|aligned to the first key|as the longest one",
    "last-key-tile-missing-in-backward": _TAIL,
    "kv-length-ignored-in-backward": _LENGTH,
    "bias-missing-in-backward": r"computes P again without (the bias|ALiBi)",
    "softcap-slope-missing": r"without softcap's derivative",
    "softcap-slope-of-capped-score": r"derivative at the capped score",
    "score-mod-slope-missing": r"without score_mod's derivative",
    "empty-row-is-nan-in-backward": _NO_KEY,
}


class Fault(NamedTuple):
    """A faulty kernel that is no mutant: (q, k, v) -> out, or (out, lse). right: a regular expression of right hints."""

    name: str
    kernel: Callable[..., object]
    workload: Workload
    right: str
    backward: bool = False
    returns_lse: bool = False


FULL = Workload(160, heads=2, name="full")
GROUPED = Workload(96, heads=4, kv_heads=2, batch=2, head_dim=32, name="grouped")
CAUSAL = Workload(160, heads=2, mask="causal", name="causal")
CHUNK = Workload(48, 160, heads=2, mask="causal-bottom-right", name="chunk")
EMPTY = Workload(128, 64, heads=2, mask="causal-bottom-right", name="empty-rows")
SINGLE = Workload(160, heads=2, dtype="float32", name="single")
SQUARE = Workload(16, heads=16, batch=2, head_dim=32, name="square")


def _attention(q, k, v, seen=None, *, scale=None, base_2=False):
    """Attention in float32, and its lse."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1).float() for t in (k, v))
    score = q.float() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    score = score if seen is None else score.masked_fill(~seen, -math.inf)
    lse = score.logsumexp(-1)
    return (score.softmax(-1) @ v).to(q.dtype), lse / math.log(2) if base_2 else lse


def _seen(q, k, shift):
    rows, keys = q.shape[2], k.shape[2]
    return torch.arange(keys) <= torch.arange(rows)[:, None] + shift


def _rope(x, half):
    angle = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    one, other = x.float().chunk(2, -1) if half else (x.float()[..., ::2], x.float()[..., 1::2])
    turned = one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()
    return (torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)).to(x.dtype)


def _zero_padded(q, k, v):
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, -t.shape[2] % 64)) for t in (k, v))
    return sdpa(q, k, v)


def _partial_block_lost(q, k, v):
    keys = k.shape[2] // 64 * 64
    return _attention(q, k[:, :, :keys], v[:, :, :keys], _seen(q, k, 0)[:, :keys])[0]


def _mean_of_v(q, k, v):
    score = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).masked_fill(~_seen(q, k, k.shape[2] - q.shape[2]), -1e30)
    return (score.softmax(-1) @ v.float()).to(q.dtype)


def _new_tokens_only(q, k, v):
    n = q.shape[2]
    return sdpa(q, k[:, :, -n:], v[:, :, -n:], is_causal=True)


def _tf32(x):
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _low_accumulator(q, k, v):
    score = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    p, acc = (score - score.amax(-1, keepdim=True)).exp(), torch.zeros_like(q)
    for at in range(0, k.shape[2], 16):
        acc = acc + (p[..., at : at + 16].to(q.dtype) @ v[:, :, at : at + 16])
    return (acc.float() / p.sum(-1, keepdim=True)).to(q.dtype)


def _with_gradients(changed):
    """Return attention whose gradients are what `changed` makes of (q, k, v, dout, dq, dk, dv)."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return _attention(q, k, v)[0]

        @staticmethod
        def backward(ctx, dout):
            with torch.enable_grad():
                leaves = [t.detach().float().requires_grad_() for t in ctx.saved_tensors]
                gradients = torch.autograd.grad(_attention(*leaves)[0], leaves, dout.float())
            made = changed(*ctx.saved_tensors, dout, *gradients)
            return tuple(g.to(t.dtype) for g, t in zip(made, ctx.saved_tensors, strict=True))

    return Changed.apply


def _dv_unnormalized(q, k, v, dout, dq, dk, _):
    score = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    return dq, dk, (score - score.amax(-1, keepdim=True)).exp().mT @ dout.float()


FAULTS = (
    Fault("dropout left on", lambda q, k, v: sdpa(q, k, v, dropout_p=0.2), FULL, _CALLS),
    Fault(
        "causal mask without its diagonal",
        lambda q, k, v: _attention(q, k, v, _seen(q, k, -1))[0].nan_to_num(),
        CAUSAL,
        "diagonal",
    ),
    Fault("last partial block of keys lost, causal", _partial_block_lost, CAUSAL, _TAIL),
    Fault("zero-padded keys not masked", _zero_padded, FULL, "counts the zeros"),
    Fault("keys before the new tokens unread", _new_tokens_only, CHUNK, "keys before the new tokens"),
    Fault("mean of v for empty rows", _mean_of_v, EMPTY, "mean of v"),
    Fault("products in tf32", lambda q, k, v: _attention(_tf32(q), _tf32(k), _tf32(v))[0], SINGLE, "'tf32'"),
    Fault("RoPE inside, half-split", lambda q, k, v: sdpa(_rope(q, True), _rope(k, True), v), FULL, "RoPE inside.*half-split"),
    Fault(
        "RoPE inside, interleaved", lambda q, k, v: sdpa(_rope(q, False), _rope(k, False), v), FULL, "RoPE inside.*interleaved"
    ),
    Fault("v taken from k", lambda q, k, v: sdpa(q, k, k), FULL, "k in place of v"),
    Fault("k taken from v", lambda q, k, v: sdpa(q, v, v), FULL, "v in place of k"),
    Fault("bf16 accumulator", _low_accumulator, FULL.replace(q_len=1024), "nothing"),
    Fault("batch entries swapped", lambda q, k, v: sdpa(q, k.flip(0), v.flip(0), enable_gqa=True), GROUPED, "batch entr"),
    Fault(
        "out of the other batch entry",
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True).flip(0),
        GROUPED,
        "batch entries are swapped",
    ),
    Fault("next key head", lambda q, k, v: sdpa(q, k.roll(1, 1), v.roll(1, 1), enable_gqa=True), GROUPED, "next key head"),
    Fault("lse in base 2", lambda q, k, v: _attention(q, k, v, base_2=True), FULL, "base 2", returns_lse=True),
    Fault(
        "lse of unscaled scores",
        lambda q, k, v: (_attention(q, k, v)[0], _attention(q, k, v, scale=1.0)[1]),
        FULL,
        "lse is that of attention with scale 1",
        returns_lse=True,
    ),
    Fault(
        "lse as (batch, rows, heads)",
        lambda q, k, v: (_attention(q, k, v)[0], _attention(q, k, v)[1].mT.contiguous()),
        SQUARE,
        r"lies in memory as \(batch, rows, heads\)",
        returns_lse=True,
    ),
    Fault(
        "dk and dv swapped", _with_gradients(lambda q, k, v, do, dq, dk, dv: (dq, dv, dk)), FULL, "dk holds dv", backward=True
    ),
    Fault(
        "dv of P without its denominator", _with_gradients(_dv_unnormalized), FULL, "without its denominator", backward=True
    ),
    Fault(
        "dq with a flipped sign", _with_gradients(lambda q, k, v, do, dq, dk, dv: (-dq, dk, dv)), FULL, "sign", backward=True
    ),
    Fault(
        "dk not scaled",
        _with_gradients(lambda q, k, v, do, dq, dk, dv: (dq, dk * 8, dv)),
        FULL,
        "softmax_scale is missing",
        backward=True,
    ),
)
