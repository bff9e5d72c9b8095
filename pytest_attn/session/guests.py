"""Guests, which stand on the core and not in it: capabilities that register themselves, by entry points of `pytest_attn`.

A guest of a distribution is a line of its pyproject, `[project.entry-points.pytest_attn]`, that names a `Guest`. Loads nothing
else, as every run of pytest reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name

from pytest_attn.session.kinds import Kind, register

#: the group of entry points
GROUP = "pytest_attn"


@dataclass(frozen=True)
class Guest:
    """The additions of a capability to a run; each by a name, "module:object", that is loaded when it is first needed.

    Args:
        kinds: kinds of tests: marker, fixture, items and case of each.
        kernels: by the setting that asks for it, a class of `SelectedKernels` that says whose kernels a run tests.
        makers: by an argument of the marker `attention`, what makes the case of a test that gives it.
        methods: of `attn`, by their names: functions that take the `AttentionCase` first.
        commands: of `python -m pytest_attn`: functions that take the subparsers, and add theirs.
    """

    kinds: tuple[Kind, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=dict)
    makers: Mapping[str, str] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()


@cache
def guests() -> tuple[Guest, ...]:
    """Return all guests, and register their kinds.

    Those of this package are found beside it, too, where it is not installed but on sys.path. Raises TypeError for an entry
    point that names something else than a `Guest`.
    """
    named = dict.fromkeys(one.value for one in metadata.entry_points(group=GROUP))
    beside = Path(__file__).parent.parent / "guests"
    own = [f"pytest_attn.guests.{path.parent.name}.{path.stem}:GUEST" for path in sorted(beside.glob("*/*_guest.py"))]
    named |= dict.fromkeys(own)
    found = []
    for name in named:
        guest = resolve_name(name)
        if not isinstance(guest, Guest):
            raise TypeError(f"the entry point {name} of {GROUP} must name a Guest, got {type(guest).__name__}")
        found.append(guest)
        for kind in guest.kinds:
            register(kind)
    return tuple(found)


def maker_of(argument: str) -> str:
    """Return what makes the case of a test whose marker has an argument. Raises ValueError where no guest does."""
    for guest in guests():
        if maker := guest.makers.get(argument):
            return maker
    raise ValueError(f"{argument}= of the marker attention needs a guest of pytest-attn that is not installed")


def methods_of_guests() -> dict[str, str]:
    """Return the methods of `attn` that guests add, "module:function", by their names."""
    return {name: method for guest in guests() for name, method in guest.methods.items()}
