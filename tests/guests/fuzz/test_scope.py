"""What may be drawn for a test: workloads like those of its marker."""

import pytest
from hypothesis import given, settings

from pytest_attn import Pages, Window, Workload
from pytest_attn.guests.fuzz.fuzz_case import like
from pytest_attn.strategies import workloads
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.masks import Causal


def test_likeness():
    w = Workload
    one = like([w(64, 192, heads=4, head_dim=64, mask="causal-bottom-right", softcap=20.0)])
    assert one == {
        "softcap": 20.0,
        "masks": [Causal(bottom_right=True)],
        "features": ["fewer queries"],
        "layouts": ["plain"],
        "dtypes": ["bfloat16"],
        "head_dims": [(64, 64)],
    }
    many = like(
        [
            w(64, heads=2, kv_heads=1, head_dim=192, v_head_dim=128, mask=Window(3, 0)),
            w(64, dtype="fp16", mask=Window(9, 0), softcap=5.0),
            w(64, 32, kv_lens=(32, 0)),
        ]
    )
    assert many["masks"] == ["window", None]
    assert many["features"] == ["fewer keys", "empty sequences", "grouped heads", "softcap"]
    assert many["layouts"] == ["plain", "padded"]
    assert many["head_dims"] == [(64, 64), (192, 128)]
    decode = like([w(1, 64, kv_pages=Pages(32)), w(1, 128, kv_pages=Pages(8))])
    assert decode["q_len"] == 1
    assert decode["page_sizes"] == [8, 32]
    assert decode["layouts"] == ["paged"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", builtin_catalog().names)
def test_every_group_of_the_catalog_can_be_drawn_like(name):
    scope = like(builtin_catalog().select(name))
    found = []

    @settings(max_examples=5, deadline=None, database=None, derandomize=True)
    @given(workloads(**scope))
    def draw(workload):
        found.append(workload)

    draw()
    assert found
