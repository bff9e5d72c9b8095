"""The invariants, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_attn.invariants.algebra import Algebra, Magnitude
from pytest_attn.invariants.gradients import Gradients, LseGradient
from pytest_attn.invariants.invariant import Invariant
from pytest_attn.invariants.layout import Alignment, Layout, Offsets
from pytest_attn.invariants.leak import Leak
from pytest_attn.invariants.poison import Poison
from pytest_attn.invariants.rerun import Rerun, State
from pytest_attn.invariants.runtime import Device, Graph, Opcheck
from pytest_attn.invariants.variations import Batch, Equivalence, Options, Shapes

__tracebackhide__ = True  # what it raises is the test's own mistake

INVARIANTS: tuple[Invariant, ...] = (
    Rerun(),
    Poison(),
    Layout(),
    Leak(),
    Gradients(),
    LseGradient(),
    Algebra(),
    Magnitude(),
    Options(),
    Equivalence(),
    Batch(),
    Shapes(),
    Offsets(),
    Opcheck(),
    State(),
    Graph(),
    Device(),
    Alignment(),
)


def chosen(only: Iterable[str] | str | None, skip: Iterable[str] | str | None, thorough: bool) -> tuple[Invariant, ...]:
    """Return invariants by name: those named by `only`, else the default ones, and with `thorough` all; less `skip`.

    Raises ValueError for a name that is not one of the known, and where none is left: nothing asked is nothing held.
    """
    wanted, unwanted = _names(only), _names(skip)
    left = tuple(
        invariant
        for invariant in INVARIANTS
        if (invariant.name in wanted if wanted else thorough or not invariant.thorough) and invariant.name not in unwanted
    )
    if not left:
        asked = ", ".join(wanted) or "the default ones"
        raise ValueError(f"no invariant is left to run: skip has all of {asked}; name fewer there, or others in only")
    return left


def _names(names: Iterable[str] | str | None) -> tuple[str, ...]:
    listed = (names,) if isinstance(names, str) else tuple(names or ())
    known = [invariant.name for invariant in INVARIANTS]
    for name in listed:
        if name not in known:
            raise ValueError(f"unknown invariant {name!r}; known: {', '.join(known)}")
    return listed
