"""Gradients: faults that only the backward pass has."""

import dataclasses
import math

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS, LENGTHS_MISREAD, OTHER_ALIGNMENT, TAIL_MISSING, recomputed
from pytest_attn.guests.mutants import reach
from pytest_attn.guests.mutants.kernel import QKV, Kernel, KernelCall, Sequence, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.wrong_keys import BottomRightTakenForTopLeft

GRADIENTS = Defects("gradients", backward=True)


def _either(faults: tuple[str, ...]) -> tuple[str, ...]:
    return *recomputed(faults), *faults


@GRADIENTS(Kernel.dscores, "FA#2756", faults="d-missing")
def delta_missing(kernel: Kernel, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
    """dS is P dP: the softmax's own sum is forgotten."""
    return p * dp


@GRADIENTS(Kernel.delta, "FA@b3f1b6a5", applies=lambda w: w.heads > 1, faults="d-of-next-head")
def delta_of_next_head(kernel: Kernel, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """A head takes the delta of its neighbor."""
    return Kernel.delta(kernel, call, out, dout, dlse).roll(-1, -2)


@GRADIENTS(Kernel.saved_lse, "TE#3216", applies=reach.all_of(reach.is_dense, lambda w: w.batch > 1))
def lse_of_first_batch_entry(kernel: Kernel, call: KernelCall, lse: Tensor) -> Tensor:
    """The backward pass takes the lse of the batch's first entry for all."""
    return lse if call.workload.is_packed else lse[:1].expand_as(lse)


@GRADIENTS(Kernel.saved_lse, "PT#188302", faults="lse-missing-in-backward")
def null_lse(kernel: Kernel, call: KernelCall, lse: Tensor) -> Tensor:
    """P is computed again as exp(s), as no lse was saved."""
    return lse.new_zeros(lse.shape)


@GRADIENTS(Kernel.saved_lse, "cudnn-frontend#421", applies=reach.has_sinks, faults="sink-missing-in-lse")
def lse_without_sink_again(kernel: Kernel, call: KernelCall, lse: Tensor) -> Tensor:
    """P is computed again without the sink's share of the denominator."""
    sinks = call.inputs.sinks
    if sinks is None:
        return lse
    share = (sinks.float()[:, None] - lse).exp()  # of the sink
    return lse + (1 - share).clamp_(min=0).log()


@GRADIENTS(Kernel.dk, "FA#2651", applies=lambda w: w.softmax_scale != 1, faults="gradient-scale-missing")
def scale_missing_in_dk(kernel: Kernel, tile: Tile, ds: Tensor, q: Tensor) -> Tensor:
    """dk is not scaled."""
    return ds.transpose(-1, -2) @ q


@GRADIENTS(
    Kernel.dq,
    "HKUSTDial/flash-sparse-attention#203",
    applies=lambda w: w.softmax_scale != 1,
    faults="gradient-scale-applied-twice",
)
def dq_scaled_twice(kernel: Kernel, tile: Tile, ds: Tensor, k: Tensor) -> Tensor:
    """dq is scaled with dS and once more at the end."""
    return Kernel.dq(kernel, tile, ds, k) * kernel.scale(tile.seq.call)


@GRADIENTS(Kernel.summed_over_group, "NATTEN#328")
def group_overwritten(kernel: Kernel, tile: Tile, x: Tensor) -> Tensor:
    """Of a group's shares of dk and dv only the last query head's is left."""
    return x[tile.workload.group - 1 :: tile.workload.group]


@GRADIENTS(Kernel.summed_over_group, "fla#384, NATTEN#328", applies=reach.is_grouped_twice)
def group_summed_interleaved(kernel: Kernel, tile: Tile, x: Tensor) -> Tensor:
    """dk and dv of query head h are added to key head h % kv_heads."""
    w = tile.workload
    return x.view(w.group, w.kv_heads, *x.shape[1:]).sum(0)


@GRADIENTS(Kernel.add_to_keys, "NATTEN#328, xf#381", applies=reach.has_several_row_tiles, faults="row-tiles-overwrite")
def row_tiles_overwrite_dk(kernel: Kernel, tile: Tile, total: Tensor, share: Tensor) -> None:
    """dk and dv are those of the last tile of rows: shares are stored, not added."""
    there = kernel.keys_of(tile.seq, total, tile.keys)
    there.copy_(share[:, : there.shape[1]])


@GRADIENTS(
    Kernel.masked_again,
    "FA@a4f148b6, fla#988",
    applies=reach.cuts_keys,
    faults=recomputed(("mask-ignored", "mask-ignored-within-tiles", "window-left-ignored", "window-right-ignored")),
)
def mask_missing_in_backward(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """The backward pass masks no more than the end of the sequence."""
    return s.masked_fill(~kernel.inside(tile), -math.inf)


@GRADIENTS(
    Kernel.masked_again,
    "triton#4541, triton#5660, triton#7216",
    applies=lambda w: w.mask is None and w.kv_len > 1,
    faults=("recomputed-causal-not-asked-for", "causal-not-asked-for"),
)
def always_causal_in_backward(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """The backward pass is causal, also where the forward pass was not."""
    seen = tile.key_index <= tile.row_index if tile.workload.mask is None else tile.key_index >= 0
    return kernel.masked(tile, s).masked_fill(~seen, -math.inf)


@GRADIENTS.kernel("ffpa#300, FA@c65b5106", applies=reach.is_bottom_right, faults=_either(OTHER_ALIGNMENT))
class _AlignedTopLeftInBackward(Kernel):
    """The backward pass aligns a causal mask to the first key, where the forward pass took the last."""

    def masked_again(self, tile: Tile, s: Tensor) -> Tensor:
        return BottomRightTakenForTopLeft(self.row_tile, self.key_tile).masked(tile, s)

    def key_tiles_again(self, seq: Sequence, rows: range) -> list[range]:
        return BottomRightTakenForTopLeft(self.row_tile, self.key_tile).key_tiles(seq, rows)


@GRADIENTS(Kernel.key_tiles_again, "FA@a4f148b6", applies=reach.has_key_tail, faults=_either(TAIL_MISSING))
def last_key_tile_missing_in_backward(kernel: Kernel, seq: Sequence, rows: range) -> list[range]:
    """The backward pass leaves out the keys after the last full tile."""
    return [keys for keys in kernel.key_tiles(seq, rows) if keys.stop <= seq.kv_len]


@GRADIENTS(
    Kernel.masked_again, "PT#196678, FA@a4f148b6", applies=reach.shows_tail, condition="magnitude", faults="exp-overflow"
)
def tail_not_masked_again(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """The zeros that fill up the last tile of keys are not masked: they add nothing, unless exp(0 - lse) is infinite."""
    return s.masked_fill(~kernel.unmasked(tile), -math.inf)


@GRADIENTS(Kernel.backward, "FA#2315, FA#2167", applies=reach.is_padded, faults=_either(LENGTHS_MISREAD))
def kv_length_ignored_in_backward(
    kernel: Kernel, call: KernelCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> QKV:
    """The backward pass sees padded keys."""
    unpadded = dataclasses.replace(call.inputs, kv_lens=None)
    return Kernel.backward(kernel, dataclasses.replace(call, inputs=unpadded), out, lse, dout, dlse)


@GRADIENTS(
    Kernel.modified_again,
    "PT#188302, FA#540",
    applies=lambda w: bool(w.bias or w.alibi),
    faults=recomputed(("bias-ignored", "alibi-ignored")),
)
def bias_missing_in_backward(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """P is computed again without bias and ALiBi."""
    return kernel.capped(tile, s) if tile.workload.score_mod is None else kernel.modified(tile, s)


@GRADIENTS(Kernel.softcap_slope, "FA#2402")
def softcap_slope_missing(kernel: Kernel, scaled: Tensor, cap: float) -> Tensor:
    """The derivative of the softcap is taken for 1."""
    return scaled * 0 + 1


@GRADIENTS(Kernel.softcap_slope, "FA#2402")
def softcap_slope_of_capped_score(kernel: Kernel, scaled: Tensor, cap: float) -> Tensor:
    """The derivative of the softcap is taken at the capped score, not at the score."""
    return Kernel.softcap_slope(kernel, cap * (scaled / cap).tanh(), cap)


@GRADIENTS(Kernel.score_mod_slope, "FA#2402, PT#146377")
def score_mod_slope_missing(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """The derivative of score_mod is taken for 1."""
    return s * 0 + 1


@GRADIENTS(Kernel.recomputed, "PT#125674, FA#2421", applies=reach.has_fully_masked_row_in_visited_tile, faults=EMPTY_ROWS)
def empty_row_is_nan_in_backward(kernel: Kernel, s: Tensor, lse: Tensor) -> Tensor:
    """P of a row that sees no key is computed again as exp(-inf - -inf)."""
    return (s - lse[..., None]).exp()


@GRADIENTS(Kernel.dv, "FA#2552", applies=lambda w: w.v_head_dim != w.head_dim)
def dv_columns_misplaced(kernel: Kernel, tile: Tile, p: Tensor, dout: Tensor) -> Tensor:
    """The last 16 columns of dv are stored in the wrong order where v's head dimension is not k's."""
    share = Kernel.dv(kernel, tile, p, dout)
    if share.shape[-1] == tile.workload.head_dim:
        return share
    share[..., -16:] = share[..., -16:].flip(-1)
    return share


@GRADIENTS(Kernel.delta, "FA#404, FA#889, FA#1137", condition="lse-gradient")
def gradient_of_lse_ignored(kernel: Kernel, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """The gradient that flows back through lse is dropped."""
    return Kernel.delta(kernel, call, out, dout, None)


@GRADIENTS(Kernel.delta, "FA#1137, NATTEN#299", condition="lse-gradient")
def gradient_of_lse_with_wrong_sign(
    kernel: Kernel, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """The gradient that flows back through lse is added to delta, not taken off."""
    return Kernel.delta(kernel, call, out, dout, None if dlse is None else -dlse)
