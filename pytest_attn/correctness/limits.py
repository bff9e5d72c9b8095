"""How far from exact a fault-free kernel may be, in budgets, at each of three levels."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The largest |z| of an element, and the largest RMS of z over a row and over a head."""

    element: float
    row: float
    head: float

    def excess(self, element: float, row: float, head: float) -> float:
        """Return how far the worst level is over its limit, as a ratio (at most 1 passes; NaN counts as infinite)."""
        worst = max(element / self.element, row / self.row, head / self.head)
        return math.inf if math.isnan(element) or math.isnan(row) or math.isnan(head) else worst


#: limits by name: (for out, for gradients). The calibration behind them is docs/results/calibration.md.
LIMITS = {
    "default": (Limits(8, 4, 1.5), Limits(8, 4, 1.5)),
    "strict": (Limits(6, 2, 1), Limits(8, 4, 1.5)),
}


def limits_named(name: str) -> tuple[Limits, Limits]:
    """Return limits (out, gradients) by name; raise ValueError for an unknown one."""
    if name not in LIMITS:
        raise ValueError(f"unknown limits {name!r}; known: {', '.join(LIMITS)}")
    return LIMITS[name]
