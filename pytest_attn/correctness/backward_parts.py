"""Parts of a backward pass in float64, small enough to be computed again with one step changed.

A part is some rows with all keys where dq is asked for, and some keys with all rows where dk or dv is; of small workloads it
is all of both. lse and D come from the reference, so no part needs what it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.correctness.blocks import Block, Chunk, Segment
from pytest_attn.correctness.exact import modify, scaled_scores
from pytest_attn.correctness.reference import Reference, heads_first, segments_of
from pytest_attn.workloads.heads import grouped
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: scores up to which a part holds all rows and keys, and how many rows or keys it holds beyond that
_WHOLE, _FEW = 1 << 18, 8
#: scores that no part may exceed
_MOST = 1 << 22


@dataclass(frozen=True)
class Place:
    """Which part it is: a batch entry (packed: a sequence), rows and keys of it, None for all."""

    batch: int
    rows: torch.Tensor | None = None
    keys: torch.Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it holds all rows and keys."""
        return self.rows is None and self.keys is None


class Part(Chunk):
    """The rows and keys of a place, as the scores are computed from them.

    scaled, scores: before and after softcap, bias, ALiBi, score_mod and mask; slope: derivative between the two, None for 1.
    All (1, heads, rows, keys), float64.
    """

    def __init__(self, inputs: Inputs, w: Workload, place: Place) -> None:
        import torch

        segment, batches = _segment_of(inputs, w, place.batch)
        block = Block(segment, batches, slice(0, w.kv_heads))
        q_len, kv_len = segment.lengths
        rows = torch.arange(q_len, device=block.k.device) if place.rows is None else place.rows
        super().__init__(block, rows)
        at = torch.arange(kv_len, device=rows.device) if place.keys is None else place.keys
        self.at, self.keys = at, at  # type: ignore[assignment]  # an index does where a span does
        self.k, self.v = block.k[:, :, at], block.v[:, :, at]
        self.key_index = at.view(1, 1, 1, -1)
        self.scaled = scaled_scores(self)
        self.scores, self.slope = modify(self.scaled.clone(), self)

    @property
    def dout(self) -> torch.Tensor:
        """The gradient of out, (1, heads, rows, v_head_dim)."""
        return self.block.dout[:, :, self.rows].double()

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a heads-first tensor (batch, heads, rows, ...) of query rows, its heads grouped."""
        return self._of(grouped(tensor, self.block.workload), self.rows + self.block.segment.q_start)

    def of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a heads-first tensor (batch, kv_heads, keys, ...)."""
        return self._of(tensor, self.at + self.block.segment.kv_start)

    def _of(self, tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return tensor[self.block.batches][:, :, at.to(tensor.device)]


def _segment_of(inputs: Inputs, w: Workload, batch: int) -> tuple[Segment, slice]:
    """Return the segment that holds a batch entry, and where in it."""
    segments = list(segments_of(inputs, w, inputs.device))
    if w.is_packed:
        return segments[batch], slice(0, 1)
    return segments[0], slice(batch, batch + 1)


def places_of(reference: Reference, name: str, bad: torch.Tensor) -> Iterator[Place]:
    """Yield where to look at a gradient, the worst batch entry first; nothing where parts would be too large.

    bad: (batch, heads, rows), rows of the gradient that are wrong.
    """
    w = reference.inputs.workload
    if reference.is_sampled:
        return
    if w.is_packed:
        yield from _of_sequences(w)
        return
    entries = bad.any(-1).any(-1)
    order = sorted(range(w.batch), key=lambda b: not bool(entries[b]))
    for batch in order:
        place = _place_in(w, name, batch, bad[batch].any(0))
        if place is not None:
            yield place


def _of_sequences(w: Workload) -> Iterator[Place]:
    lengths = list(zip(w.q_lens or (), w.kv_lens or (), strict=True))
    if w.heads * sum(q_len * kv_len for q_len, kv_len in lengths) <= _WHOLE:
        yield from (Place(batch) for batch, (q_len, kv_len) in enumerate(lengths) if q_len and kv_len)


def _place_in(w: Workload, name: str, batch: int, faulty: torch.Tensor) -> Place | None:
    import torch

    if w.heads * w.q_len * w.kv_len <= _WHOLE:
        return Place(batch)
    if w.heads * (w.kv_len if name == "dq" else w.q_len) * 2 * _FEW > _MOST:
        return None
    chosen = torch.cat([faulty.nonzero().flatten()[:_FEW], (~faulty).nonzero().flatten()[:_FEW]]).sort().values
    return Place(batch, rows=chosen) if name == "dq" else Place(batch, keys=chosen)


def row_sums(reference: Reference) -> torch.Tensor:
    """Return D = sum(do * o) of every row, (batch, heads, rows, 1)."""
    dout = heads_first(reference.inputs.dout, reference.inputs.workload).double()
    return (dout * reference.tensors["out"].value).sum(-1, keepdim=True)
