"""All mutants, class by class."""

from pytest_attn.guests.mutants.backward import GRADIENTS
from pytest_attn.guests.mutants.mutant import Mutant
from pytest_attn.guests.mutants.wrong_keys import HEADS, LENGTHS, MASKS
from pytest_attn.guests.mutants.wrong_memory import LAYOUT, MEMORY, OVERFLOW, STATE
from pytest_attn.guests.mutants.wrong_numbers import LSE, MAGNITUDE, OPTIONS

_CLASSES = (MASKS, LENGTHS, HEADS, OPTIONS, LSE, MAGNITUDE, OVERFLOW, MEMORY, STATE, LAYOUT, GRADIENTS)

MUTANTS: tuple[Mutant, ...] = tuple(mutant for defects in _CLASSES for mutant in defects)
