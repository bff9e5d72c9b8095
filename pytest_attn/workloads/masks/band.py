"""Masks that are a band along the diagonal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pytest_attn.workloads.masks.mask import Band, Mask, MaskMod, NearMiss, Sequences, all_keys

if TYPE_CHECKING:
    import torch


class BandMask(Mask):
    """A mask that its `band` describes."""

    has_intervals: ClassVar[bool] = True

    @property
    @abstractmethod
    def band(self) -> Band:
        """The band."""

    def bind(self, over: Sequences) -> MaskMod:
        """Compare positions."""
        return in_band(self.band, over)

    def interval(self, row: int, q_len: int, kv_len: int) -> tuple[int, int]:
        """Return the keys between both edges that there are."""
        left, right, top_left = self.band
        position = row if top_left else row + kv_len - q_len
        start = 0 if left is None else max(0, position - left)
        end = kv_len if right is None else min(kv_len, position + right + 1)
        return min(start, kv_len), max(min(start, kv_len), end)

    def intervals(self, rows: torch.Tensor, q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys between both edges that there are."""
        left, right, top_left = self.band
        nothing, everything = all_keys(rows, kv_len)
        position = rows if top_left else rows + kv_len - q_len
        start = nothing if left is None else (position - left).clamp(0, kv_len)
        end = everything if right is None else (position + right + 1).clamp(max=kv_len)
        return start, end.maximum(start)

    def pairs(self, q_len: int, kv_len: int) -> int:
        """Sum up the intervals of all rows."""
        left, right, top_left = self.band
        shift = 0 if top_left else kv_len - q_len
        ends = q_len * kv_len if right is None else _clamped_sum(shift + right + 1, q_len, kv_len)
        starts = 0 if left is None else _clamped_sum(shift - left, q_len, kv_len)
        return max(0, ends - starts)

    def with_edges_moved(self, over: Sequences, left: int = 0, right: int = 0) -> MaskMod:
        """Return the mask with its edges further out by so many keys."""

        def moved(side: int | None, keys: int) -> int | None:
            return None if side is None else side + keys

        band = self.band
        return in_band(Band(moved(band.left, left), moved(band.right, right), band.top_left), over)

    def aligned_as_the_longest(self, over: Sequences) -> Iterator[NearMiss]:
        """Yield the mask whose rows stand, in all sequences, where those of the longest do."""
        if not self.band.top_left and len({kv_len - q_len for q_len, kv_len in over.lengths}) > 1:
            words = "that aligns all sequences as the longest one, not each to its own last key"
            longest = Sequences(over.batch, over.heads, over.q_len, over.kv_len, over.device)
            yield NearMiss("aligned-as-longest-sequence", words, in_band(self.band, longest))


def in_band(band: Band, over: Sequences) -> MaskMod:
    """Return a band as a predicate; its sides may be negative."""
    left, right, top_left = band
    q_lens = over.q_len if over.q_lens is None else over.q_lens
    kv_lens = over.kv_len if over.kv_lens is None else over.kv_lens

    def inside(b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        queries = q_lens if isinstance(q_lens, int) else q_lens[b]
        keys = kv_lens if isinstance(kv_lens, int) else kv_lens[b]
        position = q if top_left else q + (keys - queries)
        visible = kv >= 0
        if right is not None:
            visible = visible & (kv <= position + right)
        if left is not None:
            visible = visible & (kv >= position - left)
        return visible

    return inside


def _clamped_sum(shift: int, count: int, most: int) -> int:
    """Return the sum of min(max(i + shift, 0), most) over i = 0 ... count - 1."""
    first, last = max(0, -shift), min(count, most - shift)  # between these it grows by one
    growing = max(0, last - first)
    full = count - max(first, last, 0) if first < count else 0
    return growing * (first + shift) + growing * (growing - 1) // 2 + max(0, full) * most
