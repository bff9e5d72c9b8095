"""What an invariant is: a statement about every attention kernel that needs no tolerance of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.call import is_cuda_error
from pytest_attn.correctness.contract import ContractError
from pytest_attn.invariants.probe import Probe

CLOSED_OVER = "options of a callable are closed over; a backend can be run with others"
QUANTIZES = "a kernel that quantizes its inputs mixes keys, and rounds in other places"


class NotApplicable(Exception):  # noqa: N818 - it is an outcome, not an error
    """An invariant that says nothing about this kernel after all; the text is the reason."""


class KernelRaised(Exception):  # noqa: N818 - a finding, whose text is the evidence
    """A kernel raised an error that does not refuse; the text says on what, and what it raised."""


@contextmanager
def on(words: str) -> Iterator[None]:
    """Say of what a kernel raises on what it did. words: how its tensors lie, or what they hold."""
    try:
        yield
    except (ContractError, NotApplicable, RefusedError):
        raise
    except Exception as error:
        raise KernelRaised(f"{words}: {what_was_raised(error)}") from error


def what_was_raised(error: Exception) -> str:
    """Return an exception in words, without CUDA's advice to debug it."""
    text = str(error)
    said = text.splitlines()[0] if is_cuda_error(error) else text
    return f"the kernel raised {type(error).__name__}: {said}"


class Invariant(ABC):
    """A statement that every right kernel fulfils.

    name: what users select. summary: the statement. calls: the most calls of the kernel that it makes by default.
    thorough: whether it is left out unless asked for. may_end_cuda: whether it asks for what ends some kernels with the CUDA
    context of their process.
    """

    name: str
    summary: str
    calls: int
    thorough: bool = False
    may_end_cuda: bool = False

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Say why the invariant says nothing about this workload or kernel, None where it does. Calls nothing."""
        del probe
        return None

    @abstractmethod
    def run(self, probe: Probe) -> str:
        """Return the smallest evidence that the kernel breaks the invariant, "" where it holds.

        Raises NotApplicable where only a call could tell.
        """
