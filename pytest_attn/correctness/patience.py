"""How long what explains a fault is looked for: a long workload takes seconds for each mistake that is tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

#: seconds of a search where nobody says another number
DEFAULT_SECONDS = 60.0

_Tried = TypeVar("_Tried")


class Patience:
    """Ends a search between two of its steps. seconds: 0 for as long as it takes, counted from the first step; clock: theirs.

    left_out: what was not tried, or not to its end, in words.
    """

    def __init__(self, seconds: float = DEFAULT_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._begun: float | None = None
        self.left_out: list[str] = []

    def each(self, what: str, some: Iterable[_Tried]) -> Iterator[_Tried]:
        """Yield what is to be tried as long as there is time. what: it is, in words."""
        for one in some:
            if self.is_over(what):
                return
            yield one

    def is_over(self, what: str) -> bool:
        """Whether there is no time left; what: is left out then."""
        now = self._clock()
        self._begun = now if self._begun is None else self._begun
        if not self.seconds or now - self._begun < self.seconds:
            return False
        if what not in self.left_out:
            self.left_out.append(what)
        return True

    def notes(self) -> tuple[tuple[str, str], ...]:
        """Return the line that says what was left out; none where nothing was."""
        if not self.left_out:
            return ()
        text = f"after {self.seconds:g} s (--attn-diagnosis-timeout), not all of these were tried: {', '.join(self.left_out)}"
        return (("left out", text),)
