"""Gradients: faults that only the backward pass has."""

import dataclasses
import math

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS, LENGTHS_MISREAD, OTHER_ALIGNMENT, TAIL_MISSING, recomputed
from pytest_attn.guests.mutants.kernel import QKV, Kernel, KernelCall, Sequence, Tile
from pytest_attn.guests.mutants.masks import BottomRightTakenForTopLeft
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import (
    all_of,
    cuts_keys,
    has_fully_masked_row_in_visited_tile,
    has_key_tail,
    has_several_heads,
    has_several_row_tiles,
    is_bottom_right,
    is_dense,
    is_grouped,
    is_grouped_twice,
    is_padded,
    shows_tail,
)

GRADIENTS = Defects("gradients", backward=True)


@GRADIENTS("FA#2756", faults=("d-missing",))
class _DeltaMissing(Kernel):
    """dS is P dP: the softmax's own sum is forgotten."""

    def dscores(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return p * dp


@GRADIENTS("FA@b3f1b6a5", applies=has_several_heads, faults=("d-of-next-head",))
class _DeltaOfNextHead(Kernel):
    """A head takes the delta of its neighbor."""

    def delta(self, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        return super().delta(call, out, dout, dlse).roll(-1, -2)


@GRADIENTS("TE#3216", applies=all_of(is_dense, lambda w: w.batch > 1), faults=("lse-of-first-batch-entry",))
class _LseOfFirstBatchEntry(Kernel):
    """The backward pass takes the lse of the batch's first entry for all."""

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        return lse if call.workload.is_packed else lse[:1].expand_as(lse)


@GRADIENTS("PT#188302", faults=("lse-missing-in-backward",))
class _NullLse(Kernel):
    """P is computed again as exp(s), as no lse was saved."""

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        return lse.new_zeros(lse.shape)


@GRADIENTS("cudnn-frontend#421", applies=lambda w: bool(w.sinks), faults=("sink-missing-in-lse",))
class _LseWithoutSinkAgain(Kernel):
    """P is computed again without the sink's share of the denominator."""

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        sinks = call.inputs.sinks
        if sinks is None:
            return lse
        share = (sinks.float()[:, None] - lse).exp()  # of the sink
        return lse + (1 - share).clamp_(min=0).log()


@GRADIENTS("FA#2651", applies=lambda w: w.softmax_scale != 1, faults=("gradient-scale-missing",))
class _ScaleMissingInDk(Kernel):
    """dk is not scaled."""

    def dk(self, tile: Tile, ds: Tensor, q: Tensor) -> Tensor:
        return ds.transpose(-1, -2) @ q


@GRADIENTS(
    "HKUSTDial/flash-sparse-attention#203",
    applies=lambda w: w.softmax_scale != 1,
    faults=("gradient-scale-applied-twice",),
)
class _DqScaledTwice(Kernel):
    """dq is scaled with dS and once more at the end."""

    def dq(self, tile: Tile, ds: Tensor, k: Tensor) -> Tensor:
        return super().dq(tile, ds, k) * self.scale(tile.seq.call)


@GRADIENTS("NATTEN#328", applies=is_grouped, faults=("group-overwritten",))
class _GroupOverwritten(Kernel):
    """Of a group's shares of dk and dv only the last query head's is left."""

    def summed_over_group(self, tile: Tile, x: Tensor) -> Tensor:
        return x[tile.workload.group - 1 :: tile.workload.group]


@GRADIENTS("fla#384", "NATTEN#328", applies=is_grouped_twice, faults=("group-summed-interleaved",))
class _GroupSummedInterleaved(Kernel):
    """dk and dv of query head h are added to key head h % kv_heads."""

    def summed_over_group(self, tile: Tile, x: Tensor) -> Tensor:
        w = tile.workload
        return x.view(w.group, w.kv_heads, *x.shape[1:]).sum(0)


@GRADIENTS("NATTEN#328", "xf#381", applies=has_several_row_tiles, faults=("row-tiles-overwrite",))
class _RowTilesOverwriteDk(Kernel):
    """dk and dv are those of the last tile of rows: shares are stored, not added."""

    def add_to_keys(self, tile: Tile, total: Tensor, share: Tensor) -> None:
        there = self.keys_of(tile.seq, total, tile.keys)
        there.copy_(share[:, : there.shape[1]])


@GRADIENTS(
    "FA@a4f148b6",
    "fla#988",
    applies=cuts_keys,
    faults=recomputed(("mask-ignored", "mask-ignored-within-tiles", "window-left-ignored", "window-right-ignored")),
)
class _MaskMissingInBackward(Kernel):
    """The backward pass masks no more than the end of the sequence."""

    def masked_again(self, tile: Tile, s: Tensor) -> Tensor:
        return s.masked_fill(~self.inside(tile), -math.inf)


@GRADIENTS(
    "triton#4541",
    "triton#5660",
    "triton#7216",
    applies=lambda w: w.mask is None and w.kv_len > 1,
    faults=("recomputed-causal-not-asked-for", "causal-not-asked-for"),
)
class _AlwaysCausalInBackward(Kernel):
    """The backward pass is causal, also where the forward pass was not."""

    def masked_again(self, tile: Tile, s: Tensor) -> Tensor:
        seen = tile.key_index <= tile.row_index if tile.workload.mask is None else tile.key_index >= 0
        return self.masked(tile, s).masked_fill(~seen, -math.inf)


@GRADIENTS("ffpa#300", "FA@c65b5106", applies=is_bottom_right, faults=(*recomputed(OTHER_ALIGNMENT), *OTHER_ALIGNMENT))
class _AlignedTopLeftInBackward(Kernel):
    """The backward pass aligns a causal mask to the first key, where the forward pass took the last."""

    def masked_again(self, tile: Tile, s: Tensor) -> Tensor:
        return BottomRightTakenForTopLeft(self.row_tile, self.key_tile).masked(tile, s)

    def key_tiles_again(self, seq: Sequence, rows: range) -> list[range]:
        return BottomRightTakenForTopLeft(self.row_tile, self.key_tile).key_tiles(seq, rows)


@GRADIENTS("FA@a4f148b6", applies=has_key_tail, faults=(*recomputed(TAIL_MISSING), *TAIL_MISSING))
class _LastKeyTileMissingInBackward(Kernel):
    """The backward pass leaves out the keys after the last full tile."""

    def key_tiles_again(self, seq: Sequence, rows: range) -> list[range]:
        return [keys for keys in self.key_tiles(seq, rows) if keys.stop <= seq.kv_len]


@GRADIENTS("PT#196678", "FA@a4f148b6", applies=shows_tail, condition="magnitude", faults=("exp-overflow",))
class _TailNotMaskedAgain(Kernel):
    """The zeros that fill up the last tile of keys are not masked: they add nothing, unless exp(0 - lse) is infinite."""

    def masked_again(self, tile: Tile, s: Tensor) -> Tensor:
        return s.masked_fill(~self.unmasked(tile), -math.inf)


@GRADIENTS("FA#2315", "FA#2167", applies=is_padded, faults=(*recomputed(LENGTHS_MISREAD), *LENGTHS_MISREAD))
class _KvLengthIgnoredInBackward(Kernel):
    """The backward pass sees padded keys."""

    def backward(self, call: KernelCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> QKV:
        unpadded = dataclasses.replace(call.inputs, kv_lens=None)
        return super().backward(dataclasses.replace(call, inputs=unpadded), out, lse, dout, dlse)


@GRADIENTS(
    "PT#188302",
    "FA#540",
    applies=lambda w: bool(w.bias or w.alibi),
    faults=recomputed(("bias-ignored", "alibi-ignored")),
)
class _BiasMissingInBackward(Kernel):
    """P is computed again without bias and ALiBi."""

    def modified_again(self, tile: Tile, s: Tensor) -> Tensor:
        return self.capped(tile, s) if tile.workload.score_mod is None else self.modified(tile, s)


@GRADIENTS("FA#2402", applies=lambda w: w.softcap is not None, faults=("softcap-slope-missing",))
class _SoftcapSlopeMissing(Kernel):
    """The derivative of the softcap is taken for 1."""

    def softcap_slope(self, scaled: Tensor, cap: float) -> Tensor:
        return scaled * 0 + 1


@GRADIENTS("FA#2402", applies=lambda w: w.softcap is not None, faults=("softcap-slope-of-capped-score",))
class _SoftcapSlopeOfCappedScore(Kernel):
    """The derivative of the softcap is taken at the capped score, not at the score."""

    def softcap_slope(self, scaled: Tensor, cap: float) -> Tensor:
        return super().softcap_slope(cap * (scaled / cap).tanh(), cap)


@GRADIENTS("FA#2402", "PT#146377", applies=lambda w: w.score_mod is not None, faults=("score-mod-slope-missing",))
class _ScoreModSlopeMissing(Kernel):
    """The derivative of score_mod is taken for 1."""

    def score_mod_slope(self, tile: Tile, s: Tensor) -> Tensor:
        return s * 0 + 1


@GRADIENTS("PT#125674", "FA#2421", applies=has_fully_masked_row_in_visited_tile, faults=EMPTY_ROWS)
class _EmptyRowIsNanInBackward(Kernel):
    """P of a row that sees no key is computed again as exp(-inf - -inf)."""

    def recomputed(self, s: Tensor, lse: Tensor) -> Tensor:
        return (s - lse[..., None]).exp()


@GRADIENTS("FA#2552", applies=lambda w: w.v_head_dim != w.head_dim)
class _DvColumnsMisplaced(Kernel):
    """The last 16 columns of dv are stored in the wrong order where v's head dimension is not k's."""

    def dv(self, tile: Tile, p: Tensor, dout: Tensor) -> Tensor:
        share = super().dv(tile, p, dout)
        if share.shape[-1] == tile.workload.head_dim:
            return share
        share[..., -16:] = share[..., -16:].flip(-1)
        return share


@GRADIENTS("FA#404", "FA#889", "FA#1137", condition="lse-gradient")
class _GradientOfLseIgnored(Kernel):
    """The gradient that flows back through lse is dropped."""

    def delta(self, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        return super().delta(call, out, dout, None)


@GRADIENTS("FA#1137", "NATTEN#299", condition="lse-gradient")
class _GradientOfLseWithWrongSign(Kernel):
    """The gradient that flows back through lse is added to delta, not taken off."""

    def delta(self, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        return super().delta(call, out, dout, None if dlse is None else -dlse)
