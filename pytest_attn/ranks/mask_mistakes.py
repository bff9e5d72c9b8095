"""Masks that take rows and keys to stand elsewhere than the ranks hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from pytest_attn.ranks.entry import Entry
from pytest_attn.ranks.mistake import RankMistake
from pytest_attn.workloads.sharding import SHARDS, Sharding

if TYPE_CHECKING:
    import torch


def of_masks(sharding: Sharding, rank: int) -> Iterator[RankMistake]:
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
