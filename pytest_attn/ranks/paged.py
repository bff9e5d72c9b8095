"""A rank's part of a paged cache (decode context parallel): its tokens, in pages and a page table of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.ranks.shards import cut
from pytest_attn.workloads.arrangement import handed_over
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.pool import cut_into_pages
from pytest_attn.workloads.sharding import Sharding

if TYPE_CHECKING:
    import torch


class RankCache:
    """Where a rank's tokens lie: behind one another in the order of their sequence, in pages in no order.

    page_table: (batch, pages per sequence), int32. kv_lens: how many of a sequence's tokens the rank holds, (batch,), int32,
    which may be 0. Both on the CPU.
    """

    def __init__(self, sharding: Sharding, rank: int) -> None:
        import torch

        w = sharding.workload
        assert w.kv_pages is not None
        self._workload, self._size = w, w.kv_pages.size
        self._positions = sharding.keys[rank]
        lengths = torch.tensor(w.kv_lens or (w.kv_len,) * w.batch)
        self.kv_lens = (self._positions[None] < lengths[:, None]).sum(1, dtype=torch.int32)
        per_sequence = math.ceil(len(self._positions) / self._size)
        order = torch.randperm(w.batch * per_sequence, generator=torch.Generator().manual_seed(rank + 1))
        self.page_table = order.view(w.batch, per_sequence).to(torch.int32)

    def pools(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank's pools of whole keys and values, (batch, kv_heads, kv_len, dim), as `Pages` says that they lie."""
        return handed_over(self._workload, self._pool(k), self._pool(v))

    @cached_property
    def _slots(self) -> torch.Tensor:
        return self.page_table.flatten().long()

    def _pool(self, dense: torch.Tensor) -> torch.Tensor:
        """Return pages (pages, size, kv_heads, dim); the last one is nobody's, and NaN."""
        mine = dense[:, :, self._positions.to(dense.device)]
        pages = cut_into_pages(mine, self.page_table.shape[1], self._size)
        pool = pages.new_full((len(pages) + 1, *pages.shape[1:]), math.nan)
        pool[self._slots.to(dense.device)] = pages
        return pool


def parts_of(
    tensors: Mapping[str, torch.Tensor], sharding: Sharding, layout: str, rank: int, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Return a rank's q, k and v. tensors: the whole ones; keys in pages are read out of them, as `Inputs.gathered` does."""
    if sharding.workload.kv_pages is None:
        return {name: cut(tensor, name, sharding, layout, rank, device) for name, tensor in tensors.items()}
    q = cut(tensors["q"], "q", sharding, layout, rank, device)
    k, v = RankCache(sharding, rank).pools(*(tensors[name].to(device or tensors[name].device) for name in "kv"))
    return {"q": q, "k": k, "v": v}


def whole_of(inputs: Inputs, spec: CheckSpec) -> dict[str, torch.Tensor]:
    """Return what `parts_of` takes, of inputs, in the layout of a spec."""
    q, k, v = spec.handed(inputs)
    if spec.workload.kv_pages is not None:
        k, v = inputs.gathered()
    return {"q": q, "k": k, "v": v}
