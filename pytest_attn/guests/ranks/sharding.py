"""Rows and keys that each rank holds: the names that a marker knows, and functions of a user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from pytest_attn.workloads.functions import function_label
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: one of `SHARDS`, or a function (length, ranks) -> for each rank a tensor or list of its positions
Shard: TypeAlias = "str | Callable[[int, int], Sequence[torch.Tensor | Sequence[int]]]"


def _head_tail(positions: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Rank r has chunks r and 2n-1-r of 2n: under a causal mask all have as much to do."""
    import torch

    chunks = positions.tensor_split(2 * ranks)
    return [torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)]


#: how the positions of a sequence are split over ranks: into n parts, of which the first are longer where the length does not
#: divide; into chunks r and 2n-1-r; every n-th
SHARDS: dict[str, Callable[[torch.Tensor, int], list[torch.Tensor]]] = {
    "contiguous": lambda positions, ranks: list(positions.tensor_split(ranks)),
    "head-tail": _head_tail,
    "striped": lambda positions, ranks: [positions[rank::ranks] for rank in range(ranks)],
}


def positions_of(shard: Shard, length: int, ranks: int) -> list[torch.Tensor]:
    """Return for each rank the positions of a sequence that it holds, int64.

    Raises ValueError where a user's function does not give each position to exactly one rank.
    """
    import torch

    if isinstance(shard, str):
        return SHARDS[shard](torch.arange(length), ranks)
    found = shard(length, ranks)
    if not isinstance(found, list | tuple) or len(found) != ranks:
        raise ValueError(f"{_called(shard, length, ranks)} must return a list of {ranks} index tensors, got {found!r}")
    shards = [torch.as_tensor(one, dtype=torch.int64).cpu().flatten() for one in found]
    counts = torch.cat(shards).sort().values
    if counts.shape != (length,) or not bool((counts == torch.arange(length)).all()):
        missing = sorted(set(range(length)) - set(counts.tolist()))[:4]
        doubled = sorted(set(counts[1:][counts[1:] == counts[:-1]].tolist()))[:4]
        faults = [f"{name} {', '.join(map(str, some))}" for name, some in (("missing", missing), ("doubled", doubled)) if some]
        raise ValueError(
            f"{_called(shard, length, ranks)} must give each of {length} positions to one rank"
            f" ({'; '.join(faults) or 'others are beyond the sequence'})"
        )
    return shards


def _called(shard: Shard, length: int, ranks: int) -> str:
    return f"shard: {function_label(shard)}({length}, {ranks})"


@dataclass(frozen=True)
class Sharding:
    """One workload, split over ranks. Each packed sequence is split by itself."""

    workload: Workload
    shard: Shard
    ranks: int

    @property
    def shares_pages(self) -> bool:
        """True where ranks share a paged cache, and each has all query rows (decode context parallel)."""
        return self.workload.kv_pages is not None

    @cached_property
    def rows(self) -> list[torch.Tensor]:
        """For each rank its positions among the query rows, packed sequences end to end; int64, on the CPU."""
        import torch

        w = self.workload
        if self.shares_pages:
            return [torch.arange(sum(w.q_lens) if w.q_lens else w.q_len)] * self.ranks
        return self._split(w.q_lens or (w.q_len,))

    @cached_property
    def keys(self) -> list[torch.Tensor]:
        """For each rank its positions among the keys; within each sequence, where they are in pages."""
        w = self.workload
        if w.kv_pages is not None:
            return self._tokens(w.kv_pages.size)
        return self._split(w.kv_lens if w.q_lens and w.kv_lens else (w.kv_len,))

    def of(self, name: str) -> list[torch.Tensor]:
        """Return the positions along which a tensor of this name is split."""
        return self.keys if name in ("k", "v", "dk", "dv") else self.rows

    def on_device(self, name: str, rank: int, device: torch.device) -> torch.Tensor:
        """Return a rank's positions on a device, where they are put once: to put them there waits for all of its work."""
        key = name in ("k", "v", "dk", "dv"), rank, device
        if key not in self._moved:
            self._moved[key] = self.of(name)[rank].to(device)
        return self._moved[key]

    @cached_property
    def _moved(self) -> dict[tuple[bool, int, torch.device], torch.Tensor]:
        return {}

    def lengths_of(self, lengths: Sequence[int], rank: int) -> list[int]:
        """Return how much of each packed sequence a rank holds."""
        return [len(positions_of(self.shard, length, self.ranks)[rank]) for length in lengths]

    def refused_because(self) -> str | None:
        """Say why the workload cannot be split so, None where it can. Raises ValueError for a function that splits wrongly."""
        w = self.workload
        unsplit = {
            "keys in pages are shared by pages (contiguous) or by tokens (striped), not head-tail": (
                self.shares_pages and self.shard == "head-tail"
            ),
            "cached keys and keys padded on the left are not split over ranks": w.cached is not None or w.pad == "left",
            "quantized tensors, and v inside k, are not split over ranks": w.is_quantized or w.v_in_k,
            "dropout is not judged over ranks": w.dropout,
        }
        return next((reason for reason, holds in unsplit.items() if holds), None) or self._misplaced_because()

    def _misplaced_because(self) -> str | None:
        """Say why positions cannot lie so on the ranks, None where they can."""
        for name, shards in (("query row", self.rows), ("key", self.keys)):
            if empty := [rank for rank, one in enumerate(shards) if not len(one)]:
                return f"rank {empty[0]} of {self.ranks} would have no {name}"
        w = self.workload
        if w.packs_keys or not (w.kv_lens or w.kv_pages) or all(bool((one[1:] > one[:-1]).all()) for one in self.keys):
            return None
        return "padding and pages need keys in ascending order on each rank"

    def _tokens(self, size: int) -> list[torch.Tensor]:
        """Return for each rank its tokens of a sequence in pages: whole pages where shards are contiguous."""
        import torch

        length = self.workload.kv_len
        if self.shard != "contiguous":
            return positions_of(self.shard, length, self.ranks)
        pages = torch.arange(math.ceil(length / size)).tensor_split(self.ranks)
        tokens = torch.arange(length)
        return [tokens[int(mine[0]) * size : (int(mine[-1]) + 1) * size] if len(mine) else tokens[:0] for mine in pages]

    def _split(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        import torch

        starts = [0, *accumulate(lengths)]
        parts = [positions_of(self.shard, length, self.ranks) for length in lengths]
        return [
            torch.cat([one[rank] + start for one, start in zip(parts, starts, strict=False)]) for rank in range(self.ranks)
        ]
