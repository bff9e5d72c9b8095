"""Kernels with a planted fault that is none of the mutants', and by which identities a diagnosis may name it.

For tests/diagnosis and benchmarks/diagnosis.py.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from judging import CROSS, FULL, explicit, positions, with_gradients, with_lse
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pytest_attn import Pages, Window, Workload, draw_inputs
from pytest_attn.diagnosis.faults import EMPTY_ROWS, TAIL_MISSING
from pytest_attn.guests.mutants.kernel import Kernel, KernelBackend

PARTLY = Workload(160, heads=2)
PARTLY_CAUSAL = Workload(160, heads=2, mask="causal")
CHUNK = Workload(48, 160, heads=2, mask="causal-bottom-right")
GROUPED = Workload(96, heads=4, kv_heads=2, batch=2, head_dim=32)
SQUARE = Workload(16, heads=16, batch=2, head_dim=32)
SLOPED = FULL.replace(heads=4, alibi=True)
BIASED, SUNK = FULL.replace(bias="hqk"), FULL.replace(sinks=True)
SPLIT = Workload(4, 192, heads=2, kv_lens=(77,))
WINDOW = Workload(128, heads=2, mask=Window(15, 15))
THREE = Workload(64, heads=2, batch=3)
PERIODIC, TWICE = ("keys-missing-with-a-period",), ("keys-counted-twice",)
IN_PAGES = Workload(3, 112, batch=3, heads=2, kv_pages=Pages(16), kv_lens=(112, 40, 33))
OF_ANOTHER = ("pages-of-another-sequence",)
LONG = Workload(64, 512, heads=2)
PADDED = Workload(64, heads=2, kv_lens=(64, 40))
FLOAT32 = PARTLY.replace(dtype="float32")


class Planted(NamedTuple):
    """A faulty kernel: (q, k, v) -> out, or (out, lse), or a backend. faults: identities of right hints, if any."""

    name: str
    kernel: Callable[..., object] | KernelBackend
    workload: Workload
    faults: tuple[str, ...] = ()
    backward: bool = False
    returns_lse: bool = False


def _rope(x, style):
    angle = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    one, other = x.float().chunk(2, -1) if style == "half-split" else (x.float()[..., ::2], x.float()[..., 1::2])
    turned = one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()
    return (torch.cat(turned, -1) if style == "half-split" else torch.stack(turned, -1).flatten(-2)).to(x.dtype)


def _rotated(style):
    return lambda q, k, v: sdpa(_rope(q, style), _rope(k, style), v)


def _tf32(x):
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _without_last_part(q, k, v):
    rows, keys = positions(q.shape[2], k.shape[2])
    return explicit(q, k, v, mask=(keys <= rows) & (keys < k.shape[2] // 64 * 64))


def _with_alibi(factor, order=(0, 1, 2, 3)):
    """Return attention with ALiBi of four heads, times a factor, with the slopes in an order."""

    def kernel(q, k, v):
        slopes = factor * 2.0 ** (-2 * (torch.tensor(order) + 1))
        far = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs()
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5 - slopes[:, None, None] * far
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    return kernel


def summed_in_the_dtype(q, k, v, step=16):
    score = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    p, acc = (score - score.amax(-1, keepdim=True)).exp(), torch.zeros_like(q)
    for at in range(0, k.shape[2], step):
        acc = acc + (p[..., at : at + step].to(q.dtype) @ v[:, :, at : at + step])
    return (acc.float() / p.sum(-1, keepdim=True)).to(q.dtype)


def _read_wrapped(x, reach=1 << 15):
    return x.flatten()[torch.arange(x.numel()) % reach].view(x.shape)


def _merged_by_the_first_row(q, k, v):
    halves = [q.float() @ part.float().mT * q.shape[-1] ** -0.5 for part in k.chunk(2, 2)]
    weights = torch.stack([score.logsumexp(-1, keepdim=True)[:, :, :1] for score in halves]).softmax(0)
    outs = [score.softmax(-1) @ part.float() for score, part in zip(halves, v.chunk(2, 2), strict=True)]
    return (weights * torch.stack(outs)).sum(0).to(q.dtype)


def _computed_in(dtype, factor, q, k, v):
    return sdpa(*(t.to(dtype) for t in (q, k, v))).mul(factor).float()


def _with_scores_in_float16(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).half().float().softmax(-1) @ v


class _NextSink(Kernel):
    """The sink of the next head is taken."""

    def sinks(self, seq):
        sinks = super().sinks(seq)
        return None if sinks is None else sinks.roll(-1)


def _with_gradients(changed):
    """Return attention whose gradients are what `changed` makes of (dq, dk, dv)."""
    return with_gradients(lambda gradients, dout: changed(*gradients(dout)), explicit)


class _WithoutDenominator(torch.autograd.Function):
    """Attention whose dv takes P without its denominator."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return explicit(q, k, v)

    @staticmethod
    def backward(ctx, dout):
        q, k, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            dq, dk, _ = torch.autograd.grad(explicit(q, k, v), (q, k, v), dout)
        score = q.detach().float() @ k.detach().float().mT * q.shape[-1] ** -0.5
        return dq, dk, ((score - score.amax(-1, keepdim=True)).exp().mT @ dout.float()).to(v.dtype)


def _with_slope_of_cap(slope, cap=5.0):
    """Return attention with softcap, whose derivative is what `slope` makes of tanh(s / cap)."""

    class Capped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, s):
            tanh = (s / cap).tanh()
            ctx.save_for_backward(tanh)
            return tanh * cap

        @staticmethod
        def backward(ctx, ds):
            return ds * slope(*ctx.saved_tensors)

    def kernel(q, k, v):
        return (Capped.apply(q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1) @ v.float()).to(q.dtype)

    return kernel


def _losing_adds():
    """Return gradients that lose what one tile of keys adds to one row of dq: a quarter, of another row each time."""

    calls = itertools.count()

    def changed(dq, dk, dv):
        dq[:, :, next(calls) % dq.shape[2]] *= 0.75
        return dq, dk, dv

    return changed


def _scored(change):
    """Return attention whose scores, in float32, are what `change` makes of them and of rows and keys."""

    def kernel(q, k, v):
        score = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        return (change(score, *positions(q.shape[2], k.shape[2])).softmax(-1).nan_to_num() @ v.float()).to(q.dtype)

    return kernel


def _within(left, right):
    return _scored(lambda s, rows, keys: s.masked_fill((keys < rows - left) | (keys > rows + right), -math.inf))


def _at_keys(chosen):
    """Return attention to some keys: `chosen` makes their positions of how many there are, some of them twice."""
    return lambda q, k, v: sdpa(q, k[:, :, chosen(k.shape[2])], v[:, :, chosen(k.shape[2])])


def _viewed(x):
    return x.transpose(1, 2).contiguous().view(x.shape)


def _slopes_of_paper(s, rows, keys):
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])
    return s - slopes[:, None, None] * (rows - keys).abs()


def _paged(changed):
    """Return attention over pages of 16 by what `changed` makes of the page table and the lengths."""
    inputs = draw_inputs(IN_PAGES)
    table, lens = changed(inputs.page_table, inputs.kv_lens)

    def kernel(q, k, v):
        k, v = (pool[table.long()].flatten(1, 2).transpose(1, 2) for pool in (k, v))
        return explicit(q, k, v, mask=torch.arange(k.shape[2]) < lens.view(-1, 1, 1, 1))

    return kernel


def _hiding_padding(side, low):
    lens = torch.tensor(PADDED.kv_lens).view(-1, 1, 1, 1)
    return _scored(lambda s, rows, keys: s.where(keys < lens if side == "right" else keys >= PADDED.kv_len - lens, low))


OF_OUT = (
    Planted("mask added", _scored(lambda s, rows, keys: s + (keys <= rows)), PARTLY_CAUSAL, ("mask-added",)),
    Planted(
        "hidden is 0", _scored(lambda s, rows, keys: s.where(keys <= rows, 0.0)), PARTLY_CAUSAL, ("hidden-scores-finite",)
    ),
    Planted(
        "full tiles",
        _scored(lambda s, rows, keys: s.masked_fill((keys > rows) | (keys // 32 < rows // 32), -math.inf)),
        PARTLY_CAUSAL,
        ("full-tiles-missing",),
    ),
    Planted("half of each step", _at_keys(lambda n: torch.arange(n).view(-1, 64)[:, :32].flatten()), LONG, PERIODIC),
    Planted("a period", _at_keys(lambda n: torch.arange(n)[torch.arange(n) % 7 != 3]), PARTLY, PERIODIC),
    Planted("last chunk twice", _at_keys(lambda n: torch.cat([torch.arange(n), torch.arange(n - 64, n)])), LONG, TWICE),
    Planted("keys from 100 on", _at_keys(lambda n: torch.arange(100)), PARTLY, ("keys-beyond-unseen",)),
    Planted("window, both short", _within(14, 14), WINDOW, ("window-both-one-too-short",)),
    Planted("window, both long", _within(16, 16), WINDOW, ("window-both-one-too-long",)),
    Planted("window, left alone", _within(15, 0), WINDOW, ("window-left-only",)),
    Planted("window, halved", _within(7, 7), WINDOW, ("window-halved",)),
    Planted("window on both sides", _within(15, 15), Workload(96, mask=Window(15, 0)), ("window-both-sided",)),
    Planted("sign of alignment", _within(math.inf, -64), CROSS, ("alignment-sign-flipped",)),
    Planted("entries exchanged", lambda q, k, v: sdpa(q, k[[1, 0, 2]], v[[1, 0, 2]]), THREE, ("batch-entries-exchanged",)),
    Planted("out exchanged", lambda q, k, v: sdpa(q, k, v)[[1, 0, 2]], THREE, ("batch-entries-shifted",)),
    Planted("v viewed", lambda q, k, v: sdpa(q, k, _viewed(v)), PARTLY, ("v-viewed-not-transposed",)),
    Planted("k viewed", lambda q, k, v: sdpa(q, _viewed(k), v), PARTLY, ("k-viewed-not-transposed",)),
    Planted("out viewed", lambda q, k, v: _viewed(sdpa(q, k, v)), PARTLY, ("out-viewed-not-transposed",)),
    Planted(
        "one key of padding",
        _scored(lambda s, rows, keys: s.masked_fill(keys > torch.tensor([64, 20]).view(2, 1, 1, 1), -math.inf)),
        Workload(64, heads=2, kv_lens=(64, 20)),
        ("one-key-beyond-length",),
    ),
    *(
        Planted(f"padding on the {pad}", _hiding_padding(pad, -math.inf), padded, ("padding-on-other-side",))
        for pad, padded in (("right", PADDED.replace(pad="left")), ("left", PADDED))
    ),
    Planted("padding is -1", _hiding_padding("left", -1.0), PADDED.replace(pad="left"), ("hidden-scores-finite",)),
    Planted(
        "softcap before the scale",
        _scored(lambda s, rows, keys: (s * 8 / 5).tanh() * 5 / 8),
        FULL.replace(softcap=5.0),
        ("softcap-before-scale",),
    ),
    Planted("slopes of the paper", _scored(_slopes_of_paper), FULL.replace(heads=6, alibi=True), ("alibi-slopes-of-paper",)),
    Planted("pages of the next sequence", _paged(lambda table, lens: (table.roll(-1, 0), lens)), IN_PAGES, OF_ANOTHER),
    Planted(
        "padding of pages", _paged(lambda table, lens: (table, (lens + 15) // 16 * 16)), IN_PAGES, ("padding-of-pages-seen",)
    ),
    Planted("base 2", lambda q, k, v: explicit(q, k, v, scale=math.log(2) / 8), FULL, ("log2e-missing",)),
    Planted("first key", lambda q, k, v: sdpa(q, k[:, :, 1:], v[:, :, 1:]), FULL, ("first-key-missing",)),
    Planted("tail tile, causal", _without_last_part, PARTLY_CAUSAL, TAIL_MISSING),
    Planted("keys from 256 on", lambda q, k, v: sdpa(q, k[:, :, :256], v[:, :, :256]), LONG, ("keys-beyond-unseen",)),
    Planted(
        "keys before the new tokens",
        lambda q, k, v: sdpa(q, k[:, :, -48:], v[:, :, -48:], is_causal=True),
        CHUNK,
        ("cached-keys-unread",),
    ),
    Planted(
        "softcap without tanh",
        lambda q, k, v: ((q.float() @ k.float().mT / 8).clamp(-2, 2).softmax(-1) @ v.float()).to(q.dtype),
        FULL.replace(softcap=2.0),
        ("softcap-cuts-off",),
    ),
    Planted("alibi", explicit, FULL.replace(alibi=True), ("alibi-ignored",)),
    Planted("alibi scaled", _with_alibi(1 / 8), SLOPED, ("alibi-scaled",)),
    Planted("alibi of base 2", _with_alibi(math.log(2)), SLOPED, ("log2e-missing-in-alibi",)),
    Planted(
        "bias of base 2",
        lambda q, k, v: explicit(q, k, v, bias=draw_inputs(BIASED).bias.float() * math.log(2)),
        BIASED,
        ("log2e-missing-in-bias",),
    ),
    Planted(
        "sinks with log2 e",
        lambda q, k, v: explicit(q, k, v, sinks=draw_inputs(SUNK).sinks.float() / math.log(2)),
        SUNK,
        ("log2e-not-meant-in-sinks",),
    ),
    Planted(
        "an empty split",
        lambda q, k, v: explicit(q, k[:, :, :77], v[:, :, :77], sinks=torch.zeros(2)),
        SPLIT,
        ("empty-splits-counted",),
    ),
    Planted("slopes in reverse", _with_alibi(1, (3, 2, 1, 0)), SLOPED, ("alibi-slope-of-another-head",)),
    Planted("score_mod", explicit, FULL.replace(score_mod=lambda s, b, h, q, kv: s - (q - kv) / 9), ("score-mod-ignored",)),
    Planted("next key head", lambda q, k, v: explicit(q, k.roll(1, 1), v.roll(1, 1)), GROUPED, ("next-key-head",)),
    Planted("batch reversed", lambda q, k, v: explicit(q, k.flip(0), v.flip(0)), GROUPED, ("kv-of-another-batch-entry",)),
    Planted("other batch entry", lambda q, k, v: explicit(q, k, v).flip(0), GROUPED, ("batch-entries-shifted",)),
    Planted("other head", lambda q, k, v: sdpa(q, k, v).roll(1, 1), FULL, ("heads-shifted",)),
    Planted("k for v", lambda q, k, v: sdpa(q, k, k), FULL, ("k-for-v",)),
    Planted("v for k", lambda q, k, v: sdpa(q, v, v), PARTLY, ("v-for-k",)),
    Planted("q and k exchanged", lambda q, k, v: sdpa(k, q, v), PARTLY, ("q-and-k-exchanged",)),
    Planted("k and v exchanged", lambda q, k, v: sdpa(q, v, k), PARTLY, ("k-and-v-exchanged",)),
    Planted("offsets of k wrap", lambda q, k, v: sdpa(q, _read_wrapped(k), v), PARTLY.replace(heads=4), ("offset-wraps",)),
    Planted("merged by the first row", _merged_by_the_first_row, PARTLY, ("splits-merged-by-another-row",)),
    Planted("rope in halves", _rotated("half-split"), PARTLY, ("rope-inside-half-split",)),
    Planted("rope in pairs", _rotated("interleaved"), PARTLY, ("rope-inside-interleaved",)),
    Planted("tf32", lambda q, k, v: explicit(_tf32(q), _tf32(k), _tf32(v)), FLOAT32, ("precision-tf32",)),
    Planted("sums in the dtype", summed_in_the_dtype, PARTLY.replace(q_len=1024), ("sums-in-few-bits",)),
    Planted("scale 1 % off", lambda q, k, v: explicit(q, k, v, scale=1.01 / 8), FULL, ("scale-wrong",)),
    Planted("scores in float16", _with_scores_in_float16, FLOAT32, ("scores-rounded",)),
    *(
        Planted(f"{words} {str(dtype)[6:]}", partial(_computed_in, dtype, factor), FLOAT32, ("smaller-dtype",))
        for dtype in (torch.float16, torch.bfloat16)
        for words, factor in (("computed in", 1.0), ("5 % off, and computed in", 1.05))
    ),
    Planted("out 1 % off", lambda q, k, v: (explicit(q, k, v).float() * 1.01).to(q.dtype), FULL, ("out-scaled",)),
    Planted(
        "sink of the next head",
        KernelBackend("next-sink", _NextSink(), returns_lse=False),
        GROUPED.replace(sinks=True),
        ("sink-of-another-head",),
    ),
    Planted("zeros", lambda q, k, v: q * 0, FULL, ("all-zeros",)),
    Planted("NaN", lambda q, k, v: sdpa(q, k, v) / (q[..., :1] != q[0, 0, 5, 0]), FULL, ("not-finite",)),
    Planted(
        "one element", lambda q, k, v: sdpa(q, k, v).index_put_((torch.tensor(0),) * 4, torch.tensor(9.0).bfloat16()), FULL
    ),
)
OF_LSE = tuple(
    Planted(name, kernel, workload, faults, returns_lse=True)
    for name, kernel, workload, faults in (
        ("lse as (batch, rows, heads)", with_lse(lambda lse: lse.mT.contiguous()), SQUARE, ("lse-layout",)),
    )
)
OF_GRADIENTS = tuple(
    Planted(name, kernel, workload, faults, backward=True)
    for name, kernel, workload, faults in (
        ("dq with a flipped sign", _with_gradients(lambda dq, dk, dv: (-dq, dk, dv)), FULL, ("gradient-sign-flipped",)),
        ("dv with a flipped sign", _with_gradients(lambda dq, dk, dv: (dq, dk, -dv)), FULL, ("gradient-sign-flipped",)),
        (
            "dv averaged",
            _with_gradients(lambda dq, dk, dv: (dq, dk, dv / 3)),
            FULL.replace(heads=3, kv_heads=1),
            ("gradient-averaged-over-group",),
        ),
        ("dk and dv swapped", _with_gradients(lambda dq, dk, dv: (dq, dv, dk)), FULL, ("gradients-swapped",)),
        ("dv without its denominator", _WithoutDenominator.apply, FULL, ("dv-without-denominator",)),
        (
            "dk a little off",
            _with_gradients(lambda dq, dk, dv: (dq, dk * 1.01, dv)),
            FULL.replace(dtype="float32"),
            ("gradient-scaled",),
        ),
        ("dk 2 % off", _with_gradients(lambda dq, dk, dv: (dq, dk * 1.02, dv)), FULL, ("gradient-scaled",)),
        (
            "dq shifted",
            _with_gradients(lambda dq, dk, dv: (dq + dq.abs().max() * (dq > 0), dk, dv)),
            FULL.replace(dtype="float32"),
            (),
        ),
        ("adds of one row lost at random", _with_gradients(_losing_adds()), FULL, ("calls-differ",)),
        *(
            (f"softcap's derivative {name}", _with_slope_of_cap(slope), FULL.replace(softcap=5.0), (fault,))
            for name, slope, fault in (
                ("missing", lambda t: 1, "softcap-slope-missing"),
                ("all but missing", lambda t: 1 - t * t / 40, "softcap-slope-missing"),
                ("without its square", lambda t: 1 - t, "softcap-slope-wrong"),
                ("of a score that is not divided", lambda t: 1 - (5 * t) ** 2, "softcap-slope-wrong"),
                ("of half the square", lambda t: 1 - t * t / 2, "softcap-slope-wrong"),
                ("times softcap", lambda t: 5 * (1 - t * t), "softcap-slope-scaled"),
            )
        ),
        ("dq of NaN", _with_gradients(lambda dq, dk, dv: (dq * float("nan"), dk, dv)), FULL, ("not-finite",)),
    )
)
PLANTED = (*OF_OUT, *OF_LSE, *OF_GRADIENTS)
#: what is only observed, and is so with any fault
OBSERVATIONS = ("not-finite", "all-zeros", "zeros-there", "calls-differ", *EMPTY_ROWS)


def judgment_of(hints, faults):
    """Say whether the first of some hints that asserts a fault is right: "named", "none", or "wrong" if any is not."""
    asserted = [hint.fault for hint in hints if hint.fault and (hint.fault in faults or hint.fault not in OBSERVATIONS)]
    if any(fault not in faults for fault in asserted):
        return "wrong"
    return "named" if asserted else "none"
