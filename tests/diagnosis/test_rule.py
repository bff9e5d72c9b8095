"""The one rule by which a hypothesis explains what was returned, or does not."""

import math
from dataclasses import dataclass

import pytest
import torch

from pytest_attn.diagnosis.hypothesis import FaultHypothesis, Prediction, Tolerance, View, explains

ROWS, DIM = 8, 4


@dataclass(frozen=True)
class Seen:
    view: View


def seen(got, wrong=(0, 1)):
    """Return what is seen of a result whose exact value is 0, in rows of which some are known to be wrong."""
    bad = torch.zeros(ROWS, dtype=torch.bool)
    bad[list(wrong)] = True
    return Seen(View(got, torch.zeros(ROWS, DIM, dtype=torch.float64), torch.ones(ROWS, DIM), bad))


def fit(got, value, std=1.0, **tolerance):
    def predict(_):
        return Prediction(value, lambda: torch.full_like(value, std))

    return explains(FaultHypothesis("mask-ignored", "without the mask", predict, Tolerance(**tolerance)), seen(got))


def ones(*wrong, by=1.0):
    """Return a result that is off by so much in some rows."""
    off = torch.zeros(ROWS, DIM, dtype=torch.float64)
    off[list(wrong)] = by
    return off


@pytest.mark.parametrize(
    ("off", "tolerance", "explained"),
    [
        (8.0, {"element": 8.0}, True),
        (8.1, {"element": 8.0}, False),
        (4.0, {"element": 8.0, "row": 4.0}, True),
        (4.1, {"element": 8.0, "row": 4.0}, False),
        (math.inf, {}, True),
    ],
)
def test_each_element_and_row_is_within_the_tolerance_in_stds_of_the_prediction(off, tolerance, explained):
    got, value = ones(0, 1, by=100.0), ones(0, 1, by=100.0)
    got[5] += 0.0 if off == math.inf else off
    assert bool(fit(got, value, **tolerance)) == explained


@pytest.mark.parametrize(("share", "explained"), [(0.2, True), (0.3, False)])
def test_most_of_the_deviation_is_explained_where_stds_are_bounds_only(share, explained):
    got, value = ones(0, 1, by=1.0), ones(0, 1, by=1.0 - share)
    found = fit(got, value, element=8.0, left=0.25)
    assert bool(found) == explained
    assert fit(got, value, element=8.0), "a std of 1 alone would let it pass"
    if found:
        assert found.rank == pytest.approx(share)


def test_what_is_not_looked_at_as_wrong_may_as_well_be_right():
    got = ones(by=0.0)
    hypothesis = FaultHypothesis("mask-ignored", "", lambda _: Prediction(got), Tolerance(left=0.25))
    assert explains(hypothesis, seen(got)) is None
    assert explains(hypothesis, Seen(seen(got).view._replace(bad=None)))


def test_numbers_are_not_explained_by_nan_and_nan_is_a_fault_of_its_own():
    got, value = ones(0, 1), ones(0, 1)
    value[4, 0] = math.nan
    assert fit(got, value, element=8.0) is None
    got[4, 0] = math.nan
    assert fit(got, value, element=8.0)
    assert fit(got, ones(0, 1), element=8.0), "of a few elements that are no numbers nothing is said"
    got[:4] = math.nan
    assert fit(got, ones(0, 1), element=8.0) is None, "half of all rows are left"


def test_a_prediction_beyond_the_dtype_is_not_contradicted_by_infinity():
    got, value = ones().float(), ones(by=0.0)
    value[:6], got[:6] = 1e300, math.inf
    assert fit(got, value, element=8.0)
    value[:6] = 1.0
    assert fit(got, value, element=8.0) is None


@pytest.mark.parametrize("error", [RuntimeError, IndexError, ValueError])
def test_a_fault_that_a_workload_cannot_have_explains_nothing(error):
    def predict(_):
        raise error

    assert explains(FaultHypothesis("mask-ignored", "", predict, Tolerance()), seen(ones(0))) is None
    other_shape = FaultHypothesis("mask-ignored", "", lambda _: Prediction(torch.zeros(2, 2)), Tolerance())
    assert explains(other_shape, seen(ones(0))) is None
