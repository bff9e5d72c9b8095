"""Which part of a split run each test belongs to: the same answer on every host, without asking the others.

Only whole numbers and ids go in, and neither the order of the tests nor a cache: sums of floats differ between versions of
Python, and a cache between hosts.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

#: a group that takes more than this share of a part is broken up, so that parts stay alike
_GROUPS_PER_PART = 8


class Cost(NamedTuple):
    """What a test takes, in microseconds. shared: what the tests of one group compute once, as the reference of a workload.

    group: tests that had better stay together. is_bound: whether they must.
    """

    group: str
    own: int
    shared: int = 0
    is_bound: bool = False


def assign(costs: Mapping[str, Cost], parts: int) -> dict[str, int]:
    """Return the part, from 1 on, of each test by its id: each in exactly one, the parts as alike in cost as can be.

    The costliest goes first, always to the part that has the least so far.
    """
    members: dict[str, list[str]] = {}
    for name in sorted(costs):
        members.setdefault(costs[name].group, []).append(name)
    share = sum(_cost_of(group, costs) for group in members.values()) // (_GROUPS_PER_PART * parts)
    units: list[list[str]] = []
    for group in members.values():
        is_whole = _cost_of(group, costs) <= share or any(costs[name].is_bound for name in group)
        units += [group] if is_whole else [[name] for name in group]
    loads = [(0, number) for number in range(1, parts + 1)]
    found = {}
    for unit in sorted(units, key=lambda unit: (-_cost_of(unit, costs), unit[0])):
        load, number = heapq.heappop(loads)
        found.update(dict.fromkeys(unit, number))
        heapq.heappush(loads, (load + _cost_of(unit, costs), number))
    return found


def _cost_of(unit: Sequence[str], costs: Mapping[str, Cost]) -> int:
    """Return what tests take one after the other; at least one each, so that those without a cost spread out as well."""
    return sum(max(1, costs[name].own) for name in unit) + max(costs[name].shared for name in unit)


def loads_of(found: Mapping[str, int], costs: Mapping[str, Cost], parts: int) -> list[int]:
    """Return what each part takes, the first one first: what its tests share is counted once in each part."""
    groups: dict[tuple[int, str], list[str]] = {}
    for name, number in found.items():
        groups.setdefault((number, costs[name].group), []).append(name)
    loads = [0] * parts
    for (number, _), unit in groups.items():
        loads[number - 1] += _cost_of(unit, costs)
    return loads


def digest(lines: Iterable[str]) -> str:
    """Return twelve digits that two lists of lines share only if they have the same lines, in whatever order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]
