"""How the arithmetic is cut: segments of equally long sequences, blocks of heads, chunks of query rows.

A chunk is computed at a time, so memory grows with the sequence, not with its square. Here is what each of them holds;
`reference.py` says what is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.workloads.heads import grouped_order
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import MaskMod
from pytest_attn.workloads.visibility import interval
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: Score elements that one chunk may hold (times 8 bytes, times about five temporaries).
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
#: Rows or keys of a kernel's tile.
TILE = 128


def chunk_elements(device: torch.device) -> int:
    """Return how many scores one chunk may hold on this device."""
    return _CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]


@dataclass(frozen=True)
class Segment:
    """Sequences of equal length, and which of their rows and keys the reference keeps.

    q: (n, heads, q_len, head_dim), dout: (n, heads, q_len, v_head_dim), both in the workload's dtype; k: (n, kv_heads, kv_len,
    head_dim) and v: (n, kv_heads, kv_len, v_head_dim) of the same sequences.
    first_batch: the batch entry of the first sequence. rows, keys: the sampled positions, None for all; keys are sampled for
    the backward pass only. q_start, kv_start: where the sequence begins in the reference, if it is packed.
    """

    workload: Workload
    inputs: Inputs
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    mask_mod: MaskMod | None
    first_batch: int = 0
    rows: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    q_start: int = 0
    kv_start: int = 0

    @property
    def lengths(self) -> tuple[int, int]:
        """q_len and kv_len."""
        return self.q.shape[2], self.k.shape[2]


def head_blocks(segment: Segment) -> Iterator[tuple[slice, slice]]:
    """Yield (batch entries, key heads) that together fit a chunk, or single key heads where one alone does not."""
    q_len, kv_len = segment.lengths
    if q_len == 0:
        return
    per_head = max(1, segment.workload.group * q_len * kv_len)
    room = max(1, chunk_elements(segment.k.device) // per_head)
    n, heads = segment.k.shape[:2]
    if room >= heads:
        step = room // heads
        for start in range(0, n, step):
            yield slice(start, min(n, start + step)), slice(0, heads)
        return
    for batch in range(n):
        for start in range(0, heads, room):
            yield slice(batch, batch + 1), slice(start, min(heads, start + room))


class Block:
    """Some key heads of some batch entries of a segment, and the query heads that use them.

    q: (n, heads, q_len, head_dim) and dout: (n, heads, q_len, v_head_dim) in the workload's dtype, as chunks take their rows.
    k: (n, kv_heads, kv_len, head_dim), v and v_squared: (n, kv_heads, kv_len, v_head_dim) in float64.
    batch_index: (n, 1, 1, 1) and head_index: (1, heads, 1, 1), as masks and score_mods take them. heads: where the query heads
    lie in q, dout and results, in which those of one key head follow each other (`grouped`).
    """

    def __init__(self, segment: Segment, batches: slice, kv_heads: slice) -> None:
        import torch

        self.segment, self.workload = segment, segment.workload
        group = self.workload.group
        self.batches, self.kv_heads = batches, kv_heads
        self.heads = slice(kv_heads.start * group, kv_heads.stop * group)
        self.q = segment.q[batches, self.heads]
        self.dout = segment.dout[batches, self.heads]
        self.k, self.v = (t[batches, kv_heads].double() for t in (segment.k, segment.v))
        self.v_squared = self.v.square()
        device = self.k.device
        self.batch_index = torch.arange(batches.start, batches.stop, device=device).view(-1, 1, 1, 1) + segment.first_batch
        order = torch.tensor(grouped_order(self.workload)[self.heads], device=device)
        self.head_index = order.view(1, -1, 1, 1)


def row_chunks(block: Block) -> Iterator[torch.Tensor]:
    """Yield positions of query rows, as many as fit a chunk: all rows, or the sampled ones if no gradient needs the others."""
    import torch

    segment = block.segment
    q_len, kv_len = segment.lengths
    only_sampled = segment.rows is not None and segment.keys is None
    rows = segment.rows if only_sampled else torch.arange(q_len, device=block.k.device)
    assert rows is not None
    heads = block.k.shape[0] * block.k.shape[1] * block.workload.group
    step = max(1, chunk_elements(block.k.device) // max(1, heads * kv_len))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


class Chunk:
    """Some query rows of a block in float64, and the keys that any of them may see.

    rows: (rows,) their positions. keys: the span of keys. q: (n, heads, rows, head_dim) in float64; k, v and v_squared: those
    of the block within the span.
    query_index: (1, 1, rows, 1) and key_index: (1, 1, 1, keys), as masks and score_mods take them.
    kept: (rows,), whether the reference keeps a row. places: (kept rows,), where it does.
    """

    def __init__(self, block: Block, rows: torch.Tensor) -> None:
        import torch

        segment = block.segment
        self.block, self.rows = block, rows
        self.keys = _visible_keys(segment, rows)
        self.q = block.q[:, :, rows].double()
        self.k, self.v, self.v_squared = (t[:, :, self.keys] for t in (block.k, block.v, block.v_squared))
        self.query_index = rows.view(1, 1, -1, 1)
        self.key_index = torch.arange(self.keys.start, self.keys.stop, device=rows.device).view(1, 1, 1, -1)
        if segment.rows is None:
            self.kept = torch.ones_like(rows, dtype=torch.bool)
            self.places = rows + segment.q_start
        else:
            self.kept = torch.isin(rows, segment.rows)
            self.places = torch.searchsorted(segment.rows, rows[self.kept])

    @property
    def indices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Batch entry, head, query and key of every score; together they broadcast to (n, heads, rows, keys)."""
        return self.block.batch_index, self.block.head_index, self.query_index, self.key_index


def _visible_keys(segment: Segment, rows: torch.Tensor) -> slice:
    """Return the span of keys that any of these rows can see where the mask tells, and no keys are sampled; else all."""
    q_len, kv_len = segment.lengths
    mask = segment.workload.plain_mask
    if segment.keys is not None or segment.inputs.kv_lens is not None or mask is None or kv_len < 2 * TILE:
        return slice(0, kv_len)
    first, last = (interval(mask, int(row), q_len, kv_len) for row in (rows[0], rows[-1]))
    if first is None or last is None:
        return slice(0, kv_len)
    return slice(min(first[0], last[0]), max(first[1], last[1], 1))
