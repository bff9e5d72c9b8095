"""Caches of models of any make: an honest one gives the rows of the whole, and each planted fault breaks what it is about."""

import pytest
import torch
from torch import nn

from pytest_attn.guests.models.token_invariants import judge_model_invariants

IDS = torch.randint(64, (3, 30), generator=torch.Generator().manual_seed(1))


def rotated(t, at):
    """Rotate pairs of features, (batch, heads, tokens, 16), by angles of positions, (batch, tokens)."""
    angles = at[:, None, :, None] * 10.0 ** (-torch.arange(8) / 4)
    one, other = t.chunk(2, -1)
    return torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1)


class Attention(nn.Module):
    """Attention that keeps keys and values in a buffer, which nobody clears. fault: what its cache gets wrong."""

    def __init__(self, fault):
        super().__init__()
        self.qkv, self.out, self.fault = nn.Linear(32, 96), nn.Linear(32, 32), fault
        self.register_buffer("cache", torch.zeros(2, 3, 2, 32, 16), persistent=False)
        with torch.no_grad():
            self.qkv.weight[:64] *= 4

    def forward(self, x, positions):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        at = torch.arange(x.shape[1]).expand(x.shape[:2]) if positions is None else positions
        turned = at + (self.fault == "rotation off by one" and x.shape[1] == 1)
        q, k = rotated(q, turned), rotated(k, at)
        seen = torch.arange(x.shape[1]) <= at[:, None, :, None]
        if positions is not None:
            self.cache[:, :, :, at[0]] = torch.stack([k, v])
            if self.fault == "last entry overwritten" and x.shape[1] == 1:
                self.cache[:, :, :, at[0, 0] - 1] = self.cache[:, :, :, at[0, 0]]
            k, v = self.cache
            seen = torch.arange(32) <= at[:, None, :, None]
            if self.fault == "prefill sees what was there" and not int(at[0, 0]):
                seen = torch.ones_like(seen)
            if self.fault == "key of the last sequence":
                seen = seen | (torch.arange(32) == 25) & self.cache[0, 0, 0].any(-1)
            if self.fault == "tokens at once see each other" and x.shape[1] == 3:
                seen = seen | (torch.arange(32) <= at[0, -1])
        scores = (q @ k.mT / 4).masked_fill(~seen, -torch.inf)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Gpt(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList([Attention(""), Attention(fault)])

    def forward(self, ids, positions=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


def report(fault="", returned=lambda logits, state: (logits, state), **options):
    model = Gpt(fault)
    return judge_model_invariants(
        model, IDS, step=lambda ids, positions, state: returned(model(ids, positions), (state or 0) + 1), **options
    )


NAMES = {"decoding", "chunks", "warm"}


def test_a_cache_that_is_right_keeps_all():
    found = report()

    assert found.passed
    assert {one.invariant for one in found.applied} == {"future", "order", *NAMES}
    assert report(returned=lambda logits, state: (logits[:, -1:], None), only=NAMES).passed


@pytest.mark.parametrize(
    ("fault", "evidence"),
    {
        "last entry overwritten": {"decoding": "decoding by step: ", "warm": "decoding by step, after other tokens: "},
        "rotation off by one": {"decoding": "decoding by step: ", "warm": "decoding by step, after other tokens: "},
        "tokens at once see each other": {"chunks": "3 tokens at once by step: "},
        "prefill sees what was there": dict.fromkeys(NAMES, "prefill by step"),
    }.items(),
)
def test_each_fault_of_a_cache_breaks_what_it_is_about(fault, evidence):
    broken = {one.invariant: one.evidence for one in report(fault).broken}

    assert broken.keys() == evidence.keys()
    assert all(broken[name].startswith(words) for name, words in evidence.items())


def test_a_cold_cache_hides_what_a_warm_one_shows():
    fault = "key of the last sequence"

    assert report(fault, only="decoding").passed
    assert not report(fault, only="warm").passed


def test_a_cache_is_asked_only_where_a_step_is_given():
    found = judge_model_invariants(Gpt(), IDS)

    assert not NAMES & {one.invariant for one in found.applied}
    assert "step= is not given" in next(one.evidence for one in found.findings if one.invariant == "warm")


class Hooked(nn.Module):
    """A decoder whose step has hooks fill a dict, as Whisper's has; each token's position is how many the dict has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(64, 32), nn.Embedding(32, 32)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.hooks = []

    def forward(self, ids, cache=None):
        first = cache[self.k].shape[1] if cache else 0
        at = torch.arange(first, first + ids.shape[1])
        x = self.embed(ids) + self.places(at)
        q, k, v = self.q(x), self.k(x), self.v(x)
        seen = torch.arange(k.shape[1]) <= at[:, None]
        return x + (q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1) @ v

    def step(self, ids, positions, cache):
        if cache is None:
            cache = {}
            while self.hooks:
                self.hooks.pop().remove()

            def joined(part, _, output):
                cache[part] = torch.cat([cache[part], output], 1) if part in cache else output
                return cache[part]

            self.hooks += [part.register_forward_hook(joined) for part in (self.k, self.v)]
        return self(ids, cache), cache


@pytest.mark.attention_model(device="cpu")
def test_hooks_that_fill_a_dict_are_a_cache(attn_model):
    model = Hooked()

    assert len(attn_model.check_invariants(model, IDS, step=model.step, only=NAMES).applied) == 3
    with pytest.raises(AssertionError, match="decoding by step"):
        attn_model.check_invariants(model, IDS, step=lambda ids, at, state: model.step(ids * (at != 20), at, state))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (
            lambda logits, state: logits,
            "step returned Tensor; expected (logits, state), logits (3, 15, 64), or (3, 1, 64)",
        ),
        (lambda logits, state: (logits[0], state), "step returned torch.Size([15, 64]); expected (logits, state)"),
    ],
)
def test_what_a_step_must_return_is_said(returned, words):
    with pytest.raises(TypeError) as caught:
        report(returned=returned, only="decoding")
    assert words in str(caught.value)


@pytest.mark.attention_model(device="cpu")
def test_a_step_is_a_function(attn_model):
    with pytest.raises(TypeError, match=r"step must be a function of \(ids, positions, state\), got "):
        attn_model.check_invariants(Gpt(), IDS, step="step")
