"""How the figures of a mismatch are written: digits as far as they are read, powers of ten beyond."""

import math

import pytest
import torch
from judging import FULL, failure
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pytest_attn.reports.lines import figure


@pytest.mark.parametrize(
    ("value", "plain", "text"),
    [
        (1.0, ".4f", "1.0000"),
        (-0.5, ".4f", "-0.5000"),
        (999_999.0, ",.0f", "999,999"),
        (18342678526838309768343378928336896.0, ".4f", "1.8e34"),
        (-3.14e30, ",.0f", "-3.1e30"),
        (2e-7, ".3g", "2e-07"),
        (math.inf, ".2f", "infinite"),
    ],
)
def test_a_figure_is_short(value, plain, text):
    assert figure(value, plain) == text


def test_a_result_far_off_is_described_in_powers():
    text = failure(lambda q, k, v: sdpa(q, k, v) * torch.tensor(1e34, dtype=q.dtype), FULL)
    slope = text.split("slope ")[1].split()[0]
    assert slope.endswith(("e34", "e33"))
    assert max(map(len, text.replace(",", "").split())) < 60
