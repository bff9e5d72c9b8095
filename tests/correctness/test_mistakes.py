"""Each likely mistake is named where it was made, and nothing is named where another fault was."""

import math

import pytest
import torch
from judging import explicit, failure, judged, positions, with_gradients
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pytest_attn import Document, Neighborhood, Pages, Window, Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.correctness.mask_mistakes import mask_mistakes
from pytest_attn.correctness.references import ReferenceCache
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis.attention import attention_faults
from pytest_attn.diagnosis.faults import is_known
from pytest_attn.messages.mismatch import describe
from pytest_attn.mutants.catalog import MUTANTS
from pytest_attn.mutants.kernel import Kernel, KernelBackend
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.inputs import draw_inputs

REFERENCES = ReferenceCache()
CPU = torch.device("cpu")
FULL = Workload(160, heads=2)
CAUSAL = Workload(160, heads=2, mask="causal")
CHUNK = Workload(48, 160, heads=2, mask="causal-bottom-right")
GROUPED = Workload(96, heads=4, kv_heads=2, batch=2, head_dim=32)
SINGLE = Workload(160, heads=2, dtype="float32")


def rope(x, style):
    angle = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    one, other = x.float().chunk(2, -1) if style == "half-split" else (x.float()[..., ::2], x.float()[..., 1::2])
    turned = one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()
    return (torch.cat(turned, -1) if style == "half-split" else torch.stack(turned, -1).flatten(-2)).to(x.dtype)


def tf32(x):
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def zero_padded(q, k, v):
    k, v = (pad(t, (0, 0, 0, -t.shape[2] % 64)) for t in (k, v))
    return sdpa(q, k, v)


def without_diagonal(q, k, v):
    rows, keys = positions(q.shape[2], k.shape[2])
    return explicit(q, k, v, mask=keys < rows).nan_to_num()


def without_last_part(q, k, v):
    rows, keys = positions(q.shape[2], k.shape[2])
    return explicit(q, k, v, mask=(keys <= rows) & (keys < 128))


FAULTS = {
    "keys before the new tokens": (
        lambda q, k, v: sdpa(q, k[:, :, -48:], v[:, :, -48:], is_causal=True),
        CHUNK,
        "that does not read the keys before the new tokens",
    ),
    "diagonal": (without_diagonal, CAUSAL, "with a causal mask that hides the diagonal"),
    "part-filled tile under a causal mask": (without_last_part, CAUSAL, "the last part-filled tile (from 128)"),
    "zeros counted": (zero_padded, FULL, "that counts the zeros which fill up the last tile of keys (to a multiple of 64)"),
    "rope in halves": (
        lambda q, k, v: sdpa(rope(q, "half-split"), rope(k, "half-split"), v),
        FULL,
        "with RoPE inside: q and k rotated by position (half-split pairs, base 10000)",
    ),
    "rope in pairs": (
        lambda q, k, v: sdpa(rope(q, "interleaved"), rope(k, "interleaved"), v),
        FULL,
        "with RoPE inside: q and k rotated by position (interleaved pairs, base 10000)",
    ),
    "v for k": (lambda q, k, v: sdpa(q, v, v), FULL, "with v in place of k"),
    "tf32": (lambda q, k, v: explicit(tf32(q), tf32(k), tf32(v)), SINGLE, "precision profile 'tf32'"),
    "batch reversed": (lambda q, k, v: sdpa(q, k.flip(0), v.flip(0), enable_gqa=True), GROUPED, "of the next batch entry"),
    "out of another batch entry": (
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True).flip(0),
        GROUPED,
        "batch entry b holds what belongs to batch entry b - 1",
    ),
    "next key head": (
        lambda q, k, v: sdpa(q, k.roll(1, 1), v.roll(1, 1), enable_gqa=True),
        GROUPED,
        "in which query heads use the next key head",
    ),
    "exp for exp2": (lambda q, k, v: explicit(q, k, v, scale=1 / math.log(2) / 8), FULL, "with scale * log2 e"),
    "head dim": (
        lambda q, k, v: explicit(q[..., :32], k[..., :32], v, scale=40**-0.5),
        FULL.replace(head_dim=40),
        "with q . k over the first 32 of 40 elements of a head",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_named(name):
    fn, workload, words = FAULTS[name]
    text = failure(fn, workload)
    assert words in text
    assert text.count("suggests") == 1


MODELED = {
    "masks/rows-counted-within-their-tile": "whose mask counts rows within tiles of 64",
    "masks/mask-on-last-tile-only": "masks the last tile of 64 keys only",
    "masks/window-first-tile-skipped": "tile of 64 keys in which the window begins",
    "masks/mask-of-key-head": "with the mask of the key head",
    "masks/mask-inverted": "with the mask inverted",
    "masks/document-begins-one-token-late": "whose documents begin one token late",
    "masks/neighborhood-one-token-larger": "one token larger along axis 1",
    "masks/blind-tile-is-nan": "sees no key in the first tile of 64 keys that is visited",
    "lengths/newest-key-not-seen": "the newest key is not seen",
    "lengths/alignment-of-longest-sequence": "aligns all sequences as the longest one",
    "lengths/sequences-not-separated": "whose packed sequences see each other",
    "lengths/queries-offsets-for-keys": "by the cumulated lengths of the queries",
    "lengths/pages-taken-in-order": "pages to follow each other",
    "lengths/page-of-another-size": "twice as long as they are",
    "heads/group-rounded-to-power-of-two": "rounded up to a power of two",
    "heads/keys-of-first-batch-entry": "keys of the first batch entry for all",
    "heads/sink-of-key-head": "sink of the key head",
    "options/softcap-after-bias": "with the softcap after the bias",
    "options/softcap-after-mask": "with the softcap after the mask",
    "options/sink-counted-in-every-split": "counts each sink 2 times",
    "options/alibi-sign": "whose ALiBi has the wrong sign",
    "options/score-mod-with-tile-rows": "whose score_mod counts rows within tiles of 64",
    "lse/lse-without-maximum": "the maximum is not added",
    "lse/lse-off-by-ln-2": "lse is ln 2 too large in every row",
    "lse/lse-without-sink": "lse is that of attention without sinks",
    "lse/lse-in-the-tensors-dtype": "lse is rounded to bfloat16",
    "lse/sum-not-rescaled": "whose sum of P v is not brought to a new maximum (tiles of 64 keys)",
    "lse/denominator-not-rescaled": "whose denominator is not brought to a new maximum",
    "lse/rescaled-inversely": "inverse of the factor",
    "lse/merge-without-weights": "averages the results of 2 splits",
    "overflow/key-position-wraps": "whose key positions wrap round at 256",
    "overflow/query-offset-wraps": "out is wrong from element 32,768 (2^15) on and right before",
    "layout/out-transposed-where-square": "out has its heads and rows swapped",
    "gradients/delta-missing": "dq is that of a backward pass without D",
    "gradients/delta-of-next-head": "with D of the next head",
    "gradients/lse-of-first-batch-entry": "with lse of the first batch entry for all",
    "gradients/null-lse": "that computes P again without lse",
    "gradients/lse-without-sink-again": "without the sink's share of lse",
    "gradients/group-overwritten": "dk is that of a backward pass that keeps only the last query head of each group",
    "gradients/group-summed-interleaved": "adds query head h to key head h % kv_heads",
    "gradients/row-tiles-overwrite-dk": "keeps only the last tile of 64 rows",
    "gradients/mask-missing-in-backward": "computes P again that masks nothing within the tiles",
    "gradients/always-causal-in-backward": "computes P again with a causal mask that nobody asked for",
    "gradients/kv-length-ignored-in-backward": "computes P again that ignores kv_lens",
    "gradients/bias-missing-in-backward": "computes P again without ALiBi",
    "gradients/softcap-slope-missing": "without softcap's derivative",
    "gradients/softcap-slope-of-capped-score": "with softcap's derivative at the capped score",
    "gradients/score-mod-slope-missing": "without score_mod's derivative",
}


def workloads():
    return [w for group in ("features", "edges", "smoke") for w in builtin_catalog().select(group)]


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (n % 2)) for n, one in enumerate(MODELED)])
def test_the_fault_of_a_mutant_is_named(name):
    kind, name_of_mutant = name.split("/")
    mutant = next(one for one in MUTANTS if one.name == name_of_mutant and one.kind == kind)
    backward = kind == "gradients"
    for workload in (w for w in workloads() if mutant.applies(w, backward)):
        comparison = judged(mutant.backend(), CheckSpec(workload, CPU, backward), REFERENCES)
        if not comparison.passed:
            assert MODELED[name] in describe(comparison)
            return
    raise AssertionError(f"{name} was not found")


def of_gradients(changed, workload=FULL):
    """Return the text for attention whose gradients are what a function makes of (dq, dk, dv)."""
    kernel = with_gradients(lambda gradients, dout: changed(*gradients(dout)))
    spec = CheckSpec(workload.replace(dtype="float32"), CPU, backward=True, declared=Declaration(precision="torch_cpu"))
    return describe(judged(kernel, spec))


def test_gradients_that_are_swapped_are_named():
    assert "suggests   dk holds dv" in of_gradients(lambda dq, dk, dv: (dq, dv, dk))


def test_a_gradient_that_is_wrong_in_a_way_of_its_own_is_given_no_name():
    assert "suggests" not in of_gradients(lambda dq, dk, dv: (dq, dk * (1 + torch.rand_like(dk)), dv))
    assert "suggests" not in of_gradients(lambda dq, dk, dv: (dq + dq.abs().max() * (dq > 0), dk, dv))


def test_a_flipped_sign_is_no_name_for_a_gradient_of_which_only_the_slope_is_so():
    noise = torch.Generator().manual_seed(0)
    text = of_gradients(lambda dq, dk, dv: (-dq + 3 * dq.norm() / 143 * torch.randn(dq.shape, generator=noise), dk, dv))
    assert "its sign is flipped" not in text


HONEST_OTHERWISE = {
    "noise": lambda q, k, v: sdpa(q, k, v) * (1 + 0.1 * torch.randn(1, generator=torch.Generator().manual_seed(1))),
    "a column": lambda q, k, v: sdpa(q, k, v) + torch.eye(64, dtype=q.dtype)[7],
    "rows shuffled": lambda q, k, v: sdpa(q, k, v)[:, :, torch.randperm(160, generator=torch.Generator().manual_seed(2))],
    "a random scale for each row": lambda q, k, v: sdpa(q * torch.linspace(0.5, 2, 160)[:, None].to(q.dtype), k, v),
    "values squared": lambda q, k, v: sdpa(q, k, v * v),
}


@pytest.mark.parametrize("name", HONEST_OTHERWISE)
def test_another_fault_is_given_no_name(name):
    assert "suggests" not in failure(HONEST_OTHERWISE[name], FULL)


VARIED = (
    Workload(70, 130, heads=4, kv_heads=2, head_dim=32, mask=Window(20, 3), sinks=True, softcap=4.0, bias="hqk"),
    Workload(70, 130, heads=4, kv_heads=2, head_dim=32, alibi=True, mask="causal-bottom-right"),
    Workload(96, heads=2, head_dim=40, v_head_dim=32, mask=Document((50, 46), causal=True), dtype="float16"),
    Workload(96, heads=2, head_dim=32, mask=Neighborhood((8, 12), (3, 5))),
    Workload(70, heads=2, head_dim=32, kv_lens=(70, 20), dtype="float32"),
    Workload(heads=4, kv_heads=2, head_dim=32, q_lens=(10, 0, 40), kv_lens=(70, 20, 30), mask="causal-bottom-right"),
    Workload(3, 100, batch=3, heads=4, kv_heads=2, kv_pages=Pages(16), kv_lens=(100, 0, 33)),
)


@pytest.mark.parametrize("workload", VARIED, ids=lambda w: w.id)
def test_faults_are_those_of_every_draw_and_each_is_an_attention(workload):
    """What was thought of with one draw of inputs can be computed with another."""
    from pytest_attn.backends.precision import precision_named
    from pytest_attn.correctness.reference import compute_reference

    of_one, of_other = (draw_inputs(workload, name) for name in ("structured", "flat"))
    faults = list(attention_faults(workload, of_one))
    assert [fault.words for fault in faults] == [fault.words for fault in attention_faults(workload, of_other)]
    assert len(faults) > 10
    for fault in faults:
        assert is_known(fault.fault)
        inputs, other = fault.attention(of_other)
        out = compute_reference(inputs, precision_named("flash"), workload=other).tensors["out"].value
        assert out.isfinite().all(), fault.words


def test_a_mistake_with_a_mask_hides_or_shows_something():
    w = Workload(70, 130, heads=2, head_dim=32, mask=Window(20, 3))
    inputs = draw_inputs(w)
    index = torch.meshgrid(*(torch.arange(n) for n in (1, 2, 70, 130)), indexing="ij")
    honest = inputs.mask_mod()(*index)
    changed = [fault for fault, _, mask in mask_mistakes(inputs, w) if not (mask(*index) & (index[3] < 130)).equal(honest)]
    assert "window-left-one-too-long" in changed
    assert len(changed) > 15


class RoundedSinks(Kernel):
    """A kernel that takes float32 sinks as bfloat16."""

    def sinks(self, seq):
        sinks = super().sinks(seq)
        return None if sinks is None else sinks.bfloat16().float()


def test_sinks_that_are_rounded_are_named():
    workload = Workload(96, heads=4, head_dim=32, sinks=True, dtype="float32")
    comparison = judged(KernelBackend("rounded", RoundedSinks(), returns_lse=False), CheckSpec(workload, CPU))
    assert "it equals attention with sinks rounded to bfloat16" in describe(comparison)
