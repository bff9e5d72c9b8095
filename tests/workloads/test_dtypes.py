"""The table of dtypes says what torch says of them."""

import pytest
import torch

from pytest_attn.correctness.contract import is_poison, poisoned
from pytest_attn.workloads.dtypes import ALL_DTYPES, DTYPES, FLOATING_DTYPES


@pytest.mark.parametrize("one", ALL_DTYPES.values(), ids=lambda one: one.name)
def test_sizes_and_ranges_are_torch_s(one):
    dtype = getattr(torch, one.name)
    assert one.size == dtype.itemsize
    assert one.largest == (torch.iinfo(dtype) if one.is_whole else torch.finfo(dtype)).max


@pytest.mark.parametrize("one", FLOATING_DTYPES.values(), ids=lambda one: one.name)
def test_units_of_rounding_are_torch_s(one):
    about = torch.finfo(getattr(torch, one.name))
    assert one.spacing == about.eps / 2
    assert one.unit == about.eps / 4
    assert 2.0**one.lowest == about.smallest_normal * about.eps
    assert one.floor in (0.0, 2.0**one.lowest / 2)


@pytest.mark.parametrize("one", DTYPES.values(), ids=lambda one: one.name)
def test_poison_is_a_nan_of_its_own(one):
    dtype = getattr(torch, one.name)
    assert poisoned((3,), dtype, torch.device("cpu")).isnan().all()
    assert not is_poison(torch.full((3,), torch.nan, dtype=dtype)).any()
