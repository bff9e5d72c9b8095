"""What attention over a shared paged cache is known to get wrong: pages unread, or counted twice, and how ranks merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from pytest_attn.ranks.entry import Entry
from pytest_attn.ranks.key_mistakes import of_merging, weighted, zeroed
from pytest_attn.ranks.mistake import RankMistake
from pytest_attn.workloads.sharding import Sharding

if TYPE_CHECKING:
    import torch

#: pages of all ranks above which none is tried by itself
_MOST_PAGES = 64


def cache_mistakes_of(sharding: Sharding) -> Iterator[RankMistake]:
    """Yield what ranks may have got wrong together, the plainest first; texts continue "out is ..."."""
    ranks = range(sharding.ranks)
    for rank in ranks:
        yield RankMistake(f"attention without the last page of rank {rank}", partial(_paged, {rank}, _last, 0))
        text = f"attention without the last page of rank {rank} where it is not full"
        yield RankMistake(text, partial(_paged, {rank}, _last_not_full, 0))
        yield RankMistake(f"attention with the last page of rank {rank} twice", partial(_paged, {rank}, _last, 2))
    if len(ranks) > 1:
        yield RankMistake("attention without the last page of each rank", partial(_paged, set(ranks), _last, 0))
        text = "attention without the last page of each rank where it is not full"
        yield RankMistake(text, partial(_paged, set(ranks), _last_not_full, 0))
    for rank in ranks:
        yield RankMistake(f"attention without the keys of rank {rank}", partial(weighted, {rank: 0}))
        yield RankMistake(f"attention with the keys of rank {rank} twice", partial(weighted, {rank: 2}))
        text = f"attention with zeros in the place of the keys and values of rank {rank}"
        yield RankMistake(text, partial(zeroed, rank))
        others = {other: 0 for other in ranks if other != rank}
        if others:
            yield RankMistake(f"attention to the keys of rank {rank} only: not merged", partial(weighted, others))
    yield from of_merging()
    yield from _of_pages(sharding)


def _of_pages(sharding: Sharding) -> Iterator[RankMistake]:
    """Yield single pages that are unread, or count twice."""
    numbers = [range(math.ceil(len(tokens) / _size(sharding))) for tokens in sharding.keys]
    if sum(map(len, numbers)) > _MOST_PAGES:
        return
    for rank, pages in enumerate(numbers):
        for page in pages:
            which = partial(_page, page)
            yield RankMistake(f"attention without page {page} of rank {rank}", partial(_paged, {rank}, which, 0))
            yield RankMistake(f"attention with page {page} of rank {rank} twice", partial(_paged, {rank}, which, 2))


def _paged(ranks: set[int], which: Callable[[Entry, torch.Tensor], torch.Tensor], times: int, entry: Entry) -> torch.Tensor:
    """Return attention in which some pages of some ranks count so often.

    which: says of a rank's tokens, by their places there, which lie in those pages.
    """
    scores = entry.scores.clone()
    for rank in ranks:
        mine = (entry.of_key == rank) & (entry.keys < entry.length)
        at = mine.nonzero().flatten()
        chosen = at[which(entry, entry.key_at[at])]
        scores[..., chosen] += math.log(times) if times else -math.inf
    return entry.out(scores, entry.v)


def _last(entry: Entry, places: torch.Tensor) -> torch.Tensor:
    pages = places // _size(entry.sharding)
    return pages == (pages.max() if len(pages) else -1)


def _last_not_full(entry: Entry, places: torch.Tensor) -> torch.Tensor:
    return _last(entry, places) & bool(len(places) % _size(entry.sharding))


def _page(number: int, entry: Entry, places: torch.Tensor) -> torch.Tensor:
    return places // _size(entry.sharding) == number


def _size(sharding: Sharding) -> int:
    assert sharding.workload.kv_pages is not None
    return sharding.workload.kv_pages.size
