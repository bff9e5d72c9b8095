"""What somebody meant who typed a name that there is not."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

_T = TypeVar("_T")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " did you mean flux-L512?" with the three names that are most alike, "" where none is."""
    alike = get_close_matches(name, list(names), n=3)
    return f" did you mean {' or '.join(alike)}?" if alike else ""


def suggests_fields(made: type[_T]) -> type[_T]:
    """Let a dataclass answer an unknown argument with the field that may have been meant.

    Returns the class, whose `__init__` now raises TypeError naming the argument, the nearest field and all fields.
    """
    of_class: Any = made  # a dataclass, which the type cannot say
    plain = of_class.__init__
    known = tuple(field.name for field in fields(of_class))

    @functools.wraps(plain)
    def init(self: _T, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known)
                raise TypeError(f"{made.__name__} has no field {name!r};{hint} fields: {', '.join(known)}")
        plain(self, *args, **given)

    of_class.__init__ = init
    return made
