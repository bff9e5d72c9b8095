"""A covering set: as few cases as reach each value, or each pair of values, that many of them reach."""

from collections.abc import Callable, Collection, Hashable, Mapping
from itertools import combinations
from typing import TypeAlias, TypeVar

from pytest_attn.workloads.traits import kernels_of, options_of
from pytest_attn.workloads.workload import Workload

Case = TypeVar("Case", bound=Hashable)
#: values alone, and pairs of them
Targets: TypeAlias = frozenset[tuple[str, ...]]


def values_of(workload: Workload) -> frozenset[str]:
    """Return what a workload reaches: its options, and a library's kernels by dtype, head dimensions, rows and keys."""
    return options_of(workload) | kernels_of(workload)


def targets_of(values: Collection[str], strength: int) -> Targets:
    """Return the values alone (strength 1), and their pairs (2)."""
    ordered = sorted(values)
    return frozenset(some for size in range(1, strength + 1) for some in combinations(ordered, size))


def covering(
    cases: Mapping[Case, Collection[str]],
    strength: int,
    runs: Callable[[Case], bool] = lambda case: True,
    cost: Callable[[Case], float] = lambda case: 0.0,
    reached: Targets = frozenset(),
) -> list[Case]:
    """Return the cases of a covering set, the one that adds most first; none where all is reached.

    Args:
        cases: those that a backend declares to take, each with its values.
        strength: 2 for each pair of values, 1 for each value, 0 for the one case that reaches most values.
        runs: whether a case is not refused after all; only of those that would be chosen.
        cost: of cases that add as much, the cheapest is chosen; of those that cost the same, the first.
        reached: what others reach.
    """
    left = {case: targets_of(values, max(strength, 1)) - reached for case, values in cases.items()}
    chosen: list[Case] = []
    while left and not (chosen and strength == 0):
        best = max(left, key=lambda case: (len(left[case]), -cost(case)))
        added = left.pop(best)
        if not added:
            break
        if runs(best):
            chosen.append(best)
            left = {case: rest for case, targets in left.items() if (rest := targets - added)}
    return chosen
