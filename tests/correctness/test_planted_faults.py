"""Faults that are planted in a kernel: each is seen, located and named."""

import math

import pytest
import torch
from judging import CAUSAL, CROSS, FULL, causal, explicit, failure, positions
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytest_attn
from pytest_attn import Window, Workload

FAULTS = {
    "no mask": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), CAUSAL, "it equals attention without the mask"),
    "causal mask not asked for": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        FULL,
        "it equals attention with a causal mask that nobody asked for",
    ),
    "scale a little off": (lambda q, k, v: explicit(q, k, v, scale=0.126), FULL, "with scale 0.126, not 0.125"),
    "scale far off": (lambda q, k, v: explicit(q, k, v, scale=0.08), FULL, "with scale 0.08, not 0.125"),
    "scale missing": (lambda q, k, v: explicit(q, k, v, scale=1.0), FULL, "with scale 1: the softmax scale is missing"),
    "scale twice": (lambda q, k, v: explicit(q, k, v, scale=1 / 64), FULL, "with the softmax scale applied twice"),
    "base 2": (lambda q, k, v: explicit(q, k, v, scale=math.log(2) / 8), FULL, "exp2 without its factor log2 e"),
    "last key": (lambda q, k, v: sdpa(q, k[:, :, :-1], v[:, :, :-1]), FULL, "it equals attention without the last key"),
    "first key": (lambda q, k, v: sdpa(q, k[:, :, 1:], v[:, :, 1:]), FULL, "it equals attention without the first key"),
    "tail tile": (
        lambda q, k, v: sdpa(q, k[:, :, :64], v[:, :, :64]),
        FULL.replace(kv_len=97),
        "without the keys of the last part-filled tile (from 64)",
    ),
    "alignment": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        CROSS,
        "with the other causal alignment (causal)",
    ),
    "one key too many": (
        lambda q, k, v: explicit(q, k, v, mask=positions(257, 257)[1] <= positions(257, 257)[0] + 1),
        CAUSAL,
        "with a causal mask that shows one key too many",
    ),
    "window": (
        lambda q, k, v: explicit(q, k, v, mask=(d := positions(96, 96)[0] - positions(96, 96)[1]).ge(0) & (d <= 16)),
        Workload(96, mask=Window(15, 0)),
        "whose window is one key too long on the left",
    ),
    "softcap": (lambda q, k, v: explicit(q, k, v), FULL.replace(softcap=2.0), "it equals attention without softcap"),
    "scale option": (lambda q, k, v: explicit(q, k, v), FULL.replace(scale=0.3), "the option scale is ignored"),
    "sinks": (lambda q, k, v: explicit(q, k, v), FULL.replace(sinks=True), "it equals attention without sinks"),
    "bias": (lambda q, k, v: explicit(q, k, v), FULL.replace(bias="hqk"), "it equals attention without the bias"),
    "alibi": (lambda q, k, v: explicit(q, k, v), FULL.replace(alibi=True), "it equals attention without ALiBi"),
    "score_mod": (
        lambda q, k, v: explicit(q, k, v),
        FULL.replace(score_mod=lambda s, b, h, q, kv: s - (q - kv) / 9),
        "it equals attention without score_mod",
    ),
    "padding": (
        lambda q, k, v: explicit(q, k, v),
        Workload(64, heads=2, kv_lens=(64, 20)),
        "it equals attention that ignores kv_lens and sees padding",
    ),
    "head map": (
        lambda q, k, v: causal(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        CAUSAL,
        "in which query head h uses key head h % kv_heads (interleaved groups)",
    ),
    "uniform": (lambda q, k, v: sdpa(q * 0, k, v), FULL, "with uniform probabilities: the scores have no effect"),
    "k for v": (lambda q, k, v: sdpa(q, k, k), FULL, "with k in place of v"),
    "zeros": (lambda q, k, v: q * 0, FULL, "out is all zeros"),
    "other head": (lambda q, k, v: sdpa(q, k, v).roll(1, 1), FULL, "heads are swapped"),
    "eager": (
        lambda q, k, v: ((q @ k.transpose(-1, -2)) * 0.125).softmax(-1) @ v,
        FULL,
        "it fits the precision profile 'eager' (z ",
    ),
    "NaN": (lambda q, k, v: sdpa(q, k, v) / (q[..., :1] != q[0, 0, 5, 0]), FULL, "out holds"),
    "one element": (lambda q, k, v: sdpa(q, k, v).index_put_((torch.tensor(0),) * 4, torch.tensor(9.0).bfloat16()), FULL, ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_and_named(name):
    fn, workload, suggestion = FAULTS[name]
    text = failure(fn, workload)
    assert text.startswith("mismatch: out of ")
    assert suggestion in text


def test_the_failure_names_worst_element_levels_place_and_figures():
    def last_row_wrong(q, k, v):
        out = causal(q, k, v).clone()
        out[:, 1:3, 256:] = 0
        return out

    text = failure(last_row_wrong, CAUSAL)
    lines = text.splitlines()
    assert lines[0].startswith(f"mismatch: out of {last_row_wrong.__qualname__.replace('.<locals>', '')}: z ")
    assert lines[0].endswith(" over an element, limit 8 (h4-kv2-s257-d64-causal, inputs structured)")
    assert lines[1].startswith("  worst      out[0, ")
    assert ", 256, " in lines[1]
    assert "exact" in lines[1]
    assert "budget" in lines[1]
    assert "128 of 65,792 elements over" in lines[2]
    assert lines[3] == "  where      rows only 256 of 257 (the last); heads 1, 2 (of 4)"
    assert lines[4].startswith("  figures    absmax ")
    assert "cosine" in lines[4]
    assert "slope" in lines[4]


@pytest.mark.parametrize(
    ("spoil", "place"),
    [
        (lambda out: out[:, :, 128:], "rows 128 to 199 of 200, the tail after the last full tile of 128"),
        (lambda out: out[:, :, 63::64], "rows 3 of 200, every one at 63 modulo 64"),
        (lambda out: out[:, :, 10:20], "rows 10 to 19 of 200"),
    ],
)
def test_the_place_of_a_fault_is_described(spoil, place):
    def faulty(q, k, v):
        out = sdpa(q, k, v).clone()
        spoil(out).mul_(1.5)
        return out

    assert place in failure(faulty, Workload(200, heads=2))


class Faulty(torch.autograd.Function):
    """Exact forward, and a backward pass whose gradients `spoil` changes."""

    spoil = staticmethod(lambda dq, dk, dv: (dq, dk, dv))

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return explicit(q, k, v)

    @staticmethod
    def backward(ctx, dout):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            grads = torch.autograd.grad(explicit(*leaves), leaves, dout)
        return Faulty.spoil(*grads)


@pytest.mark.parametrize(
    ("spoil", "workload", "expected"),
    [
        (lambda dq, dk, dv: (dq * 8, dk, dv), FULL, "the factor softmax_scale is missing"),
        (lambda dq, dk, dv: (dq, dk / 8, dv), FULL, "the factor softmax_scale was applied twice"),
        (lambda dq, dk, dv: (dq, dk, dv / 3), FULL.replace(heads=3, kv_heads=1), "the mean over the 3 query heads"),
        (lambda dq, dk, dv: (dq, dk, -dv), FULL, "its sign is flipped"),
        (lambda dq, dk, dv: (dq, dk * 1.01, dv), FULL, "mismatch: dk of Faulty.apply"),
        (lambda dq, dk, dv: (dq * float("nan"), dk, dv), FULL, "dq holds 16,384 NaN and 0 infinite elements"),
    ],
)
def test_a_wrong_gradient_is_seen_and_named(monkeypatch, spoil, workload, expected):
    def honest(*grads):
        return grads

    monkeypatch.setattr(Faulty, "spoil", honest)
    precision = {"precision": "flash2", "backward": True}
    assert pytest_attn.check(Faulty.apply, workload, device="cpu", **precision).passed
    monkeypatch.setattr(Faulty, "spoil", spoil)
    assert expected in failure(Faulty.apply, workload, **precision)
