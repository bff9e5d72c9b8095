"""What an invariant is: a statement about every attention kernel that needs no tolerance of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_attn.invariants.probe import Probe

CLOSED_OVER = "options of a callable are closed over; a backend can be asked about others"
QUANTIZES = "a kernel that quantises its inputs mixes keys, and rounds in other places"


class NotApplicable(Exception):  # noqa: N818 - it is an outcome, not an error
    """An invariant that says nothing about this kernel after all; the text is the reason."""


class Invariant(ABC):
    """A statement that every right kernel fulfils.

    name: what users select. summary: the statement. calls: the most calls of the kernel that it makes by default.
    thorough: whether it is left out unless asked for.
    """

    name: str
    summary: str
    calls: int
    thorough: bool = False

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Say why the invariant says nothing about this workload or kernel, None where it does. Calls nothing."""
        del probe
        return None

    @abstractmethod
    def run(self, probe: Probe) -> str:
        """Return the smallest evidence that the kernel breaks the invariant, "" where it holds.

        Raises NotApplicable where only a call could tell.
        """
