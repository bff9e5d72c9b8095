"""What somebody meant who typed a name that there is not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " did you mean flux-L512?" with the three names that are most alike, "" where none is."""
    alike = get_close_matches(name, list(names), n=3)
    return f" did you mean {' or '.join(alike)}?" if alike else ""
