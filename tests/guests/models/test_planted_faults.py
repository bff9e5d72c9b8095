"""Faults planted in one layer and in all of a small model: each is found, and named with its layer.

They run where the models are: on a GPU if there is one, else on a CPU. `pytest tests/guests/models/test_planted_faults.py`
"""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import Attention, Block, Model

from pytest_attn import capture
from pytest_attn.guests.models.check_model import judge_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, DIM, TOKENS, WINDOW = 4, 2, 64, 96, 24
BOUNDARIES = (0, 40, 96)


def seen(kind, shift=0):
    """Return what is visible, (rows, keys), or None for all."""
    at = torch.arange(TOKENS, device=DEVICE)
    ahead = at[:, None] - at
    if kind == "causal":
        return ahead >= 0
    if kind == "window":
        return (ahead >= 0) & (ahead <= WINDOW + shift)
    if kind == "documents":
        document = (at >= BOUNDARIES[1]).int()
        return (document[:, None] == document) & (ahead >= 0)
    return None


class Exactly(torch.autograd.Function):
    """Attention as FlashAttention computes it, with a place for each fault."""

    @staticmethod
    def forward(ctx, q, k, v, mask, sinks, fault):
        scale = q.shape[-1] ** -0.5 * (1.01 if fault == "scale" else 1.0)
        kf, vf = (_shared(t, q.shape[1], fault == "tiled").float() for t in (k, v))
        scores = q.float() @ kf.mT * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        merged = scores if sinks is None else torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        lse = merged.logsumexp(-1, keepdim=True)
        out = ((scores - lse).exp().to(q.dtype).float() @ vf).to(q.dtype)
        ctx.save_for_backward(q, kf, vf, scores, lse, out, sinks)
        ctx.scale, ctx.fault, ctx.groups = scale, fault, k.shape[1]
        return out

    @staticmethod
    def backward(ctx, dout):
        q, kf, vf, scores, lse, out, sinks = ctx.saved_tensors
        if ctx.fault == "lse":
            lse = lse.bfloat16().float()
        p = (scores - lse).exp()
        row_sum = 0.0 if ctx.fault == "D" else (dout.float() * out.float()).sum(-1, keepdim=True)
        ds = (p * (dout.float() @ vf.mT - row_sum)).to(q.dtype).float()
        dq = ds @ kf * ctx.scale
        dk = ds.mT @ q.float() * (1.01 if ctx.fault == "dk" else 1.0) * ctx.scale
        dv = p.to(q.dtype).float().mT @ dout.float()
        dk, dv = (_summed(t, ctx.groups, ctx.fault == "tiled") for t in (dk, dv))
        dsinks = None if sinks is None else -((sinks.view(1, -1, 1) - lse[..., 0]).exp() * row_sum[..., 0]).sum((0, 2))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, dsinks, None


def _shared(tensor, heads, is_tiled):
    group = heads // tensor.shape[1]
    return tensor.repeat(1, group, 1, 1) if is_tiled else tensor.repeat_interleave(group, 1)


def _summed(gradient, groups, is_tiled):
    sizes = (-1, groups) if is_tiled else (groups, -1)
    return gradient.unflatten(1, sizes).sum(1 if is_tiled else 2)


def attention(q, k, v, workload_mask=None, sinks=None, fault=""):
    """Compute the planted attention. workload_mask: causal, window, documents or None."""
    kind = workload_mask
    kind = {"dropped mask": None, "documents": "causal"}.get(fault, kind)
    mask = seen(kind, -1 if fault == "window" else 0)
    if fault == "next token":
        mask = mask.expand(HEADS, -1, -1).clone()
        mask[1] |= torch.ones_like(mask[1]).tril(1)
    if fault == "lost key":
        mask[TOKENS // 2 + 1 :, TOKENS // 2] = False
    if fault == "last key":
        mask = torch.arange(TOKENS, device=DEVICE).expand(TOKENS, TOKENS) < TOKENS - 1
    return Exactly.apply(q, k, v, mask, None if fault == "sinks" else sinks, fault)


#: fault -> the mask that it needs, the tensor that shows it first, and what it is called, if it has a name
FAULTS = {
    "scale": (None, "out", "scale-wrong"),
    "window": ("window", "out", "window-left-one-too-short"),
    "next token": ("causal", "out", "causal-shows-next-key"),
    "lost key": ("causal", "out", ""),
    "last key": (None, "out", "last-key-missing"),
    "tiled": ("causal", "out", "heads-interleaved"),
    "dk": ("causal", "dk", "gradient-scaled"),
    "D": ("causal", "dq", "d-missing"),
    "lse": ("causal", "dq", "lse-rounded"),
    "dropped mask": ("causal", "out", "mask-ignored"),
    "documents": ("documents", "out", "documents-see-each-other"),
    "sinks": ("causal", "out", ""),
}
LAYERS = 3
CHOSEN = 1


class Planted:
    """Stands in for a model's attention: honest, but for the layers chosen. everywhere: in all; else in the second."""

    def __init__(self, fault, everywhere):
        self.fault, self.everywhere, self.calls = fault, everywhere, 0

    def __call__(self, q, k, v, workload):
        mask = FAULTS[self.fault][0]
        is_faulty = self.everywhere or self.calls % LAYERS == CHOSEN
        self.calls += 1
        return attention(q, k, v, mask, fault=self.fault if is_faulty else "")


def case(kind, dtype, attend=None):
    """Return a model of three layers with grouped heads, and its training step."""

    def grouped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(kind), enable_gqa=True)

    torch.manual_seed(0)
    model = Model(*(Block(Attention(attend or grouped, HEADS, KV_HEADS, DIM)) for _ in range(LAYERS))).to(DEVICE, dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS, DIM, generator=generator).to(DEVICE, dtype)
    labels = torch.randint(7, (2 * TOKENS,), generator=generator).to(DEVICE)
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1).float(), labels)


DTYPES = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16", marks=pytest.mark.slow)]
)


@DTYPES
@pytest.mark.parametrize("kind", [None, "causal", "window", "documents"])
def test_the_planted_attention_is_right_without_a_fault(kind, dtype):
    def honest(q, k, v, workload):
        return attention(q, k, v, kind)

    found = judge_model(*case(kind, dtype), honest, scatter=0, precision="flash")

    assert found.passed, found.message


@pytest.mark.one_in(18)
@pytest.mark.parametrize(
    ("everywhere", "dtype"),
    [
        pytest.param(False, torch.bfloat16, id="one-layer-bf16"),
        pytest.param(True, torch.bfloat16, id="all-bf16"),
        pytest.param(False, torch.float32, id="one-layer-fp32"),
        pytest.param(True, torch.float16, id="all-fp16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "sinks"])
def test_each_fault_is_found_and_named_with_its_layer(fault, everywhere, dtype):
    kind, tensor, called = FAULTS[fault]
    model, step = case(kind, dtype)

    found = judge_model(model, step, Planted(fault, everywhere), scatter=0, precision="flash")

    layers = range(LAYERS) if everywhere else [CHOSEN]
    wrong = [call for call in found.calls if not call.passed]
    assert [call.module for call in wrong] == [f"blocks.{n}.attn" for n in layers]
    assert f"{len(layers)} of {LAYERS} attention calls of Planted are wrong: " in found.message
    assert all(f"blocks.{n}.attn" in found.message for n in layers)
    given = {fault for call in wrong for fault in call.comparison.faults}
    assert given <= {called, "keys-unseen" if fault == "lost key" else called}, (
        "a lost key has a name where enough rows show it"
    )
    assert given or not called or dtype != torch.float32, "elsewhere rounding may hide which fault it is"
    assert tensor in {row.name for call in wrong for row in call.comparison.tensors if not row.passed}


# -- what a function is given, and does not use ------------------------------------------------------------------------


@pytest.mark.one_in(2)
@DTYPES
@pytest.mark.parametrize("everywhere", [False, True], ids=["one-layer", "all"])
def test_sinks_that_are_not_passed_are_found(monkeypatch, everywhere, dtype):
    """Through flash-attn 4, whose function takes them."""
    library, calls = ModuleType("flash_attn.cute"), []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, learnable_sink=None):
        is_faulty = everywhere or len(calls) % LAYERS == CHOSEN
        calls.append(q)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attention(q, k, v, "causal", learnable_sink, "sinks" if is_faulty else "").transpose(1, 2), None

    library.flash_attn_func = flash_attn_func
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, library)
    sinks = torch.full((HEADS,), 2.0, device=DEVICE)

    def attend(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return library.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks)[0].transpose(1, 2)

    model, step = case("causal", dtype, attend)
    asked = capture(step, model)
    calls.clear()
    found = judge_model(model, step, scatter=0)

    assert all(call.workload.sinks for call in asked)
    wrong = [call.module for call in found.calls if not call.passed]
    assert wrong == [f"blocks.{n}.attn" for n in (range(LAYERS) if everywhere else [CHOSEN])]


# -- what is suggested -------------------------------------------------------------------------------------------------


def hints_of(model, step, attend):
    """Return which tensor is wrong first, and what is suggested, in calls of a model whose attention `attend` computes."""
    found = judge_model(model, step, attend, scatter=0)
    wrong = [call.comparison for call in found.calls if not call.passed]
    return [(one.mismatch.row.name, *one.faults) for one in wrong]


def test_a_scale_that_shows_as_the_slope_of_a_gradient_is_named():
    model, step = case(None, torch.bfloat16)
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.attn.q.parameters():  # almost uniform, so that out hardly changes
                parameter.mul_(0.03)
            block.attn.k.weight.mul_(0.03)

    assert hints_of(model, step, Planted("scale", everywhere=False)) == [("dk", "scale-wrong")]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("is_additive", [False, True], ids=["boolean", "additive"])
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_padding_that_is_ignored_is_named(kind, is_additive):
    visible = seen(kind).expand(2, 1, TOKENS, TOKENS).clone()
    visible[0, ..., :7], visible[1, ..., :3] = False, False
    visible |= torch.eye(TOKENS, dtype=torch.bool, device=DEVICE) & ~visible.any(-1, keepdim=True)
    low = torch.zeros(visible.shape, device=DEVICE).bfloat16().masked_fill(~visible, torch.finfo(torch.bfloat16).min)
    mask = low if is_additive else visible

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    model, step = case(kind, torch.bfloat16, attend)

    assert hints_of(model, step, lambda q, k, v, workload: attention(q, k, v, kind)) == [("out", "padding-ignored")] * LAYERS
