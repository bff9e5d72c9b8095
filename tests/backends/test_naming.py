"""What a callable is called: as its author knows it, with what it closes over."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from pytest_attn.backends.subject import called_name


def my_attention(q, k, v, causal=None):
    return q


def make(window, block=None, kernel=None, table=None):
    def fn(q, k, v):
        return q, window, block, kernel, table

    return fn


def with_defaults(q, k, v, block=64, kernel=my_attention, table=(1, 2)):
    return q


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return q

    @classmethod
    def of_the_class(cls, q, k, v):
        return q

    @staticmethod
    def of_nobody(q, k, v):
        return q

    def __call__(self, q, k, v):
        return q


class Plain:
    def __call__(self, q, k, v):
        return q


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (my_attention, "my_attention[causal=None]"),
        (with_defaults, "with_defaults[block=64,kernel=my_attention]"),  # what cannot be written is left out
        (functools.partial(my_attention, causal=True), "my_attention[causal=True]"),
        (make(1), "make.fn[block=None,kernel=None,table=None,window=1]"),
        (make(128), "make.fn[block=None,kernel=None,table=None,window=128]"),
        (make(128, "small", torch.add), "make.fn[block=small,kernel=add,table=None,window=128]"),
        (Attention().forward, "Attention.forward"),
        (Attention.of_the_class, "Attention.of_the_class"),
        (Attention.of_nobody, "Attention.of_nobody"),
        (Plain(), "Plain"),
        (F.scaled_dot_product_attention, "scaled_dot_product_attention"),
        (math.hypot, "hypot"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_callable_is_called_what_its_author_calls_it(fn, name):
    assert called_name(fn) == name


def test_mine():
    """Return functions as a test has them: one with a name, and lambdas that call another first, or nothing."""

    def mine(q, k, v):
        return q

    of_mine, of_torch = lambda q, k, v: my_attention(q, k, v), lambda q, k, v: F.scaled_dot_product_attention(q, k, v)
    return mine, of_mine, of_torch, lambda q, k, v: torch.nn.functional.softmax(q, -1), lambda q, k, v: q * 2


test_mine.__test__ = False
MINE, OF_MINE, OF_TORCH, DEEP, IDLE = test_mine()


@pytest.mark.parametrize(
    ("fn", "within", "name"),
    [
        (OF_MINE, "", "test_mine.lambda[my_attention]"),
        (OF_MINE, "test_mine", "lambda[my_attention]"),
        (OF_TORCH, "test_mine", "lambda[scaled_dot_product_attention]"),
        (DEEP, "test_mine", "lambda[softmax]"),
        (IDLE, "test_mine", "test_mine.lambda"),  # what calls nothing keeps its test
        (MINE, "", "test_mine.mine"),
        (MINE, "test_mine", "mine"),
        (MINE, "test_another", "test_mine.mine"),
        (MINE, "test_min", "test_mine.mine"),  # a part of a name is none
    ],
)
def test_a_lambda_is_called_by_what_it_calls_and_the_test_that_hands_it_over_goes_without_saying(fn, within, name):
    assert called_name(fn, within) == name


def test_what_is_closed_over_is_shortened():
    name = called_name(make("w" * 200))
    assert name.endswith("...]")
    assert len(name) < 80


def test_a_variable_that_is_not_bound_yet_is_left_out():
    def early(q, k, v):
        return later

    name = called_name(early, "test_a_variable_that_is_not_bound_yet_is_left_out")
    later = 3
    assert name == "early"
    assert called_name(early, "test_a_variable_that_is_not_bound_yet_is_left_out") == f"early[later={later}]"


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_what_is_decorated_has_the_name_of_what_is_inside():
    assert called_name(torch.compile(my_attention)) == "my_attention[causal=None]"
    assert called_name(torch.no_grad()(my_attention)) == "my_attention[causal=None]"

    def circle(q, k, v):
        return q

    circle.__wrapped__ = circle
    circle.__signature__ = "none"
    assert called_name(circle).endswith("circle")
