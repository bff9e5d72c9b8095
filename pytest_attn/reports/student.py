"""Student's t, which torch.special does not have: tails by the incomplete beta function, quantiles by bisection."""

import functools
import math


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
