"""All mutants, class by class."""

from __future__ import annotations

from pytest_attn.mutants.gradients import GRADIENTS
from pytest_attn.mutants.heads import HEADS
from pytest_attn.mutants.layout import LAYOUT
from pytest_attn.mutants.lengths import LENGTHS
from pytest_attn.mutants.lse import LSE
from pytest_attn.mutants.magnitude import MAGNITUDE
from pytest_attn.mutants.masks import MASKS
from pytest_attn.mutants.memory import MEMORY
from pytest_attn.mutants.mutant import Mutant
from pytest_attn.mutants.options import OPTIONS
from pytest_attn.mutants.overflow import OVERFLOW
from pytest_attn.mutants.state import STATE

_CLASSES = (MASKS, LENGTHS, HEADS, OPTIONS, LSE, MAGNITUDE, OVERFLOW, MEMORY, STATE, LAYOUT, GRADIENTS)

#: The classes of defects, in the order of the catalog.
KINDS = tuple(defects.kind for defects in _CLASSES)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for defects in _CLASSES for mutant in defects)


def mutant_named(name: str) -> Mutant:
    """Return a mutant; raise ValueError for an unknown name."""
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise ValueError(f"unknown mutant {name!r}; known: {', '.join(mutant.name for mutant in MUTANTS)}")
