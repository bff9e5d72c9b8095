"""The softmax's bookkeeping: lse in another base or incomplete, sums not rescaled, partial results merged wrongly."""

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
    has_sinks,
    is_half,
)

LSE = Defects("lse")


@LSE.kernel("sglang#35045, sglang#40903, FI#2113, FI#4485", faults="lse-base-2")
class _LseInBase2(Kernel):
    """lse is handed out as a logarithm of base 2; the backward pass knows."""

    def lse(self, state: Softmax) -> Tensor:
        return super().lse(state) / math.log(2)

    def recomputed(self, s: Tensor, lse: Tensor) -> Tensor:
        return super().recomputed(s, lse * math.log(2))


@LSE(Kernel.lse, "SageAttention@3ec1f13, FA#404")
def lse_without_maximum(kernel: Kernel, state: Softmax) -> Tensor:
    """lse is the logarithm of the sum relative to the row's maximum; the maximum is not added."""
    return state.total.log()


@LSE.kernel("PT#181645", faults="lse-ln-2-too-large")
class _LseOffByLn2(Kernel):
    """lse is ln 2 too large, and consistently so: only who merges by it notices."""

    def lse(self, state: Softmax) -> Tensor:
        return super().lse(state) + math.log(2)

    def recomputed(self, s: Tensor, lse: Tensor) -> Tensor:
        return super().recomputed(s, lse - math.log(2))


@LSE(Kernel.attend, "FA@2f78d484, cudnn-frontend#421", applies=has_sinks, faults="sinks-ignored")
def lse_without_sink(kernel: Kernel, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
    """The sink takes its share of out, but is not in lse."""
    state = kernel.softmax(seq, rows, kernel.key_tiles(seq, rows))
    out, _ = kernel.finish(kernel.with_sinks(seq, state))
    return out, kernel.lse(state)


@LSE(Kernel.attend, "xf#850", faults=TAIL_MISSING)
def lse_without_last_tile(kernel: Kernel, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
    """lse is taken before the last tile of keys was added."""
    out, _ = Kernel.attend(kernel, seq, rows)
    return out, kernel.lse(kernel.with_sinks(seq, kernel.softmax(seq, rows, kernel.key_tiles(seq, rows)[:-1])))


@LSE(Kernel.attend, "SageAttention@b0a347c", applies=is_half, faults="lse-rounded")
def lse_in_the_tensors_dtype(kernel: Kernel, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
    """lse is rounded to 16 bits."""
    out, lse = Kernel.attend(kernel, seq, rows)
    return out, lse.to(seq.call.q.dtype).float()


@LSE(Kernel.lse, "PT#136232, FA#2706", applies=has_fully_masked_rows, faults=EMPTY_ROWS)
def lse_of_empty_row_is_nan(kernel: Kernel, state: Softmax) -> Tensor:
    """A row that sees no key has lse NaN, not -inf."""
    return Kernel.lse(kernel, state) + state.total / state.total * 0


@LSE(Kernel.step, "FA#2082, FI#3838", applies=has_several_key_tiles)
def sum_not_rescaled(kernel: Kernel, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
    """Values summed so far are not rescaled to a new maximum."""
    after = Kernel.step(kernel, tile, q, state)
    factor = kernel.rescale(state.top, after.top)
    return after._replace(acc=after.acc + state.acc * (1 - factor[..., None]))


@LSE(Kernel.step, "FA#2082", applies=has_several_key_tiles)
def denominator_not_rescaled(kernel: Kernel, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
    """The denominator so far is not rescaled to a new maximum."""
    after = Kernel.step(kernel, tile, q, state)
    factor = kernel.rescale(state.top, after.top)
    return after._replace(total=after.total + state.total * (1 - factor))


@LSE(Kernel.step, "FI#3838", applies=has_several_key_tiles)
def rescaled_by_neighbor_row(kernel: Kernel, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
    """Values summed so far are rescaled by the factor of the row before."""
    after = Kernel.step(kernel, tile, q, state)
    factor = kernel.rescale(state.top, after.top)
    return after._replace(acc=after.acc + state.acc * (factor.roll(1, -1) - factor)[..., None])


@LSE(Kernel.step, "FA#991, FA#333", applies=has_several_key_tiles)
def rescaled_inversely(kernel: Kernel, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
    """Values summed so far are divided by the factor that they should be multiplied by."""
    after = Kernel.step(kernel, tile, q, state)
    factor = kernel.rescale(state.top, after.top)
    inverse = (1 / factor).masked_fill(factor == 0, 0)
    return after._replace(acc=after.acc + state.acc * (inverse - factor)[..., None])


@LSE(Kernel.row_max, "FA#2082, FA#2083", applies=has_row_fully_masked_in_last_tile)
def maximum_of_tile_alone(kernel: Kernel, top: Tensor, s: Tensor) -> Tensor:
    """The running maximum is that of the last tile: a row that sees nothing there ends with lse -inf."""
    return s.amax(-1)


@LSE(SplitKernel.merge, "sglang#35045, FI#2114", applies=has_several_key_tiles, faults="splits-merged-in-base-2")
def merge_in_base_2(kernel: SplitKernel, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
    """Partial results with a natural lse are merged as if it were one of base 2."""
    merged = SplitKernel.merge(kernel, outs, [lse * math.log(2) for lse in lses])
    return merged._replace(top=merged.top / math.log(2))


@LSE(SplitKernel.merge, "NATTEN#299, rocm-libraries#12229", faults="splits-averaged")
def merge_without_weights(kernel: SplitKernel, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
    """Partial results are averaged, whatever their denominators."""
    merged = SplitKernel.merge(kernel, outs, lses)
    mean = sum(outs[1:], outs[0]) / len(outs)
    return merged._replace(acc=mean * merged.total[..., None])


@LSE(
    SplitKernel.merge,
    "FI#4382",
    applies=all_of(any_of(has_several_key_tiles, has_fully_masked_rows), lambda w: w.q_len > 1),
)
def merge_weights_of_first_row(kernel: SplitKernel, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
    """All rows' partial results are merged by the lse of the first row, as suits decoding one token."""
    merged = SplitKernel.merge(kernel, outs, [lse[:, :1].expand_as(lse) for lse in lses])
    right = SplitKernel.merge(kernel, outs, lses)
    return Softmax(right.top, right.total, merged.acc / merged.total[..., None] * right.total[..., None])


@LSE(SplitKernel.merge, "FA@26d7d92f, torchtitan#3235", applies=has_fully_masked_rows, faults=EMPTY_ROWS)
def merge_of_empty_splits_is_nan(kernel: SplitKernel, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
    """Weights of a row for which no split has a key are exp(-inf - -inf)."""
    merged = SplitKernel.merge(kernel, outs, lses)
    return merged._replace(acc=merged.acc + (merged.top - merged.top)[..., None])
