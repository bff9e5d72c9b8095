"""The gate's arithmetic against closed forms, tables and simulation."""

import math
import random
from statistics import median

import pytest

from pytest_attn.latency.statistics import (
    Prior,
    median_interval,
    moderated,
    prior_of,
)
from pytest_attn.reports.student import t_tail


@pytest.mark.parametrize(
    ("n", "ranks"), [(6, (1, 6)), (8, (1, 8)), (10, (2, 9)), (15, (4, 12)), (20, (6, 15)), (30, (10, 21)), (50, (18, 33))]
)
def test_ranks_of_the_median_s_interval(n, ranks):
    low, high, confidence = median_interval(random.Random(n).sample(range(1, n + 1), n))
    assert (low, high) == ranks
    assert confidence >= 0.95


@pytest.mark.parametrize("n", range(1, 6))
def test_few_values_say_how_little_they_reach(n):
    low, high, confidence = median_interval(range(n))
    assert (low, high) == (0, n - 1)
    assert confidence == pytest.approx(1 - 2 ** (1 - n))
    assert confidence < 0.95


def test_no_values_are_refused():
    with pytest.raises(ValueError, match="at least one value"):
        median_interval([])


def test_the_interval_holds_the_median_as_often_as_it_says():
    generator = random.Random(0)
    hits = 0
    for _ in range(2000):
        low, high, confidence = median_interval([generator.expovariate(1) for _ in range(10)])
        hits += low <= math.log(2) <= high
    assert hits / 2000 == pytest.approx(confidence, abs=0.012)


def chi_square(generator, degrees):
    return generator.gammavariate(degrees / 2, 2)


def test_a_prior_is_found_again():
    generator = random.Random(0)
    true = Prior(9e-6, 6.0)
    variances = []
    for _ in range(4000):
        own = true.variance * true.degrees / chi_square(generator, true.degrees)
        variances.append(own * chi_square(generator, 9) / 9)
    found = prior_of(variances, 9)
    assert found.variance == pytest.approx(true.variance, rel=0.05)
    assert found.degrees == pytest.approx(true.degrees, rel=0.15)


def test_cases_of_one_variance_lend_each_other_much():
    generator = random.Random(0)
    found = prior_of([4e-6 * chi_square(generator, 9) / 9 for _ in range(300)], 9)
    assert found.degrees > 50
    assert found.variance == pytest.approx(4e-6, rel=0.1)


def test_a_prior_of_few_or_equal_cases_is_finite():
    assert prior_of([1e-6], 9).degrees == 2
    assert 0 < prior_of([0.0, 0.0, 0.0], 9).variance < 1e-6
    with pytest.raises(ValueError, match="at least one variance"):
        prior_of([], 9)


def test_moderation_lies_between_both():
    variance, degrees = moderated(4.0, 9, Prior(1.0, 3.0))
    assert variance == pytest.approx((9 * 4 + 3 * 1) / 12)
    assert degrees == 12


def test_moderated_t_has_the_tail_it_says():
    """10 recorded runs against 3, 4000 cases of different variance, no slowdown: the share beyond the 1 % point."""
    generator = random.Random(1)
    recorded, fresh = [], []
    for _ in range(4000):
        own = math.sqrt(1e-5 * 5 / chi_square(generator, 5))
        recorded.append([generator.gauss(0, own) for _ in range(10)])
        fresh.append([generator.gauss(0, own) for _ in range(3)])
    centers = [sum(r) / 10 for r in recorded]
    variances = [sum((v - c) ** 2 for v in r) / 9 for r, c in zip(recorded, centers, strict=True)]
    prior = prior_of(variances, 9)
    beyond = 0
    for center, variance, runs in zip(centers, variances, fresh, strict=True):
        own, degrees = moderated(variance, 9, prior)
        beyond += t_tail((sum(runs) / 3 - center) / math.sqrt(own * (1 / 10 + 1 / 3)), degrees) < 0.01
    assert beyond / 4000 == pytest.approx(0.01, abs=0.005)
    assert median(variances) > 0
