"""Split-KV: partial results over parts of the keys, merged by their lse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.mutants.honest.kernel import Kernel
from pytest_attn.mutants.honest.tiles import Sequence, Softmax

if TYPE_CHECKING:
    from torch import Tensor


class SplitKernel(Kernel):
    """A kernel that attends to each part of the keys alone."""

    splits = 2

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        """Attend to each part of the keys alone, and merge."""
        merged = self.merge(*self.partials(seq, rows))
        return self.finish(self.with_sinks(seq, merged))

    def partials(self, seq: Sequence, rows: range) -> tuple[list[Tensor], list[Tensor]]:
        """Return out and lse over each part of the keys; a part without keys has out = 0, lse = -inf."""
        results = [self.finish(self.softmax(seq, rows, tiles)) for tiles in self.parts(self.key_tiles(seq, rows))]
        return [out for out, _ in results], [lse for _, lse in results]

    def parts(self, tiles: list[range]) -> list[list[range]]:
        """Cut the tiles of keys into parts, the last of which may be shorter or empty."""
        size = -(-len(tiles) // self.splits)
        return [tiles[part * size : (part + 1) * size] for part in range(self.splits)]

    def merge(self, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
        """Weight each part by exp(lse), relative to the largest."""
        import torch

        lse = torch.stack(lses)
        top = lse.amax(0)
        weights = (lse - self.shift(top)).exp()
        return Softmax(top, weights.sum(0), (weights[..., None] * torch.stack(outs)).sum(0))
