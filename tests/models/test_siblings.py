"""Layers that are built alike, one of which asks its attention for something else; and those that differ on purpose."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from models.zoo import HEADS, TOKENS, Attention, Block, Model, case_of

from pytest_attn.models.check import judge_model

AHEAD = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
REAL = torch.ones(2, TOKENS, dtype=torch.bool)
REAL[1, :9] = False  # padded on the left


def attend(q, k, v, scale=None, window=None, is_padded=True, order="interleaved", order_of_v=""):
    visible = (AHEAD >= 0) & ((window or TOKENS) > AHEAD)
    if is_padded:
        visible = visible & REAL[:, None, None] | torch.eye(TOKENS, dtype=torch.bool)
    k, v = (_shared(t, how) for t, how in ((k, order), (v, order_of_v or order)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)


def _shared(tensor, order):
    """Two heads as they are repeated to as many as q has."""
    return tensor.repeat_interleave(2, 1) if order == "interleaved" else tensor.repeat(1, 2, 1, 1)


def wrong(*layers):
    """Return what a check says of layers, each of which attends with options of its own, by number."""
    torch.manual_seed(0)
    model = Model(*(Block(Attention(partial(attend, **options), heads=HEADS, kv_heads=2)) for options in layers))
    found = judge_model(*case_of(model), backward=False)
    return {number: call.misled for number, call in enumerate(found.calls) if call.misled}


SCALES = [
    ((0.25, 0.25, 0.5), {2: "its scale is 0.5, and 0.25 in blocks.0.attn, which is the same kind of module"}),
    ((0.25, 0.25, 1.0), {}),
    ((0.25, 0.0625, 0.25), {1: "its scale is 0.0625, and 0.25 in blocks.0.attn, which is the same kind of module"}),
    ((0.25, 1.0), {}),
    ((0.25, 0.125, 0.0625), {}),
    ((0.25, 0.25, 1.0, 1.0), {}),
    ((0.1, 0.1, 0.5), {}),
]


@pytest.mark.parametrize(("scales", "said"), SCALES, ids=str)
def test_a_scale_that_is_far_from_that_of_all_others_is_wrong_where_these_have_the_usual_one(scales, said):
    assert wrong(*({"scale": scale} for scale in scales)) == said


WINDOWS = [
    ((8, 9, 8), {1: "its window is 9 keys, and 8 in blocks.0.attn, which is the same kind of module"}),
    ((8, 7), {1: "its window is 7 keys, and 8 in blocks.0.attn, which is the same kind of module"}),
    ((8, None, 8, None), {}),
    ((8, 9, 8, 9), {}),
    ((8, 16, 8), {}),
    ((8, 9, 10), {}),
    ((TOKENS - 1, None, TOKENS - 1), {}),
]


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("windows", "said"), WINDOWS, ids=str)
def test_a_window_that_is_off_by_one_from_all_others_is_wrong(windows, said, is_padded):
    assert wrong(*({"window": window, "is_padded": is_padded} for window in windows)) == said


def test_heads_that_share_keys_in_another_order_than_in_other_layers_are_wrong():
    said = "its heads share keys as 0-1-0-1, and as 0-0-2-2 in blocks.0.attn, which is the same kind of module"
    assert wrong({}, {"order": "tiled"}, {}) == {1: said}
    assert not wrong({"order": "tiled"}, {"order": "tiled"})


def test_heads_that_share_values_in_another_order_than_keys_are_wrong():
    assert wrong({}, {"order_of_v": "tiled"}) == {1: "its heads share keys as 0-0-2-2, and values as 0-1-0-1"}
