"""Limits of z: how many budgets a result may be off, by element, by row and by head, and by a factor of a head."""

import math
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType


@dataclass(frozen=True)
class Limits:
    """The largest |z| of an element, and the largest RMS of z over a row and over a head.

    slope: the largest |slope - 1| of a head, in units of what `head_slopes` allows; infinite where slopes are not looked at.
    """

    element: float
    row: float
    head: float
    slope: float = 1.0

    @property
    def without_slope(self) -> "Limits":
        """The same limits, for results whose slopes are not looked at."""
        return replace(self, slope=math.inf)

    def excess(self, element: float, row: float, head: float, slope: float = 0.0) -> float:
        """Return how far the worst level is over its limit, as a ratio (at most 1 passes; NaN counts as infinite)."""
        shares = (element / self.element, row / self.row, head / self.head, slope / self.slope)
        return math.inf if any(map(math.isnan, shares)) else max(shares)


#: limits by name: (for out, for gradients). The calibration behind them is docs/results/calibration.md.
LIMITS = MappingProxyType({"default": ((8, 4, 1.5), (8, 4, 1.5)), "strict": ((6, 2, 1), (8, 4, 1.5))})


@cache
def limits_named(name: str) -> tuple[Limits, Limits]:
    """Return limits (out, gradients) by name; raise ValueError for an unknown one."""
    if name not in LIMITS:
        raise ValueError(f"unknown limits {name!r}; known: {', '.join(LIMITS)}")
    of_results, of_gradients = LIMITS[name]
    return Limits(*of_results), Limits(*of_gradients)


def limits_of(name: str, limits: tuple[Limits, Limits]) -> Limits:
    """Return the limits of a tensor by its name: of out and lse, or of gradients."""
    of_results, of_gradients = limits
    return of_gradients if name.startswith("d") else of_results
