"""Other workloads that say something about this one: with one option changed, or the same attention said in another way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pytest_attn.invariants.invariant import CLOSED_OVER, Invariant, NotApplicable
from pytest_attn.invariants.probe import Probe
from pytest_attn.workloads.inputs import Inputs

TOO_LONG = "exact attention on further inputs would take too long"


@dataclass(frozen=True)
class Variation:
    """Inputs of another workload, and what makes it other, in words."""

    words: str
    inputs: Inputs


def replaced(inputs: Inputs, words: str, **changes: object) -> Variation:
    """Return the same tensors under a workload with fields changed."""
    return Variation(words, replace(inputs, workload=inputs.workload.replace(**changes)))


class Derived(Invariant):
    """An invariant that asks a backend about other workloads, at most `calls` of them, thoroughly `calls_thorough`."""

    calls_thorough = 12

    @abstractmethod
    def variations(self, inputs: Inputs) -> Iterator[Variation]:
        """Yield the other workloads that these inputs give rise to, the most telling first."""

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Only a backend can be asked about another workload, and only of short ones is the truth at hand."""
        if not probe.is_backend:
            return CLOSED_OVER
        return None if probe.is_short else TOO_LONG

    def run(self, probe: Probe) -> str:
        """Hold the kernel to exact attention on each variation."""
        at_most = self.calls_thorough if probe.thorough else self.calls
        return judge_variations(probe, self.variations(probe.inputs), at_most)


def judge_variations(probe: Probe, variations: Iterable[Variation], at_most: int) -> str:
    """Hold the kernel to exact attention on the first variations that the backend takes; return evidence.

    A kernel that is compiled anew for each is asked about one, unless the thorough set is asked for. Raises NotApplicable
    where the backend takes none.
    """
    asked = 0
    if probe.is_compiled and not probe.thorough:
        at_most = 1
    for variation, other in _taken(probe, variations):
        if asked == at_most:
            break
        asked += 1
        if misfit := other.misfit(other.base):
            return f"{variation.words}: {misfit}"
    if not asked:
        raise NotApplicable("the backend takes no workload that differs in this way")
    return ""


def _taken(probe: Probe, variations: Iterable[Variation]) -> Iterator[tuple[Variation, Probe]]:
    for variation in variations:
        if other := probe.on(variation.inputs):
            yield variation, other
