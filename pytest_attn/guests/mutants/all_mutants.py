"""All mutants, class by class."""

from pytest_attn.guests.mutants.backward import GRADIENTS
from pytest_attn.guests.mutants.heads import HEADS
from pytest_attn.guests.mutants.lengths import LENGTHS
from pytest_attn.guests.mutants.lse import LSE
from pytest_attn.guests.mutants.magnitude import MAGNITUDE
from pytest_attn.guests.mutants.masks import MASKS
from pytest_attn.guests.mutants.memory import MEMORY
from pytest_attn.guests.mutants.mutant import Mutant
from pytest_attn.guests.mutants.overflow import OVERFLOW
from pytest_attn.guests.mutants.state import STATE
from pytest_attn.guests.mutants.strides import LAYOUT
from pytest_attn.guests.mutants.workload_options import OPTIONS

_CLASSES = (MASKS, LENGTHS, HEADS, OPTIONS, LSE, MAGNITUDE, OVERFLOW, MEMORY, STATE, LAYOUT, GRADIENTS)

MUTANTS: tuple[Mutant, ...] = tuple(mutant for defects in _CLASSES for mutant in defects)
