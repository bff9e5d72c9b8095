"""The lines of a failure: a headline, then indented lines that each begin with a label."""

from __future__ import annotations

#: characters of the labels of a mismatch or a regression
LABEL_WIDTH = 10


def labeled(label: str, text: str, width: int = LABEL_WIDTH) -> str:
    """Return one indented line, such as "  where      all 4 heads"."""
    return f"  {label:<{width}} {text}"
