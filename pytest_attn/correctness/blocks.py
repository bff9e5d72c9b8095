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
from pytest_attn.workloads.masks import MaskMod, interval
from pytest_attn.workloads.positions import LONG_KEYS, TILE
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: Score elements that one chunk may hold (times 8 bytes, times about five temporaries).
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
#: Score elements that the chunk of a sampled sequence may hold at least, and how many bytes of q, k and v one more needs:
#: so that temporaries take as much memory as the inputs, however short or long these are.
_LEAST_ELEMENTS, _BYTES_PER_ELEMENT = 1 << 22, 64


def chunk_elements(device: torch.device) -> int:
    """Return how many scores one chunk may hold on this device."""
    return _CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]


def _room_in(segment: Segment) -> int:
    """Return how many scores a chunk of this segment may hold."""
    room = chunk_elements(segment.k.device)
    if segment.rows is None or room <= _LEAST_ELEMENTS:
        return room
    of_inputs = sum(t.numel() * t.element_size() for t in (segment.q, segment.k, segment.v))
    return min(room, max(_LEAST_ELEMENTS, of_inputs // _BYTES_PER_ELEMENT))


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
    if kv_len >= LONG_KEYS:  # k and v in float64 weigh as much as scores, where there are few rows
        per_head = max(per_head, kv_len * segment.workload.head_dim)
    room = max(1, _room_in(segment) // per_head)
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
    room = _room_in(segment) // max(1, heads)
    step = max(1, room // max(1, kv_len))
    if segment.rows is not None and _tells_its_keys(segment):
        yield from _chunks_by_span(segment, rows, step, room)
        return
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _chunks_by_span(segment: Segment, rows: torch.Tensor, least: int, room: int) -> Iterator[torch.Tensor]:
    """Yield as many rows at a time as fit with the keys that they see: many, where a window is short."""
    start, listed = 0, rows.tolist()
    while start < len(listed):
        step = least
        while start + step < len(listed):
            more = min(2 * step, len(listed) - start)
            span = _span_of(segment, listed[start], listed[start + more - 1])
            if more * (span.stop - span.start) > room:
                break
            step = more
        yield rows[start : start + step]
        start += step


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

    def seen_among(self, keys: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Return which of these keys, ascending, lie in the chunk's span, counted from its first; and their places."""
        import torch

        start, stop = torch.searchsorted(keys, keys.new_tensor((self.keys.start, self.keys.stop))).tolist()
        return keys[start:stop] - self.keys.start, slice(start, stop)

    @property
    def indices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Batch entry, head, query and key of every score; together they broadcast to (n, heads, rows, keys)."""
        return self.block.batch_index, self.block.head_index, self.query_index, self.key_index


def _visible_keys(segment: Segment, rows: torch.Tensor) -> slice:
    """Return the span of keys that any of these rows, in ascending order, can see where the mask tells; else all."""
    if not _tells_its_keys(segment):
        return slice(0, segment.lengths[1])
    return _span_of(segment, int(rows[0]), int(rows[-1]))


def _tells_its_keys(segment: Segment) -> bool:
    mask = segment.workload.plain_mask
    has_own_lengths = segment.inputs.kv_lens is not None
    return mask is not None and mask.has_intervals and not has_own_lengths and segment.lengths[1] >= 2 * TILE


def _span_of(segment: Segment, first_row: int, last_row: int) -> slice:
    """Return the keys that rows from the first to the last can see, of a mask that tells: at least one."""
    mask, (q_len, kv_len) = segment.workload.plain_mask, segment.lengths
    first, last = (interval(mask, row, q_len, kv_len) for row in (first_row, last_row))
    if first is None or last is None:
        return slice(0, kv_len)
    return slice(min(first[0], last[0]), max(first[1], last[1], 1))
