"""Positions of a long sequence that are looked at: the ends, both sides of every border where kernels break, random others.

The needles of long inputs (`LongNeedles`) lie at the same positions, so that what is looked at can show a lost key.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_attn.workloads.workload import Workload

#: about how many query rows, and keys, of a long workload are looked at, and how many more that nobody can know before
SAMPLED, DRAWN = 2048, 24
#: rows or keys of a kernel's tile; pages of 16 to 128 tokens end there, too
TILE = 128
#: of keys, and of (query, key) pairs of one head: from either on a workload is long
LONG_KEYS, LONG_PAIRS = 1 << 16, 1 << 28
#: parts of a sequence that lies on 2, 4 or 8 devices, with two chunks on each
_PARTS = 16
#: elements after which int32, as an offset in elements or in bytes of a 16-bit dtype, and uint32 wrap round
_WRAPS = (1 << 30, 1 << 31, 1 << 32)


def is_long(q_len: int, kv_len: int) -> bool:
    """Return whether sequences of these lengths have the needles of long ones; the same on every device."""
    return kv_len >= LONG_KEYS or q_len * kv_len >= LONG_PAIRS


def has_long_sequences(w: Workload) -> bool:
    """Return whether the sequences of a workload are long; packed ones are not taken as such."""
    return not w.is_packed and is_long(w.q_len, w.kv_len)


def sampled_positions(length: int, most: int = SAMPLED, far: tuple[int, ...] = ()) -> list[int]:
    """Choose about `most` positions in ascending order; all of a sequence that has no more. far: some that must be there."""
    if length <= most:
        return list(range(length))
    chosen = {0, 1, length - 2, length - 1, *borders(length, most), *(p for p in far if 0 <= p < length)}
    scattered = random.Random(length)
    return sorted(chosen | {scattered.randrange(length) for _ in range(most // 2)})


def drawn_positions(length: int) -> set[int]:
    """Draw positions from the system's randomness: a kernel may have learned all others."""
    system = random.SystemRandom()
    return {system.randrange(length) for _ in range(DRAWN)}


def borders(length: int, most: int = SAMPLED) -> list[int]:
    """Return both sides of the borders of tiles, of the last full tile and of devices that share it, in ascending order."""
    step = max(TILE, length // max(1, most // 4) // TILE * TILE)
    at = {*range(TILE, length, step), length // TILE * TILE, *(part * length // _PARTS for part in range(1, _PARTS))}
    return sorted({p for border in at for p in (border - 1, border) if 0 <= p < length})


def far_positions(w: Workload, heads: int, length: int, dim: int) -> tuple[int, ...]:
    """Return both sides of where offsets in a tensor (batch, heads, length, dim) pass what integers of 32 bits hold.

    It may lie as (batch, heads, length, dim), as (batch, length, heads, dim), or in a projection together with q, k and v.
    A kernel may count in scores, (length, kv_len), as well.
    """
    fused = w.heads * w.head_dim + w.kv_heads * (w.head_dim + w.v_head_dim)
    found: set[int] = set()
    for wrap in _WRAPS:
        for first, step in _lines(w.batch, heads, length, dim, fused, w.kv_len):
            row = -(-(wrap - first) // step)
            found.update(p for p in (row - 1, row) if 0 < row < length and p >= 0)
    return tuple(sorted(found))


def _lines(batch: int, heads: int, length: int, dim: int, fused: int, kv_len: int) -> Iterator[tuple[int, int]]:
    """Yield the offset of the first element of each run of rows, and how far apart its rows lie."""
    for number in range(batch * heads):
        yield number * length * dim, dim
    for number in range(batch):
        yield number * length * heads * dim, heads * dim
        yield number * length * fused, fused
    yield 0, kv_len
