"""Layers that are built alike, one of which asks its attention for something else; and those that differ on purpose."""

from functools import partial
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import HEADS, TOKENS, Attention, case_of, full, layers_of, stack
from torch import nn

from pytest_attn.guests.models.check_model import judge_model

AHEAD = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
REAL = torch.ones(2, TOKENS, dtype=torch.bool)
REAL[1, :9] = False  # padded on the left


def attend(
    q, k, v, scale=None, window=None, ahead=0, hole=None, is_padded=True, order="interleaved", order_of_v="", change=None
):
    visible = (-ahead <= AHEAD) & ((window or TOKENS) > AHEAD) & (hole != AHEAD)
    if is_padded:
        visible = visible & REAL[:, None, None] | torch.eye(TOKENS, dtype=torch.bool)
    q, k, v = change(q, k, v) if change else (q, k, v)
    k, v = (_shared(t, how) for t, how in ((k, order), (v, order_of_v or order)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)


def _shared(tensor, order):
    """Two heads as they are repeated to as many as q has, or as they are."""
    if order == "grouped":
        return tensor
    return tensor.repeat_interleave(2, 1) if order == "interleaved" else tensor.repeat(1, 2, 1, 1)


def misled(model, **options):
    """Return what a check says of the layers of a model that ask for something else, by name."""
    return {call.label: call.misled for call in judge_model(*case_of(model), **options).calls if call.misled}


def one_odd(calls, at, odd, usual):
    """Return attention that attends with other options in one of so many calls."""
    options = cycle([odd if number == at else usual for number in range(calls)])
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **next(options))


def wrong(*layers, backward=False):
    """Return what a check says of layers, each of which attends with options of its own, by number."""
    model = layers_of(*(partial(attend, **options) for options in layers), heads=HEADS, kv_heads=2)
    found = judge_model(*case_of(model), backward=backward)
    return {number: call.misled for number, call in enumerate(found.calls) if call.misled}


SCALE = "its scale is {}, and {} in blocks.{}.attn, which is the same kind of module"
SCALES = [
    ((0.25, 0.25, 0.5), {2: SCALE.format(0.5, 0.25, 0)}),
    ((0.25, 0.0625, 0.25), {1: SCALE.format(0.0625, 0.25, 0)}),
    ((None, 0.2525), {1: SCALE.format(0.2525, 0.25, 0)}),
    ((0.2525, None, 0.25), {0: SCALE.format(0.2525, 0.25, 1)}),
    ((0.3, 0.3, 0.31), {2: SCALE.format(0.31, 0.3, 0)}),
    ((None, 0.35), {1: SCALE.format(0.35, 0.25, 0)}),
]
MEANT = [
    *((0.2525,), (0.2525, 0.2525), (0.25, 1.0), (None, 0.125), (0.3, 0.31), (1.0, 1.0)),
    *((0.25, 0.25, 1.0), (0.25, 0.125, 0.0625), (0.1, 0.1, 0.5), (None, 1.0, 0.25)),
    *((0.25, 0.25, 1.0, 1.0), (None, 0.2, 0.17, 0.3), (None, 0.2, None, 0.2)),
]


@pytest.mark.parametrize(("scales", "said"), [*SCALES, *((scales, {}) for scales in MEANT)], ids=str)
def test_a_scale_is_wrong_where_the_right_one_is_known_and_no_other_is_meant(scales, said):
    assert wrong(*({"scale": scale} for scale in scales)) == said


BEHIND = [
    ((8, 9, 8), {1: "its window is 9 keys, and 8 in blocks.0.attn, which is the same kind of module"}),
    ((8, 7), {1: "its window is 7 keys, and 8 in blocks.0.attn, which is the same kind of module"}),
    ((8, None, 8, None), {}),
    ((8, 9, 8, 9), {}),
    ((8, 16, 8), {}),
    ((8, 9, 10), {}),
    ((TOKENS - 1, None, TOKENS - 1), {}),
]
TO_BOTH_SIDES = [
    ((8, 7, 8), {1: "its window is 13 keys, and 15 in blocks.0.attn, which is the same kind of module"}),
    ((8, 8, 7, 7), {}),
    ((8, 5, 8), {}),
]
WINDOWS = [*((False, *one) for one in BEHIND), *((True, *one) for one in TO_BOTH_SIDES)]


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("both", "windows", "said"), WINDOWS, ids=str)
def test_a_window_that_is_off_by_one_from_all_others_is_wrong(both, windows, said, is_padded):
    layers = ({"window": keys, "ahead": keys - 1 if both else 0, "is_padded": is_padded} for keys in windows)
    assert wrong(*layers) == said


OFF = "its causal mask shows one key {}, and the right ones in blocks.{}.attn, which is the same kind of module"
DIAGONALS = [
    ((0, 1, 0), {1: OFF.format("too many", 0)}),
    ((0, -1, 0), {1: OFF.format("too few", 0)}),
    ((1, 0), {0: OFF.format("too many", 1)}),
    ((0, 0, -1), {2: OFF.format("too few", 0)}),
    ((-1, 0, 0), {0: OFF.format("too few", 1)}),
    ((0, 1, 0, 1), {}),
    ((1, 1, 1), {}),
    ((0, 2, 0), {}),
    ((0, TOKENS, 0), {}),
]


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("ahead", "said"), DIAGONALS, ids=str)
def test_a_causal_mask_that_is_one_key_off_in_one_layer_is_wrong(ahead, said, is_padded):
    sees_own = is_padded and -1 in ahead  # where rows of padding see themselves, all do
    assert wrong(*({"ahead": keys, "is_padded": is_padded} for keys in ahead)) == ({} if sees_own else said)


@pytest.mark.parametrize("at", range(3))
def test_a_layer_that_says_that_it_sees_no_own_key_means_it(at):
    ahead = [-1 if number == at else 0 for number in range(3)]
    model = layers_of(*(partial(attend, ahead=keys, is_padded=False) for keys in ahead), kv_heads=2)
    found = judge_model(*case_of(model), backward=False)
    assert "if it is to differ, let a setting of the module say so" in found.message
    model.blocks[at].attn.is_strict = True
    assert not [call.misled for call in judge_model(*case_of(model), backward=False).calls if call.misled]


def test_calls_of_one_module_with_a_mask_of_each_kind_are_meant():
    model = stack(lambda q, k, v: q, kv_heads=2)
    for block in model.blocks:  # the two streams of XLNet
        block.attn.attend = lambda q, k, v: attend(q, k, v, is_padded=False) + attend(q, k, v, is_padded=False, ahead=-1)
    assert not [call.misled for call in judge_model(*case_of(model), backward=False).calls if call.misled]


def test_how_far_keys_lie_that_are_chosen_one_by_one_is_no_window():
    assert not wrong(*({"window": window, "hole": 3} for window in (8, 9, 8)))
    assert not wrong(*({"window": window, "ahead": window - 2} for window in (8, 9, 8)))


def test_heads_that_share_keys_in_another_order_than_in_other_layers_are_wrong():
    said = "its heads share keys as 0-1-0-1, and as 0-0-2-2 in blocks.0.attn, which is the same kind of module"
    assert wrong({}, {"order": "tiled"}, {}) == {1: said}
    assert not wrong({"order": "tiled"}, {"order": "tiled"})
    assert wrong({"order": "grouped"}, {"order": "tiled"}, {"order": "grouped"}) == {1: said}
    assert not wrong({"order": "grouped"}, {}, {"order": "grouped"})


def _first_keys_for_all(q, k, v):
    return q, k[:, :1].expand_as(k), v


def test_heads_that_all_have_the_first_keys_are_wrong_where_siblings_have_more():
    said = "its heads share keys as 0-0-0-0, and as 0-0-2-2 in blocks.0.attn, which is the same kind of module"
    assert wrong({}, {"change": _first_keys_for_all}, {}) == {1: said}
    assert not wrong(*[{"change": lambda q, k, v: (q, 0 * k, v)}] * 2, {})


def test_heads_that_share_values_in_another_order_than_keys_are_wrong():
    assert wrong({}, {"order_of_v": "tiled"}) == {1: "its heads share keys as 0-0-2-2, and values as 0-1-0-1"}


ALIKE = "which is the same kind of module"
CHANGES = {
    "k detached": (lambda q, k, v: (q, k.detach(), v), f"its k gets no gradient, and k gets one in blocks.0.attn, {ALIKE}"),
    "k in place of v": (
        lambda q, k, v: (q, k, k),
        f"its v.weight gets no gradient, and v.weight gets one in blocks.0.attn, {ALIKE}",
    ),
    "rounded": (
        lambda q, k, v: (q, k.bfloat16().float(), v),
        f"its q, k or v was rounded to bfloat16, and none was in blocks.0.attn, {ALIKE}",
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CHANGES)
def test_what_one_layer_alone_leaves_out_or_rounds_is_wrong_but_in_the_first_and_the_last(name):
    change, said = CHANGES[name]
    odd = {"change": change}

    assert said in wrong({}, odd, {}, backward=True)[1]
    for layers in ((odd, {}, {}), ({}, {}, odd), (odd, odd, odd), ({}, odd, odd, {})):
        assert not wrong(*layers, backward=True)


def test_a_layer_whose_result_has_no_gradient_is_wrong():
    model = stack(attend, 3, kv_heads=2)
    model.blocks[1].attn.attend = lambda q, k, v: attend(q, k, v).detach()

    found = misled(model)
    assert list(found) == ["blocks.1.attn"]
    assert "gets no gradient, and" in found["blocks.1.attn"]


@pytest.mark.parametrize("lose", [torch.detach, torch.zeros_like], ids=["detached", "dropped"])
def test_a_layer_whose_result_does_not_count_is_wrong_but_in_the_last(lose):
    def found(at):
        model = stack(attend, 4, kv_heads=2)
        model.blocks[at].attn.register_forward_hook(lambda part, args, out: lose(out))
        return misled(model)

    assert found(1) == {"blocks.1.attn": f"its q gets no gradient, and q gets one in blocks.0.attn, {ALIKE}"}
    assert not found(3)


def test_a_module_that_runs_several_times_may_count_once():
    model = stack(attend, 1, kv_heads=2)
    x = torch.randn(3, 2, TOKENS, 64)

    assert judge_model(model, lambda: (model(x[0]) + model(x[1]).detach() + model(x[2])).square().mean()).passed


class Normed(Attention):
    """Has norms of q and k, which it uses where it is told so."""

    def __init__(self, uses):
        super().__init__(full)
        self.uses, self.q_norm, self.k_norm = uses, nn.LayerNorm(64), nn.LayerNorm(64)
        self.added_norm = nn.LayerNorm(64)

    def forward(self, x):
        q, k = (self.q_norm(self.q(x)), self.k_norm(self.k(x))) if self.uses else (self.q(x), self.k(x))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, self.v(x)))
        return self.out(full(q, k, v).transpose(1, 2).flatten(2))


def test_norms_of_q_and_k_that_no_layer_uses_are_told():
    said = "its module has q_norm, and does not use it: its weights get no gradient, and q, k or v get one"
    found = judge_model(*case_of(layers_of(Normed(uses=False), Normed(uses=False))))

    assert [call.misled for call in found.calls] == [said, said]
    assert judge_model(*case_of(layers_of(Normed(uses=True), Normed(uses=True)))).passed
    assert judge_model(*case_of(layers_of(Normed(uses=True), Normed(uses=False)))).passed  # it may have others' keys
    cached = layers_of(Normed(uses=False), Normed(uses=False))
    frozen = layers_of(Normed(uses=False), Normed(uses=False))
    for block in cached.blocks:
        block.attn.k.requires_grad_(False)
    assert judge_model(*case_of(cached)).passed
    for block in frozen.blocks:
        block.attn.q_norm.requires_grad_(False)
        block.attn.k_norm.requires_grad_(False)
    assert judge_model(*case_of(frozen)).passed


def test_a_bias_that_one_layer_alone_leaves_out_is_told_unless_a_setting_says_so():
    def found(odd, **settings):
        bias = -AHEAD.abs()[None, None] / 16
        model = stack(one_odd(4, odd, {"attn_mask": 0 * bias}, {"attn_mask": bias}), 4)
        vars(model.blocks[1].attn).update(settings)
        return misled(model)

    assert found(1) == {"blocks.1.attn": f"nothing is added to its scores, and a bias is in blocks.0.attn, {ALIKE}"}
    assert not found(1, is_global=True)
    assert not found(0)
    assert not found(None)


class Across(nn.Module):
    """A layer of a decoder, which hands another sequence on as `of` makes it."""

    def __init__(self, of):
        super().__init__()
        self.cross, self.of = Crossing(), of

    def forward(self, x, memory):
        return x + self.cross(x, key_value_states=self.of(memory, x))


class Crossing(Attention):
    def __init__(self):
        super().__init__(full)
        self.reads = lambda memory: memory

    def forward(self, x, key_value_states):
        return super().forward(x, self.reads(key_value_states))


OTHERS = {
    "of another entry": lambda memory, x: memory.flip(0),
    "of the first entry": lambda memory, x: memory[:1].expand_as(memory),
    "detached": lambda memory, x: memory.detach(),
    "its own": lambda memory, x: x,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("is_within", [False, True], ids=["handed", "read"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_attends_to_another_sequence_than_all_others_is_wrong(name, is_within):
    def found(*sources):
        torch.manual_seed(0)
        x, memory = torch.randn(2, TOKENS, 64), torch.randn(2, 30, 64, requires_grad=True)
        layers = nn.ModuleList(Across(same if is_within else source) for source in sources)
        for layer, source in zip(layers, sources, strict=True):
            if is_within:
                layer.cross.reads = lambda memory, source=source: source(memory, x)

        def step():
            states = x
            for layer in layers:
                states = layer(states, memory)
            return states.square().mean()

        return {call.module: call.misled for call in judge_model(layers, step).calls if call.misled}

    def same(memory, x):
        return memory

    other = OTHERS[name]
    said = f"it does not attend to the sequence that is attended to in 0.cross, {ALIKE}"
    assert found(same, other, same) == {"1.cross": said}
    assert not found(same, same, other)
    assert not found(same, other, lambda memory, x: 2 * memory, same)


class Processor:
    """Attends with a mask that nothing of it says."""

    def __init__(self, is_causal):
        self._is_causal = is_causal

    def __call__(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self._is_causal)


def test_a_mask_that_one_layer_of_many_has_from_nowhere_is_wrong_and_one_that_a_setting_says_is_not():
    def found(odd, shared=True, **settings):
        model = stack(one_odd(6, odd, {"is_causal": True}, {}), 6)
        if not shared:  # each has one of its own, as diffusers have processors
            for at, block in enumerate(model.blocks):
                block.attn.attend = Processor(at == odd)
        vars(model.blocks[2].attn).update(settings)
        return misled(model, backward=False)

    said = "its mask hides keys, and no key is hidden in blocks.0.attn, which is the same kind of module"
    assert found(2) == {"blocks.2.attn": said}
    assert found(2, layer_idx=2) == {"blocks.2.attn": said}
    assert found(2, shared=False) == {"blocks.2.attn": said}
    assert not found(0)
    assert not found(2, is_local=True)


def test_a_mask_of_its_own_among_many_is_wrong_unless_a_setting_or_the_configuration_says_so():
    def found(window, odd=2, **settings):
        odd_one, usual = ({"attn_mask": (AHEAD.abs() < keys) & (AHEAD != 2)} for keys in (window, 8))
        model = stack(one_odd(6, odd, odd_one, usual), 6)
        for number, block in enumerate(model.blocks):
            block.attn.layer_idx = number
            vars(block.attn).update(settings)
        return misled(model, backward=False)

    said = f"its mask shows other keys than those that are shown in blocks.0.attn, {ALIKE}"
    assert found(12) == {"blocks.2.attn": said}
    assert not found(12, odd=0)
    kinds = ["window"] * 6
    assert found(12, config=SimpleNamespace(layer_types=kinds)) == {"blocks.2.attn": said}
    assert not found(12, config=SimpleNamespace(layer_types=[*kinds[:2], "full", *kinds[3:]]))
