"""The lines of a failure: a headline, then indented lines that each begin with a label."""

from __future__ import annotations

import math

#: characters of the labels of a mismatch or a regression
LABEL_WIDTH = 10


#: numbers from which on powers of ten are easier to read than digits
_LARGE = 1e6


def figure(value: float, plain: str) -> str:
    """Return a number as `plain` formats it, and by its power of ten where it is large: "3.1e30", "infinite"."""
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if math.isnan(value) or abs(value) < _LARGE:
        return format(value, plain)
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def labeled(label: str, text: str, width: int = LABEL_WIDTH) -> str:
    """Return one indented line, such as "  where      all 4 heads"."""
    return f"  {label:<{width}} {text}"
