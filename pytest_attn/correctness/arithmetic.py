"""The forward arithmetic of exact attention in float64: how a workload is cut, products of GQA heads, scores, softmax.

A workload is cut into segments of equally long sequences, blocks of heads and chunks of query rows. One chunk is computed at a
time, so memory grows with the sequence, not with its square. Query head h uses key head h // group, and keys are never
repeated in memory. reference.py runs it over a whole workload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from pytest_attn.backends.precision import Threshold
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import MaskMod, interval
from pytest_attn.workloads.positions import LONG_KEYS, TILE
from pytest_attn.workloads.workload import Workload, grouped_order

# -- blocks of a workload ----------------------------------------------------------------------------------------------


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
    heads: where the query heads lie in q, dout and results, in which those of one key head follow each other (`grouped`).
    """

    def __init__(self, segment: Segment, batches: slice, kv_heads: slice) -> None:
        self.segment, self.workload = segment, segment.workload
        group = self.workload.group
        self.batches, self.kv_heads = batches, kv_heads
        self.heads = slice(kv_heads.start * group, kv_heads.stop * group)
        self.q = segment.q[batches, self.heads]
        self.dout = segment.dout[batches, self.heads]
        self.k, self.v = (t[batches, kv_heads].double() for t in (segment.k, segment.v))
        self.v_squared = self.v.square()

    @cached_property
    def batch_index(self) -> torch.Tensor:
        """(n, 1, 1, 1), as masks and score_mods take it."""
        first = self.segment.first_batch
        return _numbers(range(self.batches.start + first, self.batches.stop + first), self.k.device).view(-1, 1, 1, 1)

    @cached_property
    def head_index(self) -> torch.Tensor:
        """(1, heads, 1, 1), as masks and score_mods take it."""
        return _numbers(grouped_order(self.workload)[self.heads], self.k.device).view(1, -1, 1, 1)


def _numbers(several: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return numbers; those that follow each other without a copy, for which a device would be waited for."""
    if [*several] == [*range(several[0], several[-1] + 1)]:
        return torch.arange(several[0], several[-1] + 1, device=device)
    return torch.tensor(several, device=device)


def row_chunks(block: Block) -> Iterator[torch.Tensor]:
    """Yield positions of query rows, as many as fit a chunk: all rows, or the sampled ones if no gradient needs the others."""
    segment = block.segment
    q_len, kv_len = segment.lengths
    rows = segment.rows if _takes_only_sampled(segment) else torch.arange(q_len, device=block.k.device)
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


def _takes_only_sampled(segment: Segment) -> bool:
    """Return whether there is no gradient that needs the other rows."""
    return segment.rows is not None and (segment.keys is None or not len(segment.keys))


class Chunk:
    """Some query rows of a block in float64, and the keys that any of them may see.

    rows: (rows,) their positions. keys: the span of keys. q: (n, heads, rows, head_dim) in float64; k, v and v_squared: those
    of the block within the span.
    query_index: (1, 1, rows, 1) and key_index: (1, 1, 1, keys), as masks and score_mods take them.
    kept: (rows,), whether the reference keeps a row, or which it keeps. places: (kept rows,), where it does.
    """

    def __init__(self, block: Block, rows: torch.Tensor) -> None:
        segment = block.segment
        self.block, self.rows = block, rows
        self.keys = slice(0, segment.lengths[1])
        if _tells_its_keys(segment):
            ends = rows[:: max(1, len(rows) - 1)].tolist()  # both at once: a device is waited for
            self.keys = _span_of(segment, ends[0], ends[-1])
        self.q = block.q[:, :, rows].double()
        self.k, self.v, self.v_squared = (t[:, :, self.keys] for t in (block.k, block.v, block.v_squared))
        self.query_index = rows.view(1, 1, -1, 1)
        self.key_index = torch.arange(self.keys.start, self.keys.stop, device=rows.device).view(1, 1, 1, -1)
        self.kept: torch.Tensor | slice = slice(None)
        if segment.rows is None:
            self.places = rows + segment.q_start
        elif not len(segment.rows):
            self.kept, self.places = slice(0), rows[:0]
        else:
            if not _takes_only_sampled(segment):
                self.kept = torch.isin(rows, segment.rows)
            self.places = torch.searchsorted(segment.rows, rows[self.kept])

    def seen_among(self, keys: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Return which of these keys, ascending, lie in the chunk's span, counted from its first; and their places."""
        start, stop = torch.searchsorted(keys, keys.new_tensor((self.keys.start, self.keys.stop))).tolist()
        return keys[start:stop] - self.keys.start, slice(start, stop)

    @property
    def indices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Batch entry, head, query and key of every score; together they broadcast to (n, heads, rows, keys)."""
        return self.block.batch_index, self.block.head_index, self.query_index, self.key_index


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


# -- products over heads of GQA ---------------------------------------------------------------------------------------


#: keys of one head from which a sum over them is split, and how many each part has
_MANY_KEYS, _PART = 1 << 15, 1 << 12


def per_key(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(n, heads, rows, d) x (n, kv_heads, keys, d) -> (n, heads, rows, keys)."""
    n, heads, rows, dim = a.shape
    folded = a.reshape(n, b.shape[1], -1, dim)
    return (folded @ b.transpose(-1, -2)).view(n, heads, rows, b.shape[2])


def over_keys(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(n, heads, rows, keys) x (n, kv_heads, keys, d) -> (n, heads, rows, d)."""
    n, heads, rows, keys = a.shape
    folded = a.reshape(n, b.shape[1], heads // b.shape[1] * rows, keys)  # keys may be none
    if n * b.shape[1] == 1 and keys >= _MANY_KEYS:
        return _in_parts(folded[0, 0], b[0, 0]).view(n, heads, rows, b.shape[3])
    return (folded @ b).view(n, heads, rows, b.shape[3])


def _in_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(rows, keys) x (keys, d) -> (rows, d): the sums over parts of many keys side by side, as few rows occupy no GPU."""
    rows, keys = a.shape
    parts = keys // _PART
    whole = parts * _PART
    of_parts = a[:, :whole].view(rows, parts, _PART).transpose(0, 1)
    total = torch.bmm(of_parts, b[:whole].view(parts, _PART, -1)).sum(0)
    return total.addmm_(a[:, whole:], b[whole:]) if whole < keys else total


def over_rows(a: torch.Tensor, b: torch.Tensor, heads: int) -> torch.Tensor:
    """(n, query heads, rows, keys)^T x (n, query heads, rows, d) -> (n, heads, keys, d), each summed over its query heads."""
    n, query_heads, rows, keys = a.shape
    folded = a.reshape(n, heads, query_heads // heads * rows, keys)
    return folded.transpose(-1, -2) @ b.reshape(n, heads, -1, b.shape[3])


def over_group(x: torch.Tensor, group: int) -> torch.Tensor:
    """(n, heads, keys, d) -> (n, heads // group, keys, d), summed over the query heads of each key head."""
    n, heads, keys, dim = x.shape
    return x.view(n, heads // group, group, keys, dim).sum(2)


# -- scores and softmax ------------------------------------------------------------------------------------------------


def scaled_scores(chunk: Chunk) -> torch.Tensor:
    """Return scale * q . k, (n, heads, rows, keys)."""
    return per_key(chunk.q * chunk.block.workload.softmax_scale, chunk.k)


def modify(scores: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply softcap, bias, ALiBi, score_mod and the mask, in this order unless the bias is first, in place where that can be.

    Returns the final scores, and their derivative by the scaled scores, both (n, heads, rows, keys); None where it is 1.
    """
    segment, slope = chunk.block.segment, None
    w, inputs = segment.workload, segment.inputs
    scores = before_softcap(scores, chunk)
    if w.softcap is not None:
        scores = scores.div_(w.softcap).tanh_()
        slope = 1 - scores.square()
        scores = scores.mul_(w.softcap)
    if inputs.bias is not None and w.bias is not None and not w.bias_before_softcap:
        scores = scores + _bias(inputs.bias, chunk)
    if inputs.alibi_slopes is not None and w.alibi:
        scores = scores + alibi_of(chunk)
    if w.score_mod is not None:
        scores, slope_of_mod = _score_mod(scores, chunk)
        slope = slope_of_mod if slope is None else slope * slope_of_mod
    if segment.mask_mod is not None:
        visible = segment.mask_mod(*chunk.indices)
        if not isinstance(visible, torch.Tensor) or visible.dtype != torch.bool:
            raise ValueError(f"{w.id}: mask must return a boolean tensor, it returned {describe(visible)}")
        scores = scores.masked_fill_(~visible, -math.inf)
    return scores, slope


def left_out(chunk: Chunk, skips: Threshold, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which scores of a chunk a kernel leaves out by design and of which rounding decides: (n, heads, rows, keys).

    noise: by how much a score may be off.
    """
    rows_of_tile, keys_of_tile = skips.tile
    q_len, numbers = chunk.block.segment.lengths[0], chunk.rows // rows_of_tile
    several = max(1, len(chunk.rows) // rows_of_tile)  # as many scores at a time as the chunk has
    found = []
    for tiles in torch.split(torch.tensor(sorted({*numbers.tolist()}), device=numbers.device), several):
        rows = (tiles[:, None] * rows_of_tile + torch.arange(rows_of_tile, device=tiles.device)).flatten()
        whole = Chunk(chunk.block, rows[rows < q_len])
        scores, _ = modify(scaled_scores(whole), whole)
        of_key, of_row = whole.key_index.flatten() // keys_of_tile, torch.searchsorted(tiles, whole.rows // rows_of_tile)
        shape = (*scores.shape[:3], int(of_key[-1]) + 1 if len(of_key) else 0)
        tops = scores.new_full(shape, -math.inf).index_reduce_(3, of_key, scores, "amax")
        over = tops - _largest_before(tops, skips.maximum) - math.log(skips.weight)
        highest = over.new_full((*shape[:2], len(tiles), shape[3]), -math.inf)
        highest.index_reduce_(2, of_row, over.nan_to_num_(-math.inf, math.inf, -math.inf), "amax")
        at = torch.searchsorted(tiles, numbers[torch.isin(numbers, tiles)])
        found.append(highest[:, :, at][..., (chunk.key_index.flatten() // keys_of_tile).clamp(max=shape[3] - 1)])
    highest = torch.cat(found, 2)
    return highest < -noise, (highest >= -noise) & (highest < noise)


def _largest_before(tops: torch.Tensor, maximum: str) -> torch.Tensor:
    """Return what the largest scores of tiles, (..., tiles), are compared with, as `Threshold.maximum` says."""
    if maximum == "last":
        return tops.amax(-1, keepdim=True)
    if maximum == "running-backwards":
        return _largest_before(tops.flip(-1), "running").flip(-1)
    return torch.cat((tops.new_full((*tops.shape[:-1], 1), -math.inf), tops.cummax(-1).values[..., :-1]), -1)


def kept_share(chunk: Chunk) -> torch.Tensor | None:
    """Return what dropout multiplies each probability by: 0, or 1 / (1 - dropout), (n, heads, rows, keys); None without it."""
    block, w = chunk.block, chunk.block.workload
    keep = block.segment.inputs.keep
    if keep is None or not w.dropout:
        return None
    kept = keep.to(chunk.q.device)[block.batches, block.head_index.flatten()][:, :, chunk.rows][..., chunk.keys]
    return kept.double() / (1 - w.dropout)


def before_softcap(scores: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return scaled scores (n, heads, rows, keys) with the bias where it comes before the softcap, else as they are."""
    bias = chunk.block.segment.inputs.bias
    if bias is None or not chunk.block.workload.bias_before_softcap:
        return scores
    return scores + _bias(bias, chunk)


def softmax(scores: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P (n, heads, rows, keys), in place of the scores, and the natural log-sum-exp (n, heads, rows).

    A row that sees nothing has P = 0 and lse = -inf.
    """
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    sinks = sinks_of(chunk)
    if sinks is not None:
        top = top.maximum(sinks)
    top = top.masked_fill_(top == -math.inf, 0.0)
    p = scores.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    lse = (total.log() + top).squeeze(-1)
    return p.div_(total.masked_fill(total == 0, 1.0)), lse


def weights_given(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return P = exp(s - lse) of final scores (n, heads, rows, keys) and lse (n, heads, rows, 1); 0 where nothing is seen."""
    return (scores - lse.masked_fill(lse == -math.inf, 0)).exp()


def _bias(bias: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return the chunk's part of the bias, (n, heads, rows, keys)."""
    block, w = chunk.block, chunk.block.workload
    everywhere = bias.to(chunk.q.device).expand(w.batch, w.heads, w.q_len, w.kv_len)
    return everywhere[block.batches, block.head_index.flatten()][:, :, chunk.rows][..., chunk.keys].double()


def alibi_of(chunk: Chunk) -> torch.Tensor:
    """Return what ALiBi adds to the scores, (n or 1, heads, rows, keys)."""
    slopes = chunk.block.segment.inputs.alibi_slopes
    assert slopes is not None
    return slopes_of(slopes.to(chunk.q.device).double(), *chunk.indices[:2]) * -distances_of(chunk)


def slopes_of(slopes: torch.Tensor, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Return the slopes of heads h, of batch entries b where these have their own."""
    return slopes[h] if slopes.dim() == 1 else slopes[b, h]


def distances_of(chunk: Chunk) -> torch.Tensor:
    """Return |i + kv_len - q_len - j|, (n or 1, 1, rows, keys), with each batch entry's own kv_len."""
    block = chunk.block
    q_len, kv_len = block.segment.lengths
    lens = block.segment.inputs.kv_lens
    kv_lens = kv_len if lens is None else lens.to(chunk.rows.device)[block.batch_index]
    return (chunk.query_index + kv_lens - q_len - chunk.key_index).abs()


def _score_mod(scores: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what score_mod makes of the scores, and its derivative, both (n, heads, rows, keys)."""
    w = chunk.block.workload
    assert w.score_mod is not None
    with torch.enable_grad():
        leaf = scores.detach().requires_grad_()
        modified = w.score_mod(leaf, *chunk.indices)
        if not isinstance(modified, torch.Tensor):
            raise ValueError(f"{w.id}: score_mod must return a tensor, it returned {describe(modified)}")
        modified = (modified.double() + 0 * leaf).expand(scores.shape)  # so that one without the score has slope 0
        (slope,) = torch.autograd.grad(modified.sum(), leaf)
    return modified.detach().clone(), slope


def sinks_of(chunk: Chunk) -> torch.Tensor | None:
    """Return the sinks' logits, (1, heads, 1, 1)."""
    sinks = chunk.block.segment.inputs.sinks
    if sinks is None or not chunk.block.workload.sinks:
        return None
    return sinks.to(chunk.rows.device).double()[chunk.block.head_index]
