"""What attention over ranks is known to get wrong, each said as what it makes of out, or of a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from pytest_attn.ranks.entry import Entry, Gradients
from pytest_attn.ranks.key_mistakes import of_keys, of_merging, replaced
from pytest_attn.ranks.mask_mistakes import of_masks
from pytest_attn.ranks.mistake import RankMistake
from pytest_attn.workloads.sharding import Sharding

if TYPE_CHECKING:
    import torch


def mistakes_of(name: str, sharding: Sharding, rank: int) -> Iterator[RankMistake]:
    """Yield what a rank may have got wrong in a tensor, the plainest first."""
    if name == "out":
        yield from of_keys(sharding, rank)
        yield from of_merging()
        yield from of_masks(sharding, rank)
        yield from _of_places(sharding, rank)
    else:
        yield from _of_gradients(name, sharding, rank)


# -- places ------------------------------------------------------------------------------------------------------------------


def _of_places(sharding: Sharding, rank: int) -> Iterator[RankMistake]:
    """Yield right rows in the wrong place."""
    if sharding.shard == "head-tail":
        yield RankMistake("right, but its two chunks are swapped", partial(_halves_swapped, rank))
    for other in range(sharding.ranks):
        if other != rank:
            yield RankMistake(f"that of rank {other}", partial(_of_other, "out", rank, other))


def _halves_swapped(rank: int, entry: Entry) -> torch.Tensor:
    out = entry.out(entry.scores, entry.v)
    mine = (entry.of_row == rank).nonzero().flatten()
    out[:, mine] = out[:, mine.roll(len(mine) // 2)]
    return out


def _of_other(name: str, rank: int, other: int, entry: Entry) -> torch.Tensor:
    """Return the exact tensor with another rank's rows in the place of a rank's."""
    exact = entry.out(entry.scores, entry.v) if name == "out" else _plain(entry).of(name)
    mine, theirs = (entry.owners(name) == one for one in (rank, other))
    if int(mine.sum()) == int(theirs.sum()):
        exact[:, mine] = exact[:, theirs].clone()
    return exact


# -- gradients ---------------------------------------------------------------------------------------------------------------


def _plain(entry: Entry) -> Gradients:
    return entry.gradients(entry.scores, entry.k, entry.v, entry.lse)


def _of_gradients(name: str, sharding: Sharding, rank: int) -> Iterator[RankMistake]:
    """Yield contributions of ranks that are missing or doubled, gradients at the wrong rank, and stale keys."""
    ranks = range(sharding.ranks)
    others = [one for one in ranks if one != rank]
    whose = "keys" if name == "dq" else "rows"
    of_others = dict.fromkeys(others, 0)
    yield RankMistake("0", partial(_counted, name, dict.fromkeys(ranks, 0)))
    if others:
        text = f"that of its own {whose} only: not reduced over ranks" if name != "dq" else "that of its own keys only"
        yield RankMistake(text, partial(_counted, name, of_others))
        yield RankMistake(f"that with the {whose} of all other ranks twice", partial(_counted, name, dict.fromkeys(others, 2)))
    for source in ranks:
        yield RankMistake(f"that without the {whose} of rank {source}", partial(_counted, name, {source: 0}))
        yield RankMistake(f"that with the {whose} of rank {source} twice", partial(_counted, name, {source: 2}))
    for other in others:
        yield RankMistake(f"that of rank {other}: sent to the wrong rank", partial(_of_other, name, rank, other))
    if others:
        times = len(ranks)
        text = f"{times} times the exact one: reduced twice over {times} ranks"
        yield RankMistake(text, partial(_counted, name, dict.fromkeys(ranks, times)), is_factor=True)
        text = f"1/{times} of the exact one: the mean over {times} ranks, not the sum"
        yield RankMistake(text, partial(_counted, name, dict.fromkeys(ranks, 1 / times)), is_factor=True)
        yield RankMistake("that of a backward pass that reads its own keys and values at every step", partial(_stale, name))
        yield RankMistake(
            "that of a backward pass with the lse of the rank's own chunk, not of the row", partial(_own_lse, name)
        )


def _counted(name: str, times: Mapping[int, float], entry: Entry) -> torch.Tensor:
    """Return a gradient in which the contributions of some ranks count so often."""
    import torch

    of = torch.ones(entry.sharding.ranks, dtype=torch.float64)
    for source, number in times.items():
        of[source] = number
    counted = of[entry.of_key][None, :] if name == "dq" else of[entry.of_row][:, None]
    return _plain(entry).of(name, counted)


def _stale(name: str, entry: Entry) -> torch.Tensor:
    """Return a gradient whose rows have all read their own rank's keys and values."""
    import torch

    total = torch.zeros_like(_plain(entry).of(name))
    for rank in range(entry.sharding.ranks):
        own = dict.fromkeys(range(entry.sharding.ranks), rank)
        k, v = replaced(entry, entry.k, own), replaced(entry, entry.v, own)
        gradients = entry.gradients(entry.scores_with(k), k, v, entry.lse)
        total += gradients.of(name, (entry.of_row == rank).double()[:, None])
    return total


def _own_lse(name: str, entry: Entry) -> torch.Tensor:
    mine = entry.of_row[:, None] == entry.of_key[None]
    lse = entry.scores.masked_fill(~mine, -math.inf).logsumexp(-1)
    return entry.gradients(entry.scores, entry.k, entry.v, lse).of(name)
