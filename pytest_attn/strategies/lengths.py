"""Draws of lengths, and of where sequences of these lengths lie.

What is simple takes few choices with small numbers, as Hypothesis shrinks toward both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hypothesis import strategies as st

from pytest_attn.strategies.scope import Scope
from pytest_attn.workloads.pages import Pages

MAX_BATCH = 3
#: lengths at which tiles end, begin or are one row short
_EDGES = tuple(sorted({1, *(max(1, tile + off) for tile in (8, 16, 32, 64, 128, 256, 512, 1024) for off in (-1, 0, 1))}))

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]


def count(least: int, most: int) -> st.SearchStrategy[int]:
    """Draw a number. Not with integers(), which only longest lengths are: Hypothesis likes to copy one integer to others."""
    return st.sampled_from(range(least, most + 1))


@st.composite
def lengths_up_to(draw: Draw, most: int) -> int:
    """Draw a length, often one at which a tile ends.

    The edge lies at or below the number drawn first: so a fault beyond some length shrinks to the first such length.
    """
    length: int = draw(st.integers(1, most))
    back = draw(count(0, 3))
    edges = [edge for edge in _EDGES if edge <= length]
    return edges[-min(back, len(edges))] if back else length


def lengths(draw: Draw, scope: Scope, features: list[str]) -> tuple[int, int]:
    """Draw q_len and kv_len: equal, unless a feature says which is less."""
    fixed = dict(scope.fixed).get("q_len")
    longer = draw(lengths_up_to(scope.max_rows))
    if fixed is not None:
        return fixed, longer
    if "fewer queries" in features:
        return draw(lengths_up_to(longer)), longer
    if "fewer keys" in features:
        return longer, draw(lengths_up_to(longer))
    return longer, longer


# -- layouts: each takes the longest lengths and returns the fields that say where they lie --------------------------------


def _plain(draw: Draw, scope: Scope, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    return {"q_len": q_len, "kv_len": kv_len, "batch": draw(count(1, MAX_BATCH))}


def _padded(draw: Draw, scope: Scope, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    return {"q_len": q_len, "kv_len": kv_len, "kv_lens": _kv_lens(draw, features, kv_len)}


def _paged(draw: Draw, scope: Scope, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    return {**_padded(draw, scope, features, q_len, kv_len), "kv_pages": _pages(draw, scope)}


def _packed_pages(draw: Draw, scope: Scope, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    return {**_packed(draw, scope, features, q_len, kv_len), "kv_pages": _pages(draw, scope)}


def _pages(draw: Draw, scope: Scope) -> Pages:
    pages = draw(st.sampled_from(scope.page_sizes))
    return pages if isinstance(pages, Pages) else Pages(pages)


def with_prefix(fields: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return the lengths of drawn fields with as many new keys as queries, and at most `longest` cached ones before them.

    Where lengths of keys were drawn, they become those of the prefixes, as far as they go; one at least is not empty.
    """
    prefixes = tuple(min(length, longest) for length in fields.get("kv_lens") or (longest,) * fields.get("batch", 1))
    prefixes = prefixes if any(prefixes) else (1, *prefixes[1:])
    return {"cached": prefixes, "kv_len": None, "kv_lens": None, "batch": None}


def _kv_lens(draw: Draw, features: list[str], kv_len: int) -> tuple[int, ...]:
    least = 0 if "empty sequences" in features else 1
    others = draw(st.lists(count(least, kv_len), max_size=MAX_BATCH - 1))
    return (*others, draw(count(1, kv_len)))  # at least one sequence has keys


def _packed(draw: Draw, scope: Scope, features: list[str], q_len: int, kv_len: int) -> dict[str, Any]:
    """Pack a longest sequence with shorter ones, in each of which the queries are as many as, fewer or more than the keys."""
    least = 0 if "empty sequences" in features else 1
    pairs = [(q_len, kv_len)]
    for _ in range(draw(count(0, MAX_BATCH - 1))):
        if q_len == kv_len:
            rows = draw(count(least, q_len))
            pairs.append((rows, rows))
        elif q_len < kv_len:
            keys = draw(count(least, kv_len))
            pairs.append((draw(count(min(least, keys), min(keys, q_len))), keys))
        else:
            rows = draw(count(least, q_len))
            pairs.append((rows, draw(count(min(least, rows), min(rows, kv_len)))))
    q_lens, kv_lens = zip(*pairs, strict=True)
    return {"q_lens": q_lens, "kv_lens": kv_lens, "q_len": max(q_lens), "kv_len": max(kv_lens)}


LAYOUTS: dict[str, Callable[[Draw, Scope, list[str], int, int], dict[str, Any]]] = {
    "plain": _plain,
    "padded": _padded,
    "packed": _packed,
    "paged": _paged,
    "packed pages": _packed_pages,
}
