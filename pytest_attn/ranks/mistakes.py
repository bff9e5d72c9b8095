"""What attention over ranks is known to get wrong, each said as what it makes of out, or of a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pytest_attn.ranks.entry import Entry, Gradients, Made
from pytest_attn.workloads.sharding import SHARDS, Sharding

if TYPE_CHECKING:
    import torch


class RankMistake(NamedTuple):
    """A mistake: a text that continues "out of rank 1 is ...", and what it makes of an entry, of which the rank's rows count.

    is_factor: whether mistakes that have nothing to do with ranks may look the same.
    """

    text: str
    made: Made
    is_factor: bool = False


def mistakes_of(name: str, sharding: Sharding, rank: int) -> Iterator[RankMistake]:
    """Yield what a rank may have got wrong in a tensor, the plainest first."""
    if name == "out":
        yield from _of_keys(sharding, rank)
        yield from of_merging()
        yield from _of_masks(sharding, rank)
        yield from _of_places(sharding, rank)
    else:
        yield from _of_gradients(name, sharding, rank)


# -- out: whose keys -----------------------------------------------------------------------------------------------------


def _of_keys(sharding: Sharding, rank: int) -> Iterator[RankMistake]:
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
    k, v = _replaced(entry, entry.k, keys_of), _replaced(entry, entry.v, values_of)
    return entry.out(entry.scores_with(k) if keys_of else entry.scores, v)


def _replaced(entry: Entry, tensor: torch.Tensor, of: dict[int, int]) -> torch.Tensor:
    """Return keys or values with those of rank `of[r]` in the place of rank r's, as far as these are as many."""
    found = tensor.clone()
    for source, other in of.items():
        here, there = entry.of_key == source, entry.of_key == other
        if int(here.sum()) == int(there.sum()):
            found[:, here] = tensor[:, there]
    return found


# -- out: merging ----------------------------------------------------------------------------------------------------------


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


# -- out: masks ------------------------------------------------------------------------------------------------------------


def _of_masks(sharding: Sharding, rank: int) -> Iterator[RankMistake]:
    """Yield masks that take rows and keys to stand elsewhere."""
    if sharding.workload.mask is None:
        return
    yield RankMistake("attention masked by positions within the shards, not within the sequence", partial(_moved, _local))
    text = "attention masked as if the rows of each rank began the sequence"
    yield RankMistake(text, partial(_moved, partial(_first_rows, Sharding(sharding.workload, "contiguous", sharding.ranks))))
    yield RankMistake("attention masked within its own chunk only: it sees all of the others", _own_chunk)
    for name in SHARDS:
        if name != sharding.shard:
            taken = Sharding(sharding.workload, name, sharding.ranks)
            yield RankMistake(f"attention masked as if shards were {name}", partial(_moved, partial(_as, taken)))
    if sharding.shard != "contiguous":
        gathered = Sharding(sharding.workload, "contiguous", sharding.ranks)
        text = "attention masked as if gathered keys lay in the order of the sequence: they lie by rank"
        yield RankMistake(text, partial(_moved, partial(_keys_as, gathered)))
    by_source: dict[str, Callable[[int], int]] = {
        "attention masked as if chunks came in the opposite direction": lambda source: 2 * rank - source,
        "attention masked as if chunks were in reverse order": lambda source: -1 - source,
        "attention masked as if chunks came one step later": lambda source: source + 1,
        "attention masked as if chunks came one step earlier": lambda source: source - 1,
    }
    for text, of in by_source.items():
        other = {source: of(source) % sharding.ranks for source in range(sharding.ranks)}
        yield RankMistake(text, partial(_moved, partial(_sources, other)))


def _moved(places: Callable[[Entry], tuple[torch.Tensor, torch.Tensor]], entry: Entry) -> torch.Tensor:
    """Return attention in which rows and keys see one another as those at other places do."""
    rows, keys = places(entry)
    visible = entry.visible[:, rows][..., keys]
    return entry.out(entry.unmasked.masked_fill(~visible, -math.inf), entry.v)


def _local(entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    return entry.row_at, entry.key_at


def _own_chunk(entry: Entry) -> torch.Tensor:
    visible = entry.visible | (entry.of_row[:, None] != entry.of_key[None])
    return entry.out(entry.unmasked.masked_fill(~visible, -math.inf), entry.v)


def _as(taken: Sharding, entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    return _placed(taken.rows, entry.of_row, entry.row_at), _placed(taken.keys, entry.of_key, entry.key_at)


def _first_rows(taken: Sharding, entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    return entry.row_at, _placed(taken.keys, entry.of_key, entry.key_at)


def _keys_as(taken: Sharding, entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return torch.arange(len(entry.of_row)), _placed(taken.keys, entry.of_key, entry.key_at)


def _sources(other: dict[int, int], entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    moved = torch.tensor([other[source] for source in range(entry.sharding.ranks)])[entry.of_key]
    return torch.arange(len(entry.of_row)), _placed(entry.sharding.keys, moved, entry.key_at)


def _placed(shards: list[torch.Tensor], rank: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the positions that ranks hold at their local places, the last one where a rank holds fewer."""
    import torch

    counts = torch.tensor([len(one) for one in shards])
    starts = counts.cumsum(0) - counts
    return torch.cat(shards)[starts[rank] + local.minimum(counts[rank] - 1)]


# -- out: places -------------------------------------------------------------------------------------------------------------


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
        k, v = _replaced(entry, entry.k, own), _replaced(entry, entry.v, own)
        gradients = entry.gradients(entry.scores_with(k), k, v, entry.lse)
        total += gradients.of(name, (entry.of_row == rank).double()[:, None])
    return total


def _own_lse(name: str, entry: Entry) -> torch.Tensor:
    mine = entry.of_row[:, None] == entry.of_key[None]
    lse = entry.scores.masked_fill(~mine, -math.inf).logsumexp(-1)
    return entry.gradients(entry.scores, entry.k, entry.v, lse).of(name)
