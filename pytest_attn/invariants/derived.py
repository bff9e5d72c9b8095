"""Other workloads that say something about this one: with one option changed, or the same attention said in another way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_attn.invariants.invariant import NotApplicable
from pytest_attn.invariants.probe import Probe
from pytest_attn.workloads.inputs import Inputs

TOO_LONG = "exact attention on further inputs would take too long"


@dataclass(frozen=True)
class Variation:
    """Inputs of another workload, and what makes it other, in words."""

    words: str
    inputs: Inputs


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
