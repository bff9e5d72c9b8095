"""The lines of a failure, each after its label; numbers and times as they are read."""

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


def duration(seconds: float, milliseconds_from: float = 1e-4) -> str:
    """Return a time with four digits and its unit: "6.81 us", "0.398 ms", "1.21 s".

    milliseconds_from: the seconds below which it is in microseconds.
    """
    for limit, factor, unit in ((milliseconds_from, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds:.4g} s"


def duration_in_column(seconds: float) -> str:
    """Return a time with its unit, aligned by the decimal point within a unit."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.4f} ms" if seconds < 1e-2 else f"{seconds * 1e3:.2f} ms"
