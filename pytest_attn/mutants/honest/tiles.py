"""What the steps of the kernel are given: a call, its sequences, tiles of rows and keys, and the state of the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Mask, MaskMod
from pytest_attn.workloads.visibility import bind
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: a position, or a tensor of positions
Index: TypeAlias = "int | Tensor"
#: q, k and v, or their gradients
QKV: TypeAlias = "tuple[Tensor, Tensor, Tensor]"

#: Rows and keys of a tile, unless a kernel is made with others.
TILE = 64


@dataclass(frozen=True)
class Call:
    """One call: what the workload lends (masks, lengths, page table, ...), and q, k, v in their native layout."""

    inputs: Inputs
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def workload(self) -> Workload:
        """What is asked."""
        return self.inputs.workload

    @cached_property
    def _bound(self) -> dict[Mask, MaskMod]:
        return {}

    def bound(self, mask: Mask) -> MaskMod:
        """Return a mask as a predicate of (b, h, q_idx, kv_idx), made once."""
        w = self.workload
        if mask not in self._bound:
            self._bound[mask] = bind(mask, w.batch, w.heads, w.q_len, w.kv_len, w.kv_len, self.inputs.device)
        return self._bound[mask]


class Extent(NamedTuple):
    """How long a batch entry is, and where it begins along the tokens of packed tensors (0 elsewhere)."""

    q_start: int
    q_len: int
    kv_start: int
    kv_len: int


@dataclass(frozen=True)
class Sequence:
    """One batch entry of a call, with its extent."""

    call: Call
    batch: int
    q_start: int
    q_len: int
    kv_start: int
    kv_len: int

    @property
    def workload(self) -> Workload:
        """What is asked."""
        return self.call.workload


@dataclass(frozen=True)
class Tile:
    """Some rows and some keys of one sequence, as positions in it. The last tile of keys reaches past the sequence's end."""

    seq: Sequence
    rows: range
    keys: range

    @property
    def workload(self) -> Workload:
        """What is asked."""
        return self.seq.call.workload

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return self.seq.call.q.dtype

    @property
    def row_index(self) -> Tensor:
        """Positions of the rows, (1, rows, 1)."""
        return positions(self.rows, self.seq.call.q)[None, :, None]

    @property
    def key_index(self) -> Tensor:
        """Positions of the keys, (1, 1, keys)."""
        return positions(self.keys, self.seq.call.q)[None, None, :]

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, q_idx, kv_idx as mask_mods take them. Keys past the end become the last one, which masks and biases have."""
        like = self.seq.call.q
        batch = positions(range(self.seq.batch, self.seq.batch + 1), like)[:, None, None]
        heads = positions(range(self.workload.heads), like)[:, None, None]
        return batch, heads, self.row_index, self.key_index.clamp(max=self.workload.kv_len - 1)


def positions(span: range, like: Tensor) -> Tensor:
    """Return the numbers of a range, int64, on the device of `like`."""
    import torch

    return torch.arange(span.start, span.stop, device=like.device)


@dataclass(frozen=True)
class Softmax:
    """The online softmax of some rows: top, total (heads, rows) and acc (heads, rows, v_head_dim), not divided by total."""

    top: Tensor
    total: Tensor
    acc: Tensor


@dataclass(frozen=True)
class Rows:
    """What the backward pass loads of some query rows: q, dout (heads, rows, dim), lse and delta (heads, rows)."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
