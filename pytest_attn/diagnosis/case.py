"""All that a callable returned of which something is wrong: what an explanation has to hold for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from pytest_attn.correctness.comparison import Limits, Returned, TensorComparison, looked_at
from pytest_attn.correctness.reference import Reference
from pytest_attn.workloads.workload import Workload

_Tried = TypeVar("_Tried")


class TimeBudget:
    """Ends a search between two of its steps: a long workload takes seconds for each hypothesis that is tried.

    seconds: 0 for as long as it takes, counted from the first step; clock: theirs. left_out: what was not tried, or not to its
    end, in words.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._begun: float | None = None
        self.left_out: list[str] = []

    def each(self, what: str, some: Iterable[_Tried]) -> Iterator[_Tried]:
        """Yield what is to be tried as long as there is time. what: it is, in words."""
        for one in some:
            if self.is_over(what):
                return
            yield one

    def is_over(self, what: str) -> bool:
        """Whether there is no time left; what: is left out then."""
        now = self._clock()
        self._begun = now if self._begun is None else self._begun
        if not self.seconds or now - self._begun < self.seconds:
            return False
        if what not in self.left_out:
            self.left_out.append(what)
        return True


@dataclass(frozen=True)
class Case:
    """What a callable returned on each distribution of inputs, and how it compares.

    limits: of out and lse, and of gradients. time: for which an explanation is looked for.
    """

    workload: Workload
    returned: Sequence[Returned]
    rows: Sequence[TensorComparison]
    limits: tuple[Limits, Limits]
    time: TimeBudget

    def of(self, name: str) -> Iterator[tuple[torch.Tensor, Reference]]:
        """Yield what was returned under a name on each distribution, heads-first and where the reference looked, with that."""
        for one in self.returned:
            if name in one.tensors:
                expected = one.reference.tensors[name]
                yield looked_at(name, one.tensors[name], expected, self.workload), one.reference

    @property
    def scores_are_exact(self) -> bool:
        """Whether lse was returned, and is right under a profile whose scores are: they are not what is rounded."""
        of_lse = [row for row in self.rows if row.name == "lse"]
        declared = self.returned[0].reference.precision
        return bool(of_lse) and not declared.moves_lse and all(row.passed for row in of_lse)
