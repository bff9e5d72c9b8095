"""How a time reads: in a sentence, and in a column."""

from __future__ import annotations


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
