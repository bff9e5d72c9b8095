"""Attention that a layer writes out, beside layers that call a function; and softmaxes that are none."""

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import DIM, HEADS, TOKENS, Attention, Block, Model, Of, case_of, causal, full, layers_of, stack
from torch import nn

from pytest_attn import check_model
from pytest_attn.guests.models.check_model import judge_model

BIAS = torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))
VISIBLE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def operators(q, k, v):
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v


def scaled_before(q, k, v):
    return torch.matmul(F.dropout(torch.softmax(torch.matmul(q * 0.3, k.mT), dim=-1), 0.0), v)


def in_place(q, k, v):
    scores = q @ k.mT
    scores *= 0.3
    scores += BIAS
    scores.masked_fill_(~VISIBLE, float("-inf"))
    return F.softmax(scores, dim=3, dtype=torch.float32).to(q.dtype) @ v


def sums(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.3
    return torch.einsum("bhij,bhjd->bhid", nn.Softmax(dim=-1)(scores - scores.amax(-1, keepdim=True)), v)


def folded(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(torch.zeros(len(q), TOKENS, TOKENS), q, k.mT, beta=0, alpha=0.3)
    return torch.bmm(scores.softmax(2), v).view(-1, HEADS, TOKENS, DIM // HEADS)


def with_sinks(q, k, v):
    scores = torch.cat([q @ k.mT * 0.3, torch.zeros(len(q), HEADS, TOKENS, 1)], dim=-1)
    return scores.softmax(-1)[..., :-1] @ v


def in_blocks(q, k, v):
    q, k, v = (t.unflatten(2, (5, 9)) for t in (q, k, v))
    return ((q @ k.mT * 0.3).softmax(-1) @ v).flatten(2, 3)


MIX = torch.eye(HEADS)


def talking_heads(q, k, v):
    scores = F.linear((q @ k.mT * 0.3).permute(0, 2, 3, 1), MIX).permute(0, 3, 1, 2)
    return F.linear(scores.softmax(-1).permute(0, 2, 3, 1), MIX).permute(0, 3, 1, 2) @ v


def of_channels(q, k, v):
    return ((q.mT @ k * 0.3).softmax(-1) @ v.mT).mT


def of_queries_alone(q, k, v):
    weights = (q[..., :9, None] * q[..., None, :9]).softmax(-1)  # of nine neighbors, (batch, heads, rows, 9, 9)
    return v + (weights @ v[..., None, :].expand(-1, -1, -1, 9, -1)).sum(-2)


def of_samples(q, k, v):
    weights = q[..., :4].softmax(-1)
    return (v[..., None, :] * weights[..., None]).sum(-2)


WRITTEN_OUT = [
    operators,
    scaled_before,
    in_place,
    sums,
    folded,
    with_sinks,
    in_blocks,
    talking_heads,
    of_channels,
    of_queries_alone,
    of_samples,
]


def mixed(attend, others=full):
    """Return a model whose middle layer writes its attention out."""
    torch.manual_seed(0)
    return case_of(layers_of(others, attend, others))


@pytest.mark.parametrize("attend", WRITTEN_OUT)
def test_attention_written_out_in_one_layer_is_not_taken_for_judged(attend):
    model, step = mixed(attend)

    with pytest.raises(AssertionError, match=r"not judged: blocks\.1\.attn computes a softmax of its own over \(") as failure:
        check_model(model, step)
    assert "through no attention function" in str(failure.value)
    assert "is then judged; inline=['blocks.1.attn'] leaves this out, unjudged" in str(failure.value)


@pytest.mark.parametrize("inline", ["blocks.1.attn", ["blocks.*.attn"]])
@pytest.mark.parametrize("backend", [None, "math"])
def test_a_layer_that_the_test_names_is_left_out_with_a_note(inline, backend):
    found = check_model(*mixed(operators), backend, inline=inline)

    assert [call.module for call in found.calls] == ["blocks.0.attn", "blocks.2.attn"]
    assert "not judged, because inline= names them: blocks.1.attn" in found.notes


def test_what_is_left_out_must_be_there():
    with pytest.raises(AssertionError, match=r"blocks\.0\.attn was named in inline=, and computes no attention of its own"):
        check_model(*mixed(operators), inline=["blocks.0.attn", "blocks.1.attn"])


class Fused(Attention):
    """Another class than that of its neighbors, as a hand-wrapped layer is; calls a function as well."""

    def forward(self, x, context=None):
        first = super().forward(x)
        return first + operators(*(first.unflatten(-1, (HEADS, -1)).transpose(1, 2),) * 3).transpose(1, 2).flatten(2)


def test_attention_beside_a_call_of_the_same_layer_is_seen():
    torch.manual_seed(0)
    model, step = case_of(Model(Block(Attention(causal)), Block(Fused(causal))))

    with pytest.raises(AssertionError, match=r"not judged: blocks\.1\.attn computes .*, beside the calls that were judged"):
        check_model(model, step)


def test_layers_without_any_call_are_told_what_to_do():
    torch.manual_seed(0)
    model, step = case_of(layers_of(operators, in_place))

    with pytest.raises(AssertionError) as failure:
        check_model(model, step)
    assert "no attention call was caught: nothing was judged" in str(failure.value)
    assert "ran in blocks.0.attn, blocks.1.attn: is attention computed inline there?" in str(failure.value)
    assert "do         have it call a function of (q, k, v, ...), and name that: functions=[my_function]" in str(failure.value)


def test_a_model_without_a_softmax_is_told_of_what_it_may_compute_inline():
    def by_hand(q, k, v):
        p = (q @ k.mT / q.shape[-1] ** 0.5).exp()
        return p / p.sum(-1, keepdim=True) @ v

    with pytest.raises(AssertionError, match="or make one of what it computes inline: functions="):
        check_model(*case_of(layers_of(by_hand)))


def test_a_layer_of_torch_that_returns_its_weights_writes_attention_out():
    first, second = (nn.MultiheadAttention(DIM, HEADS, batch_first=True) for _ in range(2))
    model = Of(lambda own, x: second(*(first(x, x, x, need_weights=False)[0],) * 3)[0], first=first, second=second)
    x = torch.randn(2, TOKENS, DIM)
    with pytest.raises(AssertionError, match=r"not judged: second computes a softmax of its own over \(2, 4, 45, 45\)"):
        check_model(model, lambda: model(x), backward=False)


# -- softmaxes that are no attention -------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Chooses two of four experts for each token. folds: tokens and batch are one dimension, as in most models."""

    def __init__(self, folds):
        super().__init__()
        self.router, self.up = nn.Linear(DIM, 4), nn.Parameter(torch.randn(4, DIM, DIM) / 8)
        self.folds = folds

    def forward(self, x):
        shape = x.shape
        x = x.flatten(0, 1) if self.folds else x
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        each = torch.einsum("...d,edf->...ef", x, self.up)
        out = each.gather(-2, chosen[..., None].expand(*chosen.shape, DIM))
        return (out * weights[..., None]).sum(-2).view(shape)


def gate(own, x):
    x = x.unflatten(-1, (HEADS, -1))
    return (x * own.weigh(x).softmax(-1)).flatten(2)


def branches(own, x):
    both = torch.stack([x, 2 * x], 1)  # which are its second dimension
    return (both * both.mean((2, 3), keepdim=True).softmax(1)).sum(1)


def streams(own, x):
    mixes = own.weigh(x).unflatten(-1, (4, 4)).softmax(-1)
    return (mixes @ x.unflatten(-1, (4, -1))).flatten(2)


NO_ATTENTION = {
    "experts of all tokens": lambda: Experts(True),
    "experts of each sequence": lambda: Experts(False),
    "a gate over channels": lambda: Of(gate, weigh=nn.Linear(DIM // HEADS, DIM // HEADS)),
    "a mean over tokens": lambda: Of(
        lambda own, x: x + (own.weigh(x).softmax(1) * x).sum(1, keepdim=True), weigh=nn.Linear(DIM, 1)
    ),
    "a mean embedding": lambda: Of(
        lambda own, x: (x @ own.embed.weight.T).softmax(-1) @ own.embed.weight, embed=nn.Embedding(30, DIM)
    ),
    "weights of branches": lambda: Of(branches),
    "four streams of each token, as of hyper-connections": lambda: Of(streams, weigh=nn.Linear(DIM, 16)),
    "products without a softmax": lambda: Of(lambda own, x: x + x @ (x.mT @ x) / 1e3),
}


@pytest.mark.parametrize("part", NO_ATTENTION.values(), ids=NO_ATTENTION)
def test_a_softmax_that_is_something_else_fails_nothing(part):
    torch.manual_seed(0)
    model = stack(causal)
    model.blocks[1].mlp = part()
    model, step = case_of(model)

    assert judge_model(model, step).passed
    x = torch.randn(2, TOKENS, DIM)
    assert judge_model(model, lambda: model(x).softmax(-1), backward=False).passed
