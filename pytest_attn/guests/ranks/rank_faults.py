"""What attention over ranks is known to get wrong, and which ranks have: hypotheses of out and of gradients, rank by rank.

Each says what a rank's rows of a tensor would be: computed in float64 from all rows and keys, told apart by who holds them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, permutations
from typing import TypeAlias

import torch

from pytest_attn.correctness.arithmetic import modify, over_keys, scaled_scores
from pytest_attn.correctness.comparison import Evidence, Hint, Mismatch
from pytest_attn.correctness.reference import Reference, heads_first, score_elements
from pytest_attn.diagnosis.hypothesis import FaultHypothesis, Fit, Prediction, Tolerance, View, explains
from pytest_attn.diagnosis.steps import AttentionSteps, Region, RegionScores, honest_steps
from pytest_attn.guests.ranks.sharding import SHARDS, Sharding

#: scores of a workload above which no fault is tried
_MOST_SCORES = 1 << 22
#: pages of all ranks above which none is tried by itself
_MOST_PAGES = 64
#: how many different faults of ranks are reported at most
_SHOWN = 4
#: how ranks round on the way is not known, so that what a fault leaves of the deviation decides; of a page's, which is little,
#: rounding leaves more
_OF_RANKS, _OF_PAGES = Tolerance(left=0.1), Tolerance(left=0.2)
#: faults that others, which have nothing to do with ranks, look like
_AMBIGUOUS = ("gradient-reduced-twice", "gradient-averaged-over-ranks")

#: identity -> what is wrong
FAULTS_OF_RANKS = {
    "own-keys-only": "a rank attends to its own keys only",
    "rank-keys-missing": "the keys of a rank are left out",
    "rank-keys-twice": "the keys of a rank count twice",
    "rank-keys-zero": "zeros are read in the place of a rank's keys and values",
    "rank-keys-of-another": "the keys of a rank count twice, in the place of those of another",
    "shard-tails-missing": "the tail of longer shards is left out",
    "ring-steps-missing": "the keys of the last steps of a ring are left out",
    "stale-keys": "a rank reads its own keys and values at every step",
    "stale-values": "a rank reads its own values at every step",
    "values-of-another-rank": "the values of another rank are read",
    "chunks-reversed": "chunks are read in reverse order",
    "chunks-merged-in-base-2": "results of ranks are merged by a natural lse as if it were one of base 2",
    "chunks-averaged": "results of ranks are averaged, whatever their lse",
    "chunks-added-up": "results of ranks are added up, without a common denominator",
    "ranks-not-merged": "the result of one rank is taken, and not merged",
    "mask-by-positions-in-shards": "a mask counts positions within the shards",
    "mask-as-if-rows-begin-sequence": "a mask takes the rows of each rank to begin the sequence",
    "mask-within-own-chunk-only": "a rank masks its own chunk only",
    "mask-of-other-shards": "a mask takes shards for others",
    "mask-of-keys-in-order": "a mask takes gathered keys to lie in the order of the sequence",
    "mask-of-opposite-direction": "a mask takes chunks to come in the opposite direction",
    "mask-of-reverse-order": "a mask takes chunks to be in reverse order",
    "mask-of-later-step": "a mask takes chunks to come one step later",
    "mask-of-earlier-step": "a mask takes chunks to come one step earlier",
    "own-chunks-swapped": "the two chunks of a rank are swapped",
    "rows-of-another-rank": "a rank holds the rows of another",
    "rank-last-page-missing": "the last page of a rank is not read",
    "rank-last-page-twice": "the last page of a rank counts twice",
    "rank-page-missing": "a page of a rank is not read",
    "rank-page-twice": "a page of a rank counts twice",
    "gradient-zero": "a gradient is 0 on a rank",
    "gradient-not-reduced": "a gradient is not reduced over ranks",
    "gradient-of-others-twice": "the shares of other ranks count twice in a gradient",
    "gradient-without-a-rank": "the share of a rank is missing in a gradient",
    "gradient-of-a-rank-twice": "the share of a rank counts twice in a gradient",
    "gradient-at-wrong-rank": "a gradient is sent to the wrong rank",
    "gradient-reduced-twice": "a gradient is reduced twice over ranks",
    "gradient-averaged-over-ranks": "a gradient is the mean over ranks, not the sum",
    "stale-keys-in-backward": "the backward pass reads its own keys and values at every step",
    "lse-of-own-chunk": "the backward pass takes the lse of a rank's own chunk",
}


# -- what is seen ----------------------------------------------------------------------------------------------------------


class Entry:
    """All rows and keys of a batch entry, or packed sequence, with the ranks that hold them.

    Tensors are (1, heads, rows, keys or dim), and (1, kv_heads, keys, dim). of_row, of_key: the rank that holds each; 0 for
    rows that all have. row_at, key_at: which of the rank's own it is. length: how many keys the entry has where it is padded
    or in pages.
    """

    def __init__(self, reference: Reference, sharding: Sharding, batch: int) -> None:
        self.sharding, self._reference, self._region = sharding, reference, Region(batch)
        w, scores = sharding.workload, RegionScores(reference.inputs, sharding.workload, Region(batch))
        rows, self.keys = scores.rows + scores.block.segment.q_start, scores.at + scores.block.segment.kv_start
        if sharding.shares_pages:  # every rank has all rows
            self.of_row, self.row_at = rows * 0, rows
        else:
            self.of_row, self.row_at = (t[rows] for t in owners(sharding.rows))
        self.of_key, self.key_at = (t[self.keys] for t in owners(sharding.keys))
        self.length = w.kv_lens[batch] if w.kv_lens else w.kv_len
        self.whole = scores
        self.scores, self.k, self.v = scores.scores, scores.k, scores.v

    @cached_property
    def steps(self) -> AttentionSteps:
        """The right steps of the backward pass."""
        return honest_steps(self._reference, self._region)

    @cached_property
    def visible(self) -> torch.Tensor:
        """Keys that each row sees."""
        return self.scores > -math.inf

    @cached_property
    def unmasked(self) -> torch.Tensor:
        """The scores without the mask: those of rows that see all."""
        w = self.sharding.workload.replace(mask=None)
        return RegionScores(self._reference.inputs, w, self._region).scores

    def out(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return attention with these scores, 0 in rows that see nothing."""
        return over_keys(scores.softmax(-1).nan_to_num(0.0), v)

    def reading(self, k: torch.Tensor, v: torch.Tensor) -> RegionScores:
        """Return the scores of other keys, with other values."""
        other = copy.copy(self.whole)
        other.k, other.v = k, v
        other.scaled = scaled_scores(other)
        other.scores, other.slope = modify(other.scaled.clone(), other)
        return other

    def exact(self, name: str) -> torch.Tensor:
        """Return out, or a gradient, as it should be."""
        return self.out(self.scores, self.v) if name == "out" else self.steps.gradient(name)

    def of_whole(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this entry's part of a heads-first tensor."""
        return self.whole.of_keys(whole) if name in ("dk", "dv") else self.whole.of_rows(whole)

    @property
    def in_order(self) -> torch.Tensor:
        """Where the rows stand."""
        return torch.arange(len(self.of_row))

    def keys_as(self, taken: Sharding) -> torch.Tensor:
        """Return where the keys would stand in other shards."""
        return _placed(taken.keys, self.of_key, self.key_at)

    def owners(self, name: str) -> torch.Tensor:
        """Return the rank that holds each row of a tensor of this name."""
        return self.of_key if name in ("dk", "dv") else self.of_row


@dataclass(frozen=True, eq=False)
class RankRows:
    """A rank's rows of a tensor in all batch entries, side by side."""

    name: str
    rank: int
    entries: Sequence[Entry]
    view: View

    @classmethod
    def of(cls, name: str, rank: int, entries: Sequence[Entry], got: torch.Tensor, exact: torch.Tensor) -> RankRows:
        """Return a rank's rows of a heads-first tensor."""
        mine, right = (_of_rank(name, rank, entries, [e.of_whole(name, t) for e in entries]) for t in (got, exact))
        return cls(name, rank, entries, View(mine, right, torch.zeros_like(right), torch.ones_like(right[..., 0]).bool()))


def _of_rank(name: str, rank: int, entries: Sequence[Entry], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t[:, :, e.owners(name) == rank] for e, t in zip(entries, tensors, strict=True)], 2)


def owners(shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each position the rank that holds it, and which of the rank's own it is."""
    length = sum(map(len, shards))
    rank, local = torch.empty(length, dtype=torch.int64), torch.empty(length, dtype=torch.int64)
    for number, positions in enumerate(shards):
        rank[positions], local[positions] = number, torch.arange(len(positions))
    return rank, local


#: what a fault makes of an entry, of which the rank's rows count; raises ValueError where a rank cannot have it
Made: TypeAlias = "Callable[[Entry, int], torch.Tensor]"
#: a fault, words that continue "out of rank 1 is ...", and what it makes
RankFault: TypeAlias = "tuple[str, str, Made]"
Hypothesis: TypeAlias = FaultHypothesis[RankRows]


def faults_of_ranks(name: str, sharding: Sharding) -> Iterator[Hypothesis]:
    """Yield what ranks may have got wrong in a tensor, the plainest first."""
    if sharding.shares_pages:
        groups, tolerance = [_of_cache(sharding)], _OF_PAGES
    elif name == "out":
        groups, tolerance = [_of_keys(sharding), _of_merging(), _of_masks(sharding), _of_places(sharding)], _OF_RANKS
    else:
        groups, tolerance = [_of_gradients(name, sharding)], _OF_RANKS
    for fault, words, made in chain(*groups):
        yield FaultHypothesis(fault, words, partial(_predicted, made), tolerance)


def _predicted(made: Made, seen: RankRows) -> Prediction:
    tensors = [made(entry, seen.rank) for entry in seen.entries]
    return Prediction(_of_rank(seen.name, seen.rank, seen.entries, tensors))


# -- keys that are missing, doubled or stale -------------------------------------------------------------------------------


def _of_keys(sharding: Sharding) -> Iterator[RankFault]:
    number = sharding.ranks
    ranks = range(number)
    if number > 1:
        yield "own-keys-only", "attention to its own keys only", lambda entry, rank: _without({*ranks} - {rank}, entry)
    for source in ranks:
        yield from _of_keys_of(source)
    lengths = sorted({len(one) for one in sharding.keys})
    if len(lengths) > 1:
        words = f"attention without the tail of longer shards: to the first {lengths[0]} keys of each rank"
        yield "shard-tails-missing", words, partial(_shortened, lengths[0])
    for step in range(2, number - 1):
        yield "ring-steps-missing", f"attention to the keys of the first {step} steps only", partial(_first_steps, step)
    for source, other in permutations(ranks, 2):
        words = f"attention with the keys of rank {other} twice, and without those of rank {source}"
        yield "rank-keys-of-another", words, partial(_weighted, {source: 0, other: 2})
    words = "attention that reads its own keys and values at every step: stale buffers"
    yield "stale-keys", words, partial(_reread, _own, _own)
    yield "stale-values", "attention that reads its own values at every step: stale buffers", partial(_reread, None, _own)
    for by in (1, number - 1):
        moved = {source: (source + by) % number for source in ranks}
        words = f"attention with the values of rank r {'+' if by == 1 else '-'} 1 at the keys of rank r"
        yield "values-of-another-rank", words, partial(_reread, None, partial(_same, moved))
    turned = partial(_same, {source: number - 1 - source for source in ranks})
    words = "attention to chunks in reverse order, masked as in the right one"
    yield "chunks-reversed", words, partial(_reread, turned, turned)


def _of_keys_of(source: int) -> Iterator[RankFault]:
    def zeroed(entry: Entry, rank: int) -> torch.Tensor:
        k, v, at = entry.k.clone(), entry.v.clone(), entry.of_key == source
        k[:, :, at], v[:, :, at] = 0.0, 0.0
        return entry.out(entry.reading(k, v).scores, v)

    yield "rank-keys-missing", f"attention without the keys of rank {source}", partial(_weighted, {source: 0})
    yield "rank-keys-twice", f"attention with the keys of rank {source} twice", partial(_weighted, {source: 2})
    yield "rank-keys-zero", f"attention with zeros in the place of the keys and values of rank {source}", zeroed


def _weighted(times: Mapping[int, int], entry: Entry, rank: int) -> torch.Tensor:
    scores = entry.scores.clone()
    for source, number in times.items():
        scores[..., entry.of_key == source] += math.log(number) if number else -math.inf
    return entry.out(scores, entry.v)


def _without(sources: Iterable[int], entry: Entry) -> torch.Tensor:
    return _weighted(dict.fromkeys(sources, 0), entry, 0)


def _shortened(length: int, entry: Entry, rank: int) -> torch.Tensor:
    return entry.out(entry.scores.masked_fill(entry.key_at >= length, -math.inf), entry.v)


def _first_steps(step: int, entry: Entry, rank: int) -> torch.Tensor:
    ranks = entry.sharding.ranks
    return _without([(rank - late) % ranks for late in range(step, ranks)], entry)


#: whose keys or values a rank reads in the place of those of each rank
Sources: TypeAlias = Callable[[Entry, int], Mapping[int, int]]


def _own(entry: Entry, rank: int) -> Mapping[int, int]:
    return dict.fromkeys(range(entry.sharding.ranks), rank)


def _same(sources: Mapping[int, int], entry: Entry, rank: int) -> Mapping[int, int]:
    return sources


def _reread(keys_of: Sources | None, values_of: Sources, entry: Entry, rank: int) -> torch.Tensor:
    """Return attention that reads the keys, or values, of other ranks in the place of those of some."""
    v = _replaced(entry, entry.v, values_of(entry, rank))
    k = entry.k if keys_of is None else _replaced(entry, entry.k, keys_of(entry, rank))
    return entry.out(entry.scores if keys_of is None else entry.reading(k, v).scores, v)


def _replaced(entry: Entry, tensor: torch.Tensor, of: Mapping[int, int]) -> torch.Tensor:
    """Return keys or values with those of rank `of[r]` in the place of rank r's, as far as these are as many."""
    found = tensor.clone()
    for source, other in of.items():
        here, there = entry.of_key == source, entry.of_key == other
        if int(here.sum()) == int(there.sum()):
            found[:, :, here] = tensor[:, :, there]
    return found


# -- how results are merged ------------------------------------------------------------------------------------------------


def _of_merging() -> Iterator[RankFault]:
    words = "that of chunks merged by a natural lse as if it were one of base 2"
    yield "chunks-merged-in-base-2", words, partial(_merged, math.log(2))
    yield "chunks-averaged", "the mean of the chunks' results, whatever their lse", partial(_merged, 0.0)
    yield "chunks-added-up", "the sum of the chunks' results, without a common denominator", partial(_merged, None)


def _merged(power: float | None, entry: Entry, rank: int) -> torch.Tensor:
    """Return the chunks' results weighted by exp(power * lse); added up for None."""
    outs, lses = [], []
    for source in range(entry.sharding.ranks):
        at = entry.of_key == source
        outs.append(entry.out(entry.scores[..., at], entry.v[:, :, at]))
        lses.append(entry.scores[..., at].logsumexp(-1) if bool(at.any()) else entry.scores.sum(-1) * 0 - math.inf)
    chunks, lse = torch.stack(outs), torch.stack(lses)
    if power is None:
        return chunks.sum(0)
    logits = (lse * power).masked_fill(lse == -math.inf, -math.inf)
    return (logits.softmax(0).nan_to_num(0.0)[..., None] * chunks).sum(0)


# -- masks that take rows and keys to stand elsewhere ----------------------------------------------------------------------

#: where rows and keys are taken to stand
Positions: TypeAlias = Callable[[Entry, int], "tuple[torch.Tensor, torch.Tensor]"]


def _of_masks(sharding: Sharding) -> Iterator[RankFault]:
    if sharding.workload.mask is None:
        return
    in_order = Sharding(sharding.workload, "contiguous", sharding.ranks)
    words = "attention masked by positions within the shards, not within the sequence"
    yield "mask-by-positions-in-shards", words, partial(_moved, lambda entry, rank: (entry.row_at, entry.key_at))
    words = "attention masked as if the rows of each rank began the sequence"
    yield "mask-as-if-rows-begin-sequence", words, partial(_moved, lambda entry, rank: (entry.row_at, entry.keys_as(in_order)))
    words = "attention masked within its own chunk only: it sees all of the others"
    yield "mask-within-own-chunk-only", words, _own_chunk
    for name in SHARDS:
        if name != sharding.shard:
            taken = partial(_as, Sharding(sharding.workload, name, sharding.ranks))
            yield "mask-of-other-shards", f"attention masked as if shards were {name}", partial(_moved, taken)
    if sharding.shard != "contiguous":
        words = "attention masked as if gathered keys lay in the order of the sequence: they lie by rank"
        yield "mask-of-keys-in-order", words, partial(_moved, lambda entry, rank: (entry.in_order, entry.keys_as(in_order)))
    by_source: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
        ("mask-of-opposite-direction", "came in the opposite direction", lambda source, rank: 2 * rank - source),
        ("mask-of-reverse-order", "were in reverse order", lambda source, rank: -1 - source),
        ("mask-of-later-step", "came one step later", lambda source, rank: source + 1),
        ("mask-of-earlier-step", "came one step earlier", lambda source, rank: source - 1),
    )
    for fault, words, of in by_source:
        yield fault, f"attention masked as if chunks {words}", partial(_moved, partial(_sources, of))


def _moved(places: Positions, entry: Entry, rank: int) -> torch.Tensor:
    """Return attention in which rows and keys see one another as those at other places do."""
    rows, keys = places(entry, rank)
    return entry.out(entry.unmasked.masked_fill(~entry.visible[:, :, rows][..., keys], -math.inf), entry.v)


def _own_chunk(entry: Entry, rank: int) -> torch.Tensor:
    visible = entry.visible | (entry.of_row[:, None] != entry.of_key[None])
    return entry.out(entry.unmasked.masked_fill(~visible, -math.inf), entry.v)


def _as(taken: Sharding, entry: Entry, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _placed(taken.rows, entry.of_row, entry.row_at), entry.keys_as(taken)


def _sources(of: Callable[[int, int], int], entry: Entry, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = entry.sharding.ranks
    moved = torch.tensor([of(source, rank) % ranks for source in range(ranks)])[entry.of_key]
    return entry.in_order, _placed(entry.sharding.keys, moved, entry.key_at)


def _placed(shards: Sequence[torch.Tensor], rank: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the positions that ranks hold at their local places, the last one where a rank holds fewer."""
    counts = rank.new_tensor([len(one) for one in shards])
    starts = counts.cumsum(0) - counts
    return torch.cat(list(shards)).to(rank.device)[starts[rank] + local.minimum(counts[rank] - 1)]


# -- places ----------------------------------------------------------------------------------------------------------------


def _of_places(sharding: Sharding) -> Iterator[RankFault]:
    """Yield right rows in the wrong place."""

    def halves_swapped(entry: Entry, rank: int) -> torch.Tensor:
        out = entry.exact("out").clone()
        mine = (entry.of_row == rank).nonzero().flatten()
        out[:, :, mine] = out[:, :, mine.roll(len(mine) // 2)]
        return out

    if sharding.shard == "head-tail":
        yield "own-chunks-swapped", "right, but its two chunks are swapped", halves_swapped
    for other in range(sharding.ranks):
        yield "rows-of-another-rank", f"that of rank {other}", partial(_of_other, "out", other)


def _of_other(name: str, other: int, entry: Entry, rank: int) -> torch.Tensor:
    """Return the exact tensor with another rank's rows in the place of a rank's."""
    if other == rank:
        raise ValueError
    exact = entry.exact(name).clone()
    mine, theirs = (entry.owners(name) == one for one in (rank, other))
    if int(mine.sum()) == int(theirs.sum()):
        exact[:, :, mine] = exact[:, :, theirs].clone()
    return exact


# -- gradients -------------------------------------------------------------------------------------------------------------


def _of_gradients(name: str, sharding: Sharding) -> Iterator[RankFault]:
    """Yield contributions of ranks that are missing or doubled, gradients at the wrong rank, and stale keys."""
    number, whose = sharding.ranks, "keys" if name == "dq" else "rows"

    def counted(times: Callable[[int, int], float]) -> Made:
        """Return a gradient in which the contributions of ranks count so often. times: of (source, rank)."""

        def made(entry: Entry, rank: int) -> torch.Tensor:
            of = torch.tensor([times(source, rank) for source in range(number)], dtype=torch.float64)
            share = of[entry.of_key][None, :] if name == "dq" else of[entry.of_row][:, None]
            return replace(entry.steps, weigh=lambda a: a * share).gradient(name)

        return made

    def counting(one: int, often: float) -> Made:
        return counted(lambda source, rank: often if source == one else 1.0)

    yield "gradient-zero", "0", counted(lambda source, rank: 0.0)
    if number > 1:
        own = "that of its own keys only" if name == "dq" else f"that of its own {whose} only: not reduced over ranks"
        yield "gradient-not-reduced", own, counted(lambda source, rank: float(source == rank))
        words = f"that with the {whose} of all other ranks twice"
        yield "gradient-of-others-twice", words, counted(lambda source, rank: 1.0 if source == rank else 2.0)
    for one in range(number):
        yield "gradient-without-a-rank", f"that without the {whose} of rank {one}", counting(one, 0.0)
        yield "gradient-of-a-rank-twice", f"that with the {whose} of rank {one} twice", counting(one, 2.0)
    for other in range(number):
        words = f"that of rank {other}: sent to the wrong rank"
        yield "gradient-at-wrong-rank", words, partial(_of_other, name, other)
    if number > 1:
        words = f"{number} times the exact one: reduced twice over {number} ranks"
        yield "gradient-reduced-twice", words, counted(lambda source, rank: float(number))
        words = f"1/{number} of the exact one: the mean over {number} ranks, not the sum"
        yield "gradient-averaged-over-ranks", words, counted(lambda source, rank: 1 / number)
        words = "that of a backward pass that reads its own keys and values at every step"
        yield "stale-keys-in-backward", words, partial(_stale, name)
        words = "that of a backward pass with the lse of the rank's own chunk, not of the row"
        yield "lse-of-own-chunk", words, partial(_own_lse, name)


def _stale(name: str, entry: Entry, rank: int) -> torch.Tensor:
    """Return a gradient whose rows have all read their own rank's keys and values."""
    total = torch.zeros_like(entry.exact(name))
    for reader in range(entry.sharding.ranks):
        own = _own(entry, reader)
        region = entry.reading(_replaced(entry, entry.k, own), _replaced(entry, entry.v, own))
        mine = (entry.of_row == reader).double()[:, None]
        total += replace(entry.steps, region=region, slope=region.slope, weigh=mine.mul).gradient(name)
    return total


def _own_lse(name: str, entry: Entry, rank: int) -> torch.Tensor:
    mine = entry.of_row[:, None] == entry.of_key[None]
    lse = entry.scores.masked_fill(~mine, -math.inf).logsumexp(-1, keepdim=True)
    return replace(entry.steps, lse=lse).gradient(name)


# -- a cache in pages that ranks share -------------------------------------------------------------------------------------

#: says of a rank's tokens, by their places there, which are meant. size: of a page
Which: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]


def _of_cache(sharding: Sharding) -> Iterator[RankFault]:
    """Yield what ranks may have got wrong together: pages unread, or counted twice, and how they merge."""
    number = sharding.ranks
    ranks = range(number)
    whose = [({rank}, f"rank {rank}") for rank in ranks]
    for some, name in whose if number == 1 else [*whose, ({*ranks}, "each rank")]:
        words = f"attention without the last page of {name}"
        yield "rank-last-page-missing", words, partial(_paged, some, _last, 0)
        yield "rank-last-page-missing", f"{words} where it is not full", partial(_paged, some, _last_not_full, 0)
        if name != "each rank":
            yield "rank-last-page-twice", f"attention with the last page of {name} twice", partial(_paged, some, _last, 2)
    for rank in ranks:
        yield from _of_keys_of(rank)
        if number > 1:
            alone = partial(_weighted, {other: 0 for other in ranks if other != rank})
            yield "ranks-not-merged", f"attention to the keys of rank {rank} only: not merged", alone
    yield from _of_merging()
    pages = [range(math.ceil(len(tokens) / _page_size(sharding))) for tokens in sharding.keys]
    if sum(map(len, pages)) <= _MOST_PAGES:
        for rank, of_rank in enumerate(pages):
            for page in of_rank:
                yield from _of_page(rank, page)


def _of_page(rank: int, page: int) -> Iterator[RankFault]:
    def is_page(places: torch.Tensor, size: int) -> torch.Tensor:
        return places // size == page

    yield "rank-page-missing", f"attention without page {page} of rank {rank}", partial(_paged, {rank}, is_page, 0)
    yield "rank-page-twice", f"attention with page {page} of rank {rank} twice", partial(_paged, {rank}, is_page, 2)


def _paged(ranks: set[int], which: Which, times: int, entry: Entry, rank: int) -> torch.Tensor:
    """Return attention in which some pages of some ranks count so often."""
    scores, size = entry.scores.clone(), _page_size(entry.sharding)
    for source in ranks:
        at = ((entry.of_key == source) & (entry.keys < entry.length)).nonzero().flatten()
        scores[..., at[which(entry.key_at[at], size)]] += math.log(times) if times else -math.inf
    return entry.out(scores, entry.v)


def _last(places: torch.Tensor, size: int) -> torch.Tensor:
    pages = places // size
    return pages == (pages.max() if len(pages) else -1)


def _last_not_full(places: torch.Tensor, size: int) -> torch.Tensor:
    return _last(places, size) & bool(len(places) % size)


def _page_size(sharding: Sharding) -> int:
    assert sharding.workload.kv_pages is not None
    return sharding.workload.kv_pages.size


# -- which ranks, and why --------------------------------------------------------------------------------------------------


def with_ranks(mismatch: Mismatch, evidence: Evidence, sharding: Sharding) -> Mismatch:
    """Return a mismatch that says at which ranks it is, and which fault of theirs explains it, in place of what else would."""
    if sharding.shares_pages:  # what ranks merge is one result, whose out tells most
        named = explained("out", evidence, sharding, [0])
        of_ranks = [Hint(one.fault, f"out is {one.words}") for one in named.values()]
    else:
        name, (rank_of, _) = mismatch.row.name, owners(sharding.of(mismatch.row.name))
        ranks = sorted(set(rank_of[list(mismatch.location.rows.found)].tolist()))
        named = explained(name, evidence, sharding, ranks)
        of_ranks = [Hint("", _whose_rows(mismatch, sharding, ranks), "ranks"), *_reported(name, named, sharding.ranks)]
    is_certain = bool(named) and not any(one.fault in _AMBIGUOUS for one in named.values())
    suggested = () if is_certain else (hint for hint in mismatch.hints if hint.label == "suggests")
    others = (hint for hint in mismatch.hints if hint.label != "suggests")
    return replace(mismatch, hints=(*suggested, *of_ranks, *others))


def explained(name: str, evidence: Evidence, sharding: Sharding, ranks: Sequence[int]) -> dict[int, Hypothesis]:
    """Return for each wrong rank the fault that explains a tensor there best; nothing unless all can be explained."""
    w, (_, reference, tensors) = sharding.workload, evidence.failed
    if name == "lse" or reference.is_sampled or w.sinks or score_elements(w) > _MOST_SCORES:
        return {}
    if reference.given is not None or not bool(tensors[name].isfinite().all()):
        return {}
    with torch.device(tensors[name].device):  # what explains the results is made where they are
        return _explained(name, evidence, sharding, ranks)


def _explained(name: str, evidence: Evidence, sharding: Sharding, ranks: Sequence[int]) -> dict[int, Hypothesis]:
    w, (_, reference, tensors) = sharding.workload, evidence.failed
    entries = [Entry(reference, sharding, batch) for batch in range(w.batch)]
    got = heads_first(tensors[name].detach(), w).double()
    seen = [RankRows.of(name, rank, entries, got, reference.tensors[name].value) for rank in ranks]
    fits: list[dict[Hypothesis, Fit]] = [{} for _ in ranks]
    for hypothesis in faults_of_ranks(name, sharding):
        for of_rank, rows in zip(fits, seen, strict=True):
            if fit := explains(hypothesis, rows):
                of_rank[hypothesis] = fit
    if not fits or not all(fits):
        return {}
    shared = [one for one in fits[0] if all(one in of_rank for of_rank in fits)]
    if shared:
        best = min(shared, key=lambda one: sum(_left(of_rank[one]) for of_rank in fits))
        return dict.fromkeys(ranks, best)
    return {rank: min(of_rank, key=lambda one: _left(of_rank[one])) for rank, of_rank in zip(ranks, fits, strict=True)}


def _left(fit: Fit) -> float:
    """Return what a fault leaves, as far as it tells: faults may amount to the same, and the rest is rounded."""
    return round(fit.rank, 3)


def _whose_rows(mismatch: Mismatch, sharding: Sharding, ranks: Sequence[int]) -> str:
    """Say how many rows of each rank are wrong, and which."""
    shards, wrong = sharding.of(mismatch.row.name), set(mismatch.location.rows.found)
    noun = "keys" if mismatch.row.name in ("dk", "dv") else "rows"
    if len(ranks) == sharding.ranks and len(ranks) > 1 and all(wrong >= set(one.tolist()) for one in shards):
        return f"all {noun} of all {len(ranks)} ranks"
    parts = []
    for rank in ranks:
        positions = shards[rank].tolist()
        mine = sorted(wrong & set(positions))
        share = f"all {len(mine)}" if len(mine) == len(positions) else f"{len(mine)} of {len(positions)}"
        parts.append(f"rank {rank} (of {sharding.ranks}): {share} {noun}, {_spans(mine)}")
    return "; ".join(parts[:4]) + ("; ..." if len(parts) > 4 else "")


def _spans(positions: Sequence[int]) -> str:
    """Write positions as spans: "0 to 15, 48 to 63"."""
    spans: list[list[int]] = []
    for one in positions:
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    written = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return ", ".join(written) if len(written) <= 4 else f"first {positions[0]}, last {positions[-1]}"


def _reported(name: str, found: Mapping[int, Hypothesis], ranks: int) -> list[Hint]:
    """Say each fault once, with the ranks that have it."""
    by_fault: dict[Hypothesis, list[int]] = {}
    for rank, hypothesis in found.items():
        by_fault.setdefault(hypothesis, []).append(rank)
    hints = []
    for hypothesis, at in by_fault.items():
        whose = f"rank {at[0]}" if len(at) == 1 else "all ranks" if len(at) == ranks else f"ranks {', '.join(map(str, at))}"
        hints.append(Hint(hypothesis.fault, f"{name} of {whose} is {hypothesis.words}"))
    return hints if len(hints) <= _SHOWN else [*hints[:_SHOWN], Hint("", f"and so on, on {len(found)} ranks")]
