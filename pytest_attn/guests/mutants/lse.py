"""The softmax's bookkeeping: lse in another base or incomplete, sums not rescaled, partial results merged wrongly."""

import dataclasses
import math

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS, TAIL_MISSING
from pytest_attn.guests.mutants.kernel import Kernel, Sequence, Softmax, SplitKernel, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import (
    all_of,
    any_of,
    has_fully_masked_rows,
    has_row_fully_masked_in_last_tile,
    has_several_key_tiles,
    is_half,
)

LSE = Defects("lse")


@LSE("sglang#35045", "sglang#40903", "FI#2113", "FI#4485", faults=("lse-base-2",))
class _LseInBase2(Kernel):
    """lse is handed out as a logarithm of base 2; the backward pass knows."""

    def lse(self, state: Softmax) -> Tensor:
        return super().lse(state) / math.log(2)

    def recomputed(self, s: Tensor, lse: Tensor) -> Tensor:
        return super().recomputed(s, lse * math.log(2))


@LSE("SageAttention@3ec1f13", "FA#404", faults=("lse-without-maximum",))
class _LseWithoutMaximum(Kernel):
    """lse is the logarithm of the sum relative to the row's maximum; the maximum is not added."""

    def lse(self, state: Softmax) -> Tensor:
        return state.total.log()


@LSE("PT#181645", faults=("lse-ln-2-too-large",))
class _LseOffByLn2(Kernel):
    """lse is ln 2 too large, and consistently so: only who merges by it notices."""

    def lse(self, state: Softmax) -> Tensor:
        return super().lse(state) + math.log(2)

    def recomputed(self, s: Tensor, lse: Tensor) -> Tensor:
        return super().recomputed(s, lse - math.log(2))


@LSE("FA@2f78d484", "cudnn-frontend#421", applies=lambda w: bool(w.sinks), faults=("sinks-ignored",))
class _LseWithoutSink(Kernel):
    """The sink takes its share of out, but is not in lse."""

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        state = self.softmax(seq, rows, self.key_tiles(seq, rows))
        out, _ = self.finish(self.with_sinks(seq, state))
        return out, self.lse(state)


@LSE("xf#850", faults=TAIL_MISSING)
class _LseWithoutLastTile(Kernel):
    """lse is taken before the last tile of keys was added."""

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        out, _ = super().attend(seq, rows)
        return out, self.lse(self.with_sinks(seq, self.softmax(seq, rows, self.key_tiles(seq, rows)[:-1])))


@LSE("SageAttention@b0a347c", applies=is_half, faults=("lse-rounded",))
class _LseInTheTensorsDtype(Kernel):
    """lse is rounded to 16 bits."""

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        out, lse = super().attend(seq, rows)
        return out, lse.to(seq.call.q.dtype).float()


@LSE("PT#136232", "FA#2706", applies=has_fully_masked_rows, faults=EMPTY_ROWS)
class _LseOfEmptyRowIsNan(Kernel):
    """A row that sees no key has lse NaN, not -inf."""

    def lse(self, state: Softmax) -> Tensor:
        return super().lse(state) + state.total / state.total * 0


@LSE("FA#2082", "FI#3838", applies=has_several_key_tiles, faults=("sum-not-rescaled",))
class _SumNotRescaled(Kernel):
    """Values summed so far are not rescaled to a new maximum."""

    def step(self, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
        after = super().step(tile, q, state)
        factor = self.rescale(state.top, after.top)
        return dataclasses.replace(after, acc=after.acc + state.acc * (1 - factor[..., None]))


@LSE("FA#2082", applies=has_several_key_tiles, faults=("denominator-not-rescaled",))
class _DenominatorNotRescaled(Kernel):
    """The denominator so far is not rescaled to a new maximum."""

    def step(self, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
        after = super().step(tile, q, state)
        factor = self.rescale(state.top, after.top)
        return dataclasses.replace(after, total=after.total + state.total * (1 - factor))


@LSE("FI#3838", applies=has_several_key_tiles)
class _RescaledByNeighborRow(Kernel):
    """Values summed so far are rescaled by the factor of the row before."""

    def step(self, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
        after = super().step(tile, q, state)
        factor = self.rescale(state.top, after.top)
        return dataclasses.replace(after, acc=after.acc + state.acc * (factor.roll(1, -1) - factor)[..., None])


@LSE("FA#991", "FA#333", applies=has_several_key_tiles, faults=("rescaled-inversely",))
class _RescaledInversely(Kernel):
    """Values summed so far are divided by the factor that they should be multiplied by."""

    def step(self, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
        after = super().step(tile, q, state)
        factor = self.rescale(state.top, after.top)
        inverse = (1 / factor).masked_fill(factor == 0, 0)
        return dataclasses.replace(after, acc=after.acc + state.acc * (inverse - factor)[..., None])


@LSE("FA#2082", "FA#2083", applies=has_row_fully_masked_in_last_tile)
class _MaximumOfTileAlone(Kernel):
    """The running maximum is that of the last tile: a row that sees nothing there ends with lse -inf."""

    def row_max(self, top: Tensor, s: Tensor) -> Tensor:
        return s.amax(-1)


@LSE("sglang#35045", "FI#2114", applies=has_several_key_tiles, faults=("splits-merged-in-base-2",))
class _MergeInBase2(SplitKernel):
    """Partial results with a natural lse are merged as if it were one of base 2."""

    def merge(self, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
        merged = super().merge(outs, [lse * math.log(2) for lse in lses])
        return dataclasses.replace(merged, top=merged.top / math.log(2))


@LSE("NATTEN#299", "rocm-libraries#12229", faults=("splits-averaged",))
class _MergeWithoutWeights(SplitKernel):
    """Partial results are averaged, whatever their denominators."""

    def merge(self, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
        merged = super().merge(outs, lses)
        mean = sum(outs[1:], outs[0]) / len(outs)
        return dataclasses.replace(merged, acc=mean * merged.total[..., None])


@LSE("FI#4382", applies=all_of(any_of(has_several_key_tiles, has_fully_masked_rows), lambda w: w.q_len > 1))
class _MergeWeightsOfFirstRow(SplitKernel):
    """All rows' partial results are merged by the lse of the first row, as suits decoding one token."""

    def merge(self, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
        merged = super().merge(outs, [lse[:, :1].expand_as(lse) for lse in lses])
        right = super().merge(outs, lses)
        return Softmax(right.top, right.total, merged.acc / merged.total[..., None] * right.total[..., None])


@LSE("FA@26d7d92f", "torchtitan#3235", applies=has_fully_masked_rows, faults=EMPTY_ROWS)
class _MergeOfEmptySplitsIsNan(SplitKernel):
    """Weights of a row for which no split has a key are exp(-inf - -inf)."""

    def merge(self, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
        merged = super().merge(outs, lses)
        return dataclasses.replace(merged, acc=merged.acc + (merged.top - merged.top)[..., None])
