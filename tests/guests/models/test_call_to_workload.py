import math

import pytest
import torch

from pytest_attn.guests.models.call_to_workload import (
    AttentionArguments,
    StoredMask,
    UnreadableError,
    asks_the_same,
    recognize,
    split_additive,
    to_inputs,
)
from pytest_attn.workloads.masks import BooleanMask, Causal, Document, MaskModMask, Sequences, Window
from pytest_attn.workloads.workload import Workload

STRUCTURED = [
    (Causal(), 20, 20),
    (Causal(), 20, 33),
    (Causal(bottom_right=True), 20, 33),
    (Window(4, 0), 20, 20),
    (Window(4, 2), 20, 33),
    (Window(None, 3), 20, 20),
    (Document((5, 7, 8)), 20, 20),
    (Document((5, 7, 8), causal=True), 20, 20),
]


def tensor_of(mask, q_len, kv_len):
    q, kv = torch.arange(q_len)[:, None], torch.arange(kv_len)
    zero = torch.zeros((), dtype=torch.long)
    return mask.bind(Sequences(1, 1, q_len, kv_len, torch.device("cpu")))(zero, zero, q, kv)[None, None]


@pytest.mark.parametrize(("mask", "q_len", "kv_len"), STRUCTURED, ids=str)
def test_a_structured_mask_is_recognized(mask, q_len, kv_len):
    assert recognize(tensor_of(mask, q_len, kv_len), q_len, kv_len) == (mask, None)


@pytest.mark.parametrize(("mask", "q_len", "kv_len"), STRUCTURED, ids=str)
def test_one_element_more_or_less_is_kept_as_the_tensor_that_it_is(mask, q_len, kv_len):
    for at in ((0, 0, 9, 9), (0, 0, 3, kv_len - 1)):
        visible = tensor_of(mask, q_len, kv_len).clone()
        visible[at] ^= True
        found, lengths = recognize(visible, q_len, kv_len)

        assert lengths is None
        assert isinstance(found, BooleanMask)
        assert torch.equal(found.factory(1, 1, q_len, kv_len, visible.device), visible)


def test_nothing_hidden_is_no_mask():
    assert recognize(torch.ones(2, 1, 1, 9, dtype=torch.bool), 5, 9) == (None, None)


@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
def test_padding_at_the_end_becomes_lengths(mask):
    inside = torch.arange(12) < torch.tensor([12, 7])[:, None]
    visible = inside[:, None, None] if mask is None else inside[:, None, None] & tensor_of(mask, 12, 12)

    assert recognize(visible, 12, 12) == (mask, (12, 7))


def test_padding_at_the_start_is_kept_as_a_tensor():
    visible = (torch.arange(12) >= torch.tensor([0, 5])[:, None])[:, None, None]

    assert isinstance(recognize(visible, 12, 12)[0], BooleanMask)


def test_an_additive_mask_of_zeros_and_infinities_hides_and_adds_nothing():
    visible, bias = split_additive(torch.tensor([[[[0.0, -math.inf], [0.0, 0.0]]]]))

    assert bias is None
    assert visible.tolist() == [[[[True, False], [True, True]]]]


def test_a_bias_that_hides_as_well_is_split_into_both():
    visible, bias = split_additive(torch.tensor([[[[0.5, torch.finfo(torch.float32).min], [0.0, 0.0]]]]))

    assert visible.tolist() == [[[[True, False], [True, True]]]]
    assert bias.tolist() == [[[[0.5, 0.0], [0.0, 0.0]]]]


def test_a_row_that_is_hidden_by_finite_numbers_only_is_kept_as_a_sum():
    mask = torch.full((1, 1, 2, 2), torch.finfo(torch.float32).min)

    assert split_additive(mask) == (None, mask)
    assert not split_additive(torch.full((1, 1, 2, 2), torch.finfo(torch.float16).min, dtype=torch.float16))[0].any()


def capped(by, than=0.0, sign=1):
    return lambda score, b, h, q, kv, factor=sign: by * torch.tanh(score / by) * factor + than


def stored(visible):
    return Workload(2, batch=2, mask=BooleanMask(StoredMask(visible)))


SEEN = torch.tensor([[[[True, False], [True, True]]]])
A_TENSOR = torch.zeros(2)
SAME = {
    "equal": (Workload(8, mask="causal"), Workload(8, mask="causal"), True),
    "longer": (Workload(8), Workload(9), False),
    "another mask": (Workload(8, mask="causal"), Workload(8, mask=Window(3, 0)), False),
    "equal tensors": (stored(SEEN), stored(SEEN.clone()), True),
    "other tensors": (stored(SEEN), stored(~SEEN), False),
    "a tensor per sequence": (stored(SEEN), stored(SEEN.repeat(2, 1, 1, 1)), False),
    "a tensor and none": (stored(SEEN), Workload(2, batch=2), False),
    "the same lines": (Workload(8, score_mod=capped(20.0)), Workload(8, score_mod=capped(20.0)), True),
    "around another number": (Workload(8, score_mod=capped(20.0)), Workload(8, score_mod=capped(30.0)), False),
    "around one tensor": (Workload(8, score_mod=capped(2, A_TENSOR)), Workload(8, score_mod=capped(2, A_TENSOR)), True),
    "around two tensors": (
        Workload(8, score_mod=capped(2, A_TENSOR)),
        Workload(8, score_mod=capped(2, torch.zeros(2))),
        False,
    ),
    "with another default": (Workload(8, score_mod=capped(2)), Workload(8, score_mod=capped(2, sign=-1)), False),
    "other lines": (Workload(8, score_mod=capped(2)), Workload(8, score_mod=lambda score, b, h, q, kv: score), False),
    "one function and none": (Workload(8, score_mod=capped(2)), Workload(8), False),
    "a mask_mod": (
        Workload(8, mask=MaskModMask(lambda b, h, q, kv: q >= kv)),
        Workload(8, mask=MaskModMask(lambda b, h, q, kv: q > kv)),
        False,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_workloads_ask_the_same_if_their_functions_and_tensors_do(name):
    one, other, same = SAME[name]

    assert asks_the_same(one, other) == same
    assert asks_the_same(other, one) == same


def test_keys_and_values_of_unlike_heads_are_refused_in_words():
    q, k, v = (torch.zeros(1, heads, 3, 8) for heads in (4, 2, 4))

    with pytest.raises(UnreadableError, match="k has 2 heads, and v 4; expected as many"):
        to_inputs(AttentionArguments(q, k, v))
