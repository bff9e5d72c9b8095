"""`attn.through`: layers that write attention out between projections, each right, and each with what it may get wrong."""

import math
import re

import pytest
import torch
from torch import nn

from pytest_attn import Workload

HEADS = {"batch": 2, "heads": 4, "head_dim": 16, "dtype": "float32"}


class EsmLike(nn.Module):
    """Projections in submodules, rotary embeddings, and q scaled before the product."""

    def __init__(self, scale=0.25):
        super().__init__()
        self.self = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("query", "key", "value")})
        self.output = nn.ModuleDict({"dense": nn.Linear(64, 64)})
        self.rotary, self.norm, self.scale = nn.Identity(), nn.LayerNorm(64), scale
        self.rotary.forward = lambda q: q.roll(1, 2)

    def forward(self, hidden, attention_mask=0.0):
        states = self.norm(hidden)
        q, k, v = (self.self[name](states).unflatten(-1, (4, 16)).transpose(1, 2) for name in ("query", "key", "value"))
        scores = self.rotary(q * self.scale) @ self.rotary(k).mT + attention_mask
        return hidden + self.output["dense"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SamLike(nn.Module):
    """Images of (batch, height, width, features), one projection, and a bias that is made of q: decomposed positions."""

    def __init__(self, of_v=2, of_bias=lambda q: q):
        super().__init__()
        self.qkv, self.proj, self.of_v, self.of_bias = nn.Linear(64, 192), nn.Linear(64, 64), of_v, of_bias
        self.rel_pos = nn.ParameterList(nn.Parameter(torch.randn(2 * size - 1, 16)) for size in (4, 6))

    def relative(self, q):
        at = [torch.arange(size)[:, None] - torch.arange(size) + size - 1 for size in (4, 6)]
        rel_h, rel_w = (table.to(q)[places] for table, places in zip(self.rel_pos, at, strict=True))
        q = q.unflatten(2, (4, 6))
        of_h, of_w = torch.einsum("bnhwc,hkc->bnhwk", q, rel_h), torch.einsum("bnhwc,wkc->bnhwk", q, rel_w)
        return (of_h[..., None] + of_w[..., None, :]).flatten(4).flatten(2, 3)

    def forward(self, x):
        b, h, w, _ = x.shape
        parts = self.qkv(x).reshape(b, h * w, 3, 4, 16).permute(2, 0, 3, 1, 4)
        scores = parts[0] * 0.25 @ parts[1].mT + self.relative(self.of_bias(parts[0]))
        return self.proj((scores.softmax(-1) @ parts[self.of_v]).transpose(1, 2).reshape(b, h, w, -1))


class GptLike(nn.Module):
    """Grouped keys, and a causal mask of its own."""

    def __init__(self, diagonal=1):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(48, features) for features in (64, 32, 32))
        self.to_out, self.first, self.spare = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 64)
        self.diagonal = diagonal

    def forward(self, x):
        x = self.first(x)
        q, k, v = (to(x).unflatten(-1, (-1, 16)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        hidden = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(self.diagonal)
        return x + self.to_out(((q @ k.mT / 4 + hidden).softmax(-1) @ v).transpose(1, 2).flatten(2))


GPT = Workload(24, kv_heads=2, mask="causal", **HEADS)
ESM = {"q": "self.query", "k": "self.key", "v": "self.value", "out": "output.dense", "replace": {"rotary": lambda q: q}}
FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "out": "proj"}


def judge(attn, fn, cause, wrong="out"):
    if not cause:
        attn.check(fn)
        return
    with pytest.raises(AssertionError, match=rf"(?s){wrong} of {type(fn.module).__name__}: .*suggests [^\n]*{cause}"):
        attn.check(fn)


@pytest.mark.parametrize(
    ("scale", "is_padded", "cause"),
    [(0.25, True, ""), (0.26, True, "with scale 0.26, not 0.25"), (0.25, False, "that ignores kv_lens and sees padding")],
)
@pytest.mark.attention(Workload(24, kv_lens=(24, 9), **HEADS), backward=True)
def test_an_esm_like_layer(attn, scale, is_padded, cause):
    mask = attn.additive_mask() if is_padded else 0.0
    judge(attn, attn.through(EsmLike(scale), **ESM, attention_mask=mask), cause)


@pytest.mark.attention(Workload(24, **HEADS))
def test_projections_by_each_others_name_are_told_as_that(attn):
    names = ESM | {"q": ESM["k"], "k": ESM["q"]}
    judge(attn, attn.through(EsmLike(), **names), "q and k in each other's place: are their names exchanged")


@pytest.mark.parametrize(("of_v", "cause"), [(2, ""), (1, "with k in place of v")])
@pytest.mark.attention(Workload(24, bias="hqk", **HEADS), backward=("q", "k", "v", "bias"))
def test_a_sam_like_layer_whose_bias_is_that_of_the_case(attn, of_v, cause):
    layer, bias = SamLike(of_v), {"relative": lambda q: attn.bias}
    judge(attn, attn.through(layer, **FUSED, replace=bias, call=lambda x: layer(x.unflatten(1, (4, 6)))), cause)


MADE = Workload(24, bias="bhqk", **HEADS)
OF_BIAS = [
    (lambda q: q, "", "out"),
    (lambda q: q * 0.25, "whose bias is scaled like the scores", "out"),
    (lambda q: q.roll(1, 1), "the bias of", "out"),
    (lambda q: q.detach(), "dq lacks what comes through the bias, which is made of q", "dq"),
]


@pytest.mark.parametrize(("of_bias", "cause", "wrong"), OF_BIAS, ids=["right", "scaled", "another head", "detached"])
@pytest.mark.attention(MADE, backward=True)
def test_a_bias_that_is_made_of_q(attn, of_bias, cause, wrong):
    layer = SamLike(of_bias=of_bias)
    through = attn.through(layer, **FUSED, bias=layer.relative, call=lambda x: layer(x.unflatten(1, (4, 6))))
    judge(attn, through, cause, wrong)


@pytest.mark.attention(MADE.replace(dtype="bfloat16"), layout="bshd", backward=True, precision="eager")
def test_a_bias_that_is_made_of_q_in_low_precision_and_in_the_other_layout(attn):
    layer = SamLike().bfloat16()
    through = attn.through(layer, **FUSED, bias=layer.relative, call=lambda x: layer(x.unflatten(1, (4, 6))))
    assert not attn.check(through).unjudged
    attn.check_invariants(through)
    with pytest.raises(
        ValueError, match=r"makes a bias of shape \(2, 4, 24, 23\) of q .*; the bias of .* is \(2, 4, 24, 24\)"
    ):
        attn.check(attn.through(layer, **FUSED, bias=lambda q: layer.relative(q)[..., 1:]))


@pytest.mark.parametrize(("diagonal", "cause"), [(1, ""), (2, "a causal mask that shows one key too many")])
@pytest.mark.attention(GPT, layout="bshd", backward=True)
def test_a_gpt_like_layer_in_the_other_layout(attn, diagonal, cause):
    judge(attn, attn.through(GptLike(diagonal)), cause)


@pytest.mark.attention(GPT)
def test_a_layer_is_left_as_it_was_whatever_happens(attn):
    layer = GptLike()
    before = {name: dict(vars(part)) for name, part in layer.named_modules()}
    attn.check_invariants(attn.through(layer))
    with pytest.raises(ZeroDivisionError):
        attn.through(layer, call=lambda x: 1 / 0)(attn.q, attn.k, attn.v)
    assert {name: dict(vars(part)) for name, part in layer.named_modules()} == before


WORDS = {
    "'GptLike' object has no attribute 'values'; its projections are to_q, to_k, to_v, to_out, first, ": {"v": "values"},
    "has no attribute 'rope'; its projections are to_q": {"replace": {"rope": abs}},
    "GptLike never called spare; its projections are to_q": {"q": "spare"},
    "GptLike hands (2, 24, 48) to first; expected (batch, tokens, heads * head_dim) = (2, 24, 64)": {"out": "first"},
    "first of GptLike makes 48 features; the workload's heads * head_dim are 64": {"q": "first"},
    "GptLike is called between projections, which make no packed sequences": {},
}


@pytest.mark.attention(Workload(heads=4, kv_heads=2, head_dim=16, q_lens=(9, 5), mask="causal"))
def test_packed_rows_are_declined(attn):
    with pytest.raises(pytest.skip.Exception, match="make no packed sequences or pages"):
        attn.check(attn.through(GptLike()))


@pytest.mark.attention(GPT)
def test_what_does_not_fit_is_said_in_a_line(attn):
    with pytest.raises(TypeError, match=r"needs a layer, got the class GptLike; pass GptLike\(\.\.\.\)"):
        attn.through(GptLike)
    with pytest.raises(TypeError, match="q must be the name of a projection, as 'to_q', got "):
        attn.through(layer := GptLike(), q=layer.to_q)
    with pytest.raises(ValueError, match=r"bias= makes a bias, and .* has none; say Workload\(..., bias='bhqk'\)"):
        attn.through(GptLike(), bias=abs)
    for words, given in WORDS.items():
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(words)):
            attn.through(GptLike(), **given)(*(t if given else t[0] for t in (attn.q, attn.k, attn.v)))
    attn.check(attn.through(GptLike()))
