"""The guest mutants: faulty kernels in place of those of its tests."""

from pytest_attn.seam import Guest

GUEST = Guest(kernels={"mutants": "pytest_attn.guests.mutants.mutant_run:Mutants"})
