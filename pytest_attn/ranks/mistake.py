"""One thing that attention over ranks may get wrong."""

from __future__ import annotations

from typing import NamedTuple

from pytest_attn.ranks.entry import Made


class RankMistake(NamedTuple):
    """A mistake: a text that continues "out of rank 1 is ...", and what it makes of an entry, of which the rank's rows count.

    is_factor: whether mistakes that have nothing to do with ranks may look the same.
    """

    text: str
    made: Made
    is_factor: bool = False
