"""The arithmetic of the gate: medians with exact intervals, Student's t, and variances that cases lend one another."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Interval(NamedTuple):
    """Two bounds and the probability with which they hold the true value."""

    low: float
    high: float
    confidence: float

    @property
    def half_width(self) -> float:
        """Half the distance of the bounds."""
        return (self.high - self.low) / 2


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return order statistics that hold the median of independent values with at least `confidence`.

    No distribution is assumed: the number of values below the median is binomial(n, 1/2). Fewer than six values cannot
    reach 95 %; then the bounds are the extremes, with the confidence that these have. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    ordered, n = sorted(values), len(values)
    below = [math.comb(n, i) / 2**n for i in range(n + 1)]
    rank, reached = 0, 1 - 2 * below[0]  # bounds ordered[rank] and ordered[n - 1 - rank]
    while rank + 1 < (n + 1) // 2 and (narrower := reached - 2 * below[rank + 1]) >= confidence:
        rank, reached = rank + 1, narrower
    return Interval(ordered[rank], ordered[n - 1 - rank], max(0.0, reached))


def t_tail(t: float, degrees: float) -> float:
    """Return P(T > t) for Student's t with `degrees` of freedom (Abramowitz and Stegun 26.7.1, by the incomplete beta)."""
    tail = incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2
    return tail if t >= 0 else 1 - tail


@functools.lru_cache(maxsize=1024)  # all cases of a suite ask for the same few
def t_quantile(tail: float, degrees: float) -> float:
    """Return the t with P(T > t) = `tail`, by bisection; tail in (0, 0.5]."""
    low, high = 0.0, 1.0
    while t_tail(high, degrees) > tail:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return high


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by Lentz's continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d, value = 1.0, 0.0, 1.0
    for i in range(400):
        m = i // 2
        if i == 0:
            numerator = 1.0
        elif i % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + numerator * d or tiny)
        c = 1 + numerator / c or tiny
        value *= c * d
        if i and abs(1 - c * d) < 1e-14:
            break
    return front * (value - 1)


class Prior(NamedTuple):
    """What is known of a case's variance before it was looked at: as if `degrees` more values had shown `variance`."""

    variance: float
    degrees: float


def prior_of(variances: Sequence[float], degrees: float) -> Prior:
    """Fit a scaled inverse chi-square prior to the sample variances of many cases, each with `degrees` of freedom.

    Smyth 2004, "Linear models and empirical Bayes methods", section 6.2: moments of the logarithms of the variances. Where
    the cases do not differ by more than chance, the prior is worth 100 degrees. Raises ValueError for no variances.
    """
    if not variances:
        raise ValueError("a prior needs at least one variance")
    floor = max(1e-12, 1e-4 * median(variances))
    logs = [math.log(max(v, floor)) for v in variances]
    centered = [value - digamma(degrees / 2) + math.log(degrees / 2) for value in logs]
    center = sum(centered) / len(centered)
    spread = sum((c - center) ** 2 for c in centered) / max(1, len(centered) - 1) - trigamma(degrees / 2)
    most = 100.0
    if len(variances) < 3:  # too few to say how cases differ
        return Prior(math.exp(center), 2.0)
    prior_degrees = min(most, 2 * _inverse_trigamma(spread)) if spread > 0 else most
    return Prior(math.exp(center + digamma(prior_degrees / 2) - math.log(prior_degrees / 2)), prior_degrees)


def moderated(variance: float, degrees: float, prior: Prior) -> tuple[float, float]:
    """Return (variance, degrees of freedom) of a case after its prior: the weighted mean of both."""
    total = degrees + prior.degrees
    return (degrees * variance + prior.degrees * prior.variance) / total, total


def digamma(x: float) -> float:
    """Return the derivative of lgamma, for x > 0 (recurrence, then the asymptotic series DLMF 5.11.2)."""
    shift = 0.0
    while x < 8:
        shift -= 1 / x
        x += 1
    y = 1 / (x * x)
    return shift + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y / 240)))


def trigamma(x: float) -> float:
    """Return the derivative of digamma, for x > 0."""
    shift = 0.0
    while x < 8:
        shift += 1 / (x * x)
        x += 1
    y = 1 / (x * x)
    return shift + 1 / x + y / 2 + y / x * (1 / 6 - y * (1 / 30 - y * (1 / 42 - y / 30)))


def _inverse_trigamma(value: float) -> float:
    """Return the x > 0 with trigamma(x) = value, by bisection of the logarithm."""
    low, high = -15.0, 15.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if trigamma(math.exp(middle)) > value else (low, middle)
    return math.exp((low + high) / 2)
