"""Cut whole tensors into the shards of ranks, and join shards again."""

import math
from collections.abc import Mapping

import torch

from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.workloads.inputs import Inputs, cut_into_pages
from pytest_attn.workloads.kv_layout import handed_over

#: dimension of the rows in each layout
_ROWS = {"bhsd": 2, "bshd": 1, "thd": 0}
#: elements of NaN behind a shard
_BEYOND = 1 << 14


def rows_dim(name: str, layout: str) -> int:
    """Return the dimension of the rows, or keys, of a tensor of this name; lse has heads before rows in each layout."""
    if name == "lse":
        return 1 if layout == "thd" else 2
    return _ROWS[layout]


def cut(
    tensor: torch.Tensor, name: str, sharding: Sharding, layout: str, rank: int, device: torch.device | None = None
) -> torch.Tensor:
    """Return a rank's shard of a whole tensor, which lies in memory as the whole one does. device: by default the whole's."""
    shard = tensor.index_select(rows_dim(name, layout), sharding.on_device(name, rank, tensor.device))
    return laid_like(shard.to(device or tensor.device), tensor)


def laid_like(shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a copy whose dimensions lie in memory in the order of another tensor's, as a slice where that is one.

    NaN lies behind it: who reads more rows than a shard has must not get away with zeros.
    """
    order = sorted(range(whole.dim()), key=whole.stride, reverse=True)
    width = 1
    if whole.dim() > 1 and whole.stride(order[-1]) == 1 and whole.shape[order[-1]]:
        width = max(1, whole.stride(order[-2]) // whole.shape[order[-1]]) if whole.shape[order[-2]] > 1 else 1
    sizes = [shard.shape[dim] for dim in order]
    rows = (*sizes[:-1], sizes[-1] * width)
    memory = torch.full((math.prod(rows) + _BEYOND,), math.nan, dtype=shard.dtype, device=shard.device)
    buffer = memory[: math.prod(rows)].view(rows)
    first = (width // 2) * sizes[-1]
    laid = buffer[..., first : first + sizes[-1]].permute(*(order.index(dim) for dim in range(whole.dim())))
    return laid.copy_(shard)


def join(shards: list[torch.Tensor], name: str, whole: tuple[int, ...], sharding: Sharding, layout: str) -> torch.Tensor:
    """Return the whole tensor of this shape from all ranks' shards.

    Where each rank returns all rows, they must be equal. Raises ContractError naming the rank of a shard that does not fit.
    """
    dim, parts = _split_along(name, sharding, layout)
    if len(shards) > 1 and all(tuple(shard.shape) == whole for shard in shards):
        return _replicated(shards, name)
    joined = shards[0].new_empty(whole)
    for rank, (shard, positions) in enumerate(zip(shards, parts, strict=True)):
        expected = (*whole[:dim], len(positions), *whole[dim + 1 :])
        if tuple(shard.shape) != expected:
            found = tuple(shard.shape)
            raise ContractError(f"rank {rank}: {name} has shape {found}; expected {expected}, its shard of {whole}")
        if shard.dtype != shards[0].dtype:
            raise ContractError(f"rank {rank}: {name} has dtype {shard.dtype}; rank 0 returned {shards[0].dtype}")
        joined.index_copy_(dim, positions.to(joined.device), shard.to(joined.device))
    return joined


def _split_along(name: str, sharding: Sharding, layout: str) -> tuple[int, list[torch.Tensor]]:
    """Return the dimension along which ranks share a result, and what each has of it: rows; heads where keys are in pages."""
    if not sharding.shares_pages:
        return rows_dim(name, layout), sharding.of(name)
    dims = {"bhsd": 1, "bshd": 1, "thd": 0} if name == "lse" else {"bhsd": 1, "bshd": 2, "thd": 1}
    return dims[layout], list(torch.arange(sharding.workload.heads).tensor_split(sharding.ranks))


def _replicated(shards: list[torch.Tensor], name: str) -> torch.Tensor:
    """Return what all ranks hold alike; raise ContractError where they do not."""
    first = shards[0]
    for rank, other in enumerate(shards[1:], 1):
        unequal = ~((first == other) | (first.isnan() & other.isnan()))
        if bool(unequal.any()):
            raise ContractError(
                f"{name} is whole on every rank, and differs between rank 0 and rank {rank}"
                f" in {int(unequal.sum()):,} of {first.numel():,} elements"
            )
    return first


class RankCache:
    """A rank's tokens as they lie: behind one another in the order of their sequence, in pages in no order.

    page_table: (batch, pages per sequence), int32. kv_lens: how many of a sequence's tokens the rank holds, (batch,), int32,
    which may be 0. Both on the CPU.
    """

    def __init__(self, sharding: Sharding, rank: int) -> None:
        w = sharding.workload
        assert w.kv_pages is not None
        self._workload, self._size = w, w.kv_pages.size
        self._sharding, self._rank = sharding, rank
        self._positions = sharding.keys[rank]
        self._slots: dict[torch.device, torch.Tensor] = {}  # of the pages, on each device that was asked for
        lengths = torch.tensor(w.kv_lens or (w.kv_len,) * w.batch)
        self.kv_lens = (self._positions[None] < lengths[:, None]).sum(1, dtype=torch.int32)
        per_sequence = math.ceil(len(self._positions) / self._size)
        order = torch.randperm(w.batch * per_sequence, generator=torch.Generator().manual_seed(rank + 1))
        self.page_table = order.view(w.batch, per_sequence).to(torch.int32)

    def pools(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank's pools of whole keys and values, (batch, kv_heads, kv_len, dim), as `Pages` says that they lie."""
        return handed_over(self._workload, self._pool(k), self._pool(v))

    def _pool(self, dense: torch.Tensor) -> torch.Tensor:
        """Return pages (pages, size, kv_heads, dim); the last one is nobody's, and NaN."""
        mine = dense[:, :, self._sharding.on_device("k", self._rank, dense.device)]
        pages = cut_into_pages(mine, self.page_table.shape[1], self._size)
        pool = pages.new_full((len(pages) + 1, *pages.shape[1:]), math.nan)
        if dense.device not in self._slots:
            self._slots[dense.device] = self.page_table.flatten().long().to(dense.device)
        pool[self._slots[dense.device]] = pages
        return pool


def parts_of(
    tensors: Mapping[str, torch.Tensor],
    sharding: Sharding,
    layout: str,
    rank: int,
    device: torch.device | None = None,
    cache: RankCache | None = None,
) -> dict[str, torch.Tensor]:
    """Return a rank's q, k and v. tensors: the whole ones; keys in pages are read out of them, as `Inputs.gathered` does.

    cache: where they lie, if that is known.
    """
    if sharding.workload.kv_pages is None:
        return {name: cut(tensor, name, sharding, layout, rank, device) for name, tensor in tensors.items()}
    q = cut(tensors["q"], "q", sharding, layout, rank, device)
    k, v = (cache or RankCache(sharding, rank)).pools(*(tensors[name].to(device or tensors[name].device) for name in "kv"))
    return {"q": q, "k": k, "v": v}


def whole_of(inputs: Inputs, spec: CheckSpec) -> dict[str, torch.Tensor]:
    """Return what `parts_of` takes, of inputs, in the layout of a spec."""
    q, k, v = spec.handed(inputs)
    if spec.workload.kv_pages is not None:
        k, v = inputs.gathered()
    return {"q": q, "k": k, "v": v}
