"""Ranks whose keys are missing, doubled or stale, and wrong ways to merge what ranks computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pytest_attn.ranks.entry import Entry
from pytest_attn.ranks.mistake import RankMistake
from pytest_attn.workloads.sharding import Sharding

if TYPE_CHECKING:
    import torch


def of_keys(sharding: Sharding, rank: int) -> Iterator[RankMistake]:
    """Yield keys of ranks that are missing, doubled, or read in the place of others."""
    ranks = range(sharding.ranks)
    others = [one for one in ranks if one != rank]
    if others:
        yield RankMistake("attention to its own keys only", partial(weighted, dict.fromkeys(others, 0)))
    for source in ranks:
        yield RankMistake(f"attention without the keys of rank {source}", partial(weighted, {source: 0}))
        yield RankMistake(f"attention with the keys of rank {source} twice", partial(weighted, {source: 2}))
        zeros = f"attention with zeros in the place of the keys and values of rank {source}"
        yield RankMistake(zeros, partial(zeroed, source))
    lengths = sorted({len(one) for one in sharding.keys})
    if len(lengths) > 1:
        text = f"attention without the tail of longer shards: to the first {lengths[0]} keys of each rank"
        yield RankMistake(text, partial(_shortened, lengths[0]))
    for step in range(2, sharding.ranks - 1):
        unseen = {(rank - late) % sharding.ranks: 0 for late in range(step, sharding.ranks)}
        yield RankMistake(f"attention to the keys of the first {step} steps only", partial(weighted, unseen))
    for source in ranks:
        for other in ranks:
            if source != other:
                text = f"attention with the keys of rank {other} twice, and without those of rank {source}"
                yield RankMistake(text, partial(weighted, {source: 0, other: 2}))
    own = dict.fromkeys(ranks, rank)
    yield RankMistake("attention that reads its own keys and values at every step: stale buffers", partial(_reread, own, own))
    yield RankMistake("attention that reads its own values at every step: stale buffers", partial(_reread, {}, own))
    for by in (1, sharding.ranks - 1):
        moved = {source: (source + by) % sharding.ranks for source in ranks}
        text = f"attention with the values of rank r {'+' if by == 1 else '-'} 1 at the keys of rank r"
        yield RankMistake(text, partial(_reread, {}, moved))
    turned = {source: sharding.ranks - 1 - source for source in ranks}
    yield RankMistake("attention to chunks in reverse order, masked as in the right one", partial(_reread, turned, turned))


def weighted(times: dict[int, int], entry: Entry) -> torch.Tensor:
    """Return attention in which the keys of some ranks count so often."""
    scores = entry.scores.clone()
    for source, number in times.items():
        scores[..., entry.of_key == source] += math.log(number) if number else -math.inf
    return entry.out(scores, entry.v)


def zeroed(source: int, entry: Entry) -> torch.Tensor:
    """Return attention that sees a rank's keys, and reads zeros there."""
    k, v, at = entry.k.clone(), entry.v.clone(), entry.of_key == source
    k[:, at], v[:, at] = 0.0, 0.0
    return entry.out(entry.scores_with(k), v)


def _shortened(length: int, entry: Entry) -> torch.Tensor:
    return entry.out(entry.scores.masked_fill(entry.key_at >= length, -math.inf), entry.v)


def _reread(keys_of: dict[int, int], values_of: dict[int, int], entry: Entry) -> torch.Tensor:
    """Return attention that reads the keys, or values, of other ranks in the place of those of some."""
    k, v = replaced(entry, entry.k, keys_of), replaced(entry, entry.v, values_of)
    return entry.out(entry.scores_with(k) if keys_of else entry.scores, v)


def replaced(entry: Entry, tensor: torch.Tensor, of: dict[int, int]) -> torch.Tensor:
    """Return keys or values with those of rank `of[r]` in the place of rank r's, as far as these are as many."""
    found = tensor.clone()
    for source, other in of.items():
        here, there = entry.of_key == source, entry.of_key == other
        if int(here.sum()) == int(there.sum()):
            found[:, here] = tensor[:, there]
    return found


def of_merging() -> Iterator[RankMistake]:
    """Yield wrong ways to merge the results of the ranks' keys."""
    text = "that of chunks merged by a natural lse as if it were one of base 2"
    yield RankMistake(text, partial(_merged, math.log(2)))
    yield RankMistake("the mean of the chunks' results, whatever their lse", partial(_merged, 0.0))
    yield RankMistake("the sum of the chunks' results, without a common denominator", partial(_merged, None))


def _merged(power: float | None, entry: Entry) -> torch.Tensor:
    """Return the chunks' results weighted by exp(power * lse); added up for None."""
    import torch

    outs, lses = [], []
    for source in range(entry.sharding.ranks):
        at = entry.of_key == source
        outs.append(entry.out(entry.scores[..., at], entry.v[:, at]))
        lses.append(entry.scores[..., at].logsumexp(-1) if bool(at.any()) else entry.lse - math.inf)
    chunks, lse = torch.stack(outs), torch.stack(lses)
    if power is None:
        return chunks.sum(0)
    logits = (lse * power).masked_fill(lse == -math.inf, -math.inf)
    return (logits.softmax(0).nan_to_num(0.0)[..., None] * chunks).sum(0)
