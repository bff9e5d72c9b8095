"""Pairwise covering sets: most faults need two conditions at once, so every pair of conditions occurs, not every product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, islice, product
from typing import Any, TypeAlias

from pytest_attn.strategies import distance
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.masks import BooleanMask, Document, Neighborhood, Window
from pytest_attn.workloads.masks.functions import blocks_by_head, prefix_of_four
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

#: a value of a factor: the factor's place and the value's, as values need not be hashable
_Choice: TypeAlias = tuple[int, int]
_Pair: TypeAlias = tuple[_Choice, _Choice]

#: of how many uncovered pairs each new row tries to grow, to keep the best: more make a smaller set, more slowly
_SEEDS = 4


# -- the algorithm ---------------------------------------------------------------------------------------------------------


def covering_pairs(
    factors: Mapping[str, Sequence[object]], allowed: Callable[[Mapping[str, Any]], bool] = lambda row: True
) -> list[dict[str, Any]]:
    """Return rows, one value per factor, in which every two values of two factors meet, if any legal row has them both.

    `allowed` says whether a row is legal. It is also asked about rows in which factors are still missing, and must call
    such a row legal unless no value of the missing ones can make it so. The same arguments give the same rows.
    """
    table = _Table(factors, allowed)
    uncovered = dict.fromkeys(table.pairs())
    rows: list[dict[str, Any]] = []
    while uncovered:
        candidates = []
        for pair in list(islice(uncovered, _SEEDS)):
            row = table.completed(dict(pair), uncovered)
            if row is None:
                del uncovered[pair]  # no legal row has this pair
            else:
                candidates.append(row)
        if candidates:
            best = max(candidates, key=lambda row: sum(pair in uncovered for pair in _pairs_of(row)))
            for pair in _pairs_of(best):
                uncovered.pop(pair, None)
            rows.append(table.named(best))
            table.used.update(best.items())
    return rows


class _Table:
    """The factors of a covering set and what is legal, with values known by their places."""

    def __init__(self, factors: Mapping[str, Sequence[object]], allowed: Callable[[Mapping[str, Any]], bool]) -> None:
        for name, values in factors.items():
            if not values:
                raise ValueError(f"covering_pairs: factor {name!r} has no values")
        self._factors = [(name, tuple(values)) for name, values in factors.items()]
        self._allowed = allowed
        # the factors of many values first: they decide how many rows there must be
        self._order = sorted(range(len(self._factors)), key=lambda place: -len(self._factors[place][1]))
        self.used: Counter[_Choice] = Counter()

    def pairs(self) -> Iterator[_Pair]:
        for a, b in combinations(self._order, 2):
            for i, j in product(range(len(self._factors[a][1])), range(len(self._factors[b][1]))):
                yield _pair((a, i), (b, j))

    def named(self, row: Mapping[int, int]) -> dict[str, Any]:
        """Return names and values in the order of the factors."""
        return {self._factors[place][0]: self._factors[place][1][row[place]] for place in sorted(row)}

    def completed(self, row: dict[int, int], uncovered: Mapping[_Pair, None]) -> dict[int, int] | None:
        """Return a legal row that contains this one and, looked at factor by factor, covers most; None if there is none."""
        if not self._allowed(self.named(row)):
            return None
        place = next((place for place in self._order if place not in row), None)
        if place is None:
            return row

        def worth(value: int) -> tuple[int, int]:
            new = sum(_pair((place, value), other) in uncovered for other in row.items())
            return new, -self.used[place, value]  # where nothing is new, what was seen least

        for value in sorted(range(len(self._factors[place][1])), key=worth, reverse=True):
            found = self.completed({**row, place: value}, uncovered)
            if found is not None:
                return found
        return None


def _pair(one: _Choice, other: _Choice) -> _Pair:
    return (one, other) if one < other else (other, one)


def _pairs_of(row: Mapping[int, int]) -> Iterator[_Pair]:
    return combinations(sorted(row.items()), 2)


# -- small workloads whose pairs are covered -------------------------------------------------------------------------------


_SQUARE_ONLY = ("documents", "neighborhood")
_UNPACKED_ONLY = ("documents", "neighborhood", "boolean")
_OPTIONS: dict[str, dict[str, object]] = {
    "none": {},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.5},
    "bias": {"bias": "hqk"},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "score_mod": {"score_mod": distance},
}
_FACTORS: dict[str, Sequence[object]] = {
    "mask": ("none", "causal", "causal-bottom-right", "window", "documents", "neighborhood", "boolean", "mask_mod"),
    "option": tuple(_OPTIONS),
    "lengths": ((64, 64), (33, 33), (17, 65), (65, 33), (1, 33)),
    "layout": ("plain", "padded", "packed", "paged"),
    "dtype": tuple(DTYPES),
    "heads": ((1, 1), (2, 2), (6, 2)),
    "dims": ((16, 16), (32, 32), (32, 16)),
}


@cache
def pairwise_workloads() -> tuple[Workload, ...]:
    """Return small named workloads in which every two of mask, option, lengths, layout, dtype, heads and dims meet."""
    return tuple(_workload(**row) for row in covering_pairs(_FACTORS, _is_legal))


def _is_legal(row: Mapping[str, Any]) -> bool:
    """Whether `Workload` takes this combination, as far as it is known."""
    mask, (q_len, kv_len) = row.get("mask"), row.get("lengths", (1, 1))
    if mask in _SQUARE_ONLY and q_len != kv_len:
        return False
    return not (row.get("layout") == "packed" and (mask in _UNPACKED_ONLY or row.get("option") == "bias"))


def _workload(
    mask: str, option: str, lengths: tuple[int, int], layout: str, dtype: str, heads: tuple[int, int], dims: tuple[int, int]
) -> Workload:
    q_len, kv_len = lengths
    shorter = (max(1, q_len // 3), max(1, kv_len // 3))
    masks: dict[str, object] = {
        "none": None,
        "window": Window(20, 3),
        "documents": Document((q_len // 4, q_len // 2, q_len - q_len // 4 - q_len // 2), causal=True) if q_len > 3 else None,
        "neighborhood": Neighborhood((8, 8), (3, 5)) if q_len == 64 else Neighborhood((q_len,), (min(q_len, 7),)),
        "boolean": BooleanMask(blocks_by_head),
        "mask_mod": prefix_of_four,
    }
    layouts: dict[str, dict[str, Any]] = {
        "plain": {"q_len": q_len, "kv_len": kv_len},
        "padded": {"q_len": q_len, "kv_len": kv_len, "kv_lens": (kv_len, shorter[1])},
        "packed": {"q_lens": (shorter[0], q_len), "kv_lens": (shorter[1], kv_len)},
        "paged": {"q_len": q_len, "kv_len": kv_len, "kv_lens": (shorter[1], kv_len), "kv_pages": Pages(16)},
    }
    made = Workload(
        **layouts[layout],
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        v_head_dim=dims[1],
        dtype=dtype,
        mask=masks.get(mask, mask),
        **_OPTIONS[option],  # type: ignore[arg-type]
    )
    return made.replace(name=f"pairs-{made.shape_id}")
