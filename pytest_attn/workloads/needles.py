"""Needles of long sequences: rows whose query points at a key on a border, so that a key lost at any border is seen.

Random attention over many keys is flat: one key of a million moves out by less than its rounding. A needle has about half
of its row's weight. Both ends of every tile that is looked at are the needle of some row, near the diagonal and far from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.workloads.masks import intervals
from pytest_attn.workloads.positions import borders, far_positions, sampled_positions

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_attn.workloads.workload import Workload

#: rows up to which each query of each head has a border of its own, as in decoding
_FEW_ROWS = 64
#: how many of the borders next to the diagonal a needle may be at
_NEAR = 16


class LongNeedles:
    """The keys that the queries of one long sequence point at.

    Rows that are looked at have a border of the keys, another one in each head. Even rows in between have an edge of the mask,
    as in short sequences. The others have none.
    """

    def __init__(self, w: Workload, q_len: int, kv_len: int) -> None:
        import torch

        self.heads, self.q_len, self.kv_len, self.mask = w.heads, q_len, kv_len, w.plain_mask
        far_rows = far_positions(w, w.heads, q_len, w.head_dim)
        far_keys = far_positions(w, w.kv_heads, kv_len, w.head_dim)
        self.looked_at = torch.tensor(sampled_positions(q_len, far=far_rows))
        self.borders = torch.tensor(sorted({0, *borders(kv_len), *(p for p in far_keys if p < kv_len), kv_len - 1}))

    def targets(self, rows: Tensor) -> Tensor:
        """Return the key of each head's row, -1 for none. rows: (n,) in ascending order; returned: (heads, n)."""
        import torch

        first, end = intervals(self.mask, rows, self.q_len, self.kv_len)
        plain = self._edges(rows, first, end).expand(self.heads, -1)
        at = torch.searchsorted(self.looked_at, rows).clamp(max=len(self.looked_at) - 1)
        is_looked_at = (self.looked_at[at] == rows) & (end > first)
        aimed = self._few(rows) if self.q_len <= _FEW_ROWS else self._at_borders(rows, at, first, end)
        is_seen = is_looked_at & (aimed >= first) & (aimed < end)
        return torch.where(is_seen, aimed, plain)

    def _edges(self, rows: Tensor, first: Tensor, end: Tensor) -> Tensor:
        """Return an edge of the mask for even rows, as `distributions` has them for short sequences."""
        import torch

        diagonal = self._diagonal(rows)
        choices = torch.stack((diagonal, end - 1, first, end, first - 1, torch.full_like(rows, self.kv_len - 1)))
        chosen = choices.gather(0, (rows // 2 % len(choices))[None])[0]
        chosen = torch.where((chosen >= 0) & (chosen < self.kv_len), chosen, diagonal)
        return torch.where(rows % 2 == 0, chosen, -1)

    def _diagonal(self, rows: Tensor) -> Tensor:
        return (rows + self.kv_len - self.q_len).clamp(0, self.kv_len - 1)

    def _few(self, rows: Tensor) -> Tensor:
        """Return both ends of as many equal parts of the keys as there are pairs of (row, head)."""
        import torch

        number = rows * self.heads + torch.arange(self.heads)[:, None]
        parts = max(1, self.q_len * self.heads // 2)
        part, is_end = number // 2 % parts, number % 2
        return (part + is_end) * self.kv_len // parts - is_end

    def _at_borders(self, rows: Tensor, at: Tensor, first: Tensor, end: Tensor) -> Tensor:
        """Return for each head's row the border next to the diagonal, one near it, any that it sees, or the plain edge (-1).

        Rows at borders take the first, in odd heads the border before it: so none is left out in any head.
        """
        import torch

        head = torch.arange(self.heads)[:, None]
        mixed = (at * 7919 + head * 104_729 + 13).remainder(1 << 20)
        low = torch.searchsorted(self.borders, first)
        high = torch.searchsorted(self.borders, end) - 1  # the last border that is seen
        here = torch.searchsorted(self.borders, self._diagonal(rows), right=True) - 1
        seen = (high - low + 1).clamp(min=1)
        nearest = (here.minimum(high) - head % 2).maximum(low)
        near = high - mixed % seen.clamp(max=_NEAR)
        anywhere = low + mixed % seen
        is_border = self.borders[here.clamp(min=0)] == self._diagonal(rows)
        kind = torch.where(is_border, 1, (at + head) % 4)
        index = torch.where(kind == 1, nearest, torch.where(kind == 2, near, anywhere))
        aimed = self.borders[index.clamp(0, len(self.borders) - 1)]
        return torch.where((kind == 0) | (high < low), -1, aimed)
