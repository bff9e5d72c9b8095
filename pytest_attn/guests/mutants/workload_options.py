"""Options: ignored, hard-coded, applied twice or in the wrong order."""

import dataclasses
import math

from torch import Tensor

from pytest_attn.guests.mutants import reach
from pytest_attn.guests.mutants.kernel import Index, Kernel, KernelCall, Sequence, Softmax, SplitKernel, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.workloads.masks import Mask

OPTIONS = Defects("options")


@OPTIONS(
    Kernel.scale, "FI#1072", applies=lambda w: w.scale not in (None, 1 / math.sqrt(w.head_dim)), faults="scale-option-ignored"
)
def scale_ignored(kernel: Kernel, call: KernelCall) -> float:
    """A scale that is given is ignored: it is always 1 / sqrt(head_dim)."""
    return 1 / math.sqrt(call.workload.head_dim)


@OPTIONS(
    Kernel.scale,
    "FI#1072",
    applies=lambda w: w.softmax_scale != 1 / 8,
    faults=("scale-wrong", "scale-missing", "scale-applied-twice", "scale-option-ignored"),
)
def scale_hard_coded(kernel: Kernel, call: KernelCall) -> float:
    """The scale is that of heads of 64."""
    return 1 / 8


@OPTIONS(Kernel.scaled, "FI#1023, FI#1254", applies=lambda w: w.softmax_scale != 1, faults="scale-missing")
def scale_dropped(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """Scores are not scaled."""
    return s


@OPTIONS(Kernel.scaled, "aiter#5661, HKUSTDial/flash-sparse-attention#203")
def scale_applied_twice(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """Scores are scaled once with q and once more as scores."""
    return Kernel.scaled(kernel, tile, Kernel.scaled(kernel, tile, s))


@OPTIONS(Kernel.scaled, "FI#787", faults="log2e-not-meant")
def scale_with_log2e(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """The scale has log2(e) folded in for an exponential of base 2, but the exponential is the natural one."""
    return Kernel.scaled(kernel, tile, s) / math.log(2)


@OPTIONS(Kernel.mask, "transformers#30652", applies=reach.all_of(reach.has_right_edge, reach.is_causal), faults="mask-ignored")
def causal_ignored(kernel: Kernel, seq: Sequence) -> Mask | None:
    """A causal mask is dropped."""
    mask = Kernel.mask(kernel, seq)
    return None if mask is not None and mask.band is not None and mask.is_causal else mask


@OPTIONS(
    Kernel.first_key, "zml#763, sglang#34093", applies=reach.has_left_edge, faults=("window-left-ignored", "mask-ignored")
)
def window_ignored(kernel: Kernel, seq: Sequence, row: Index) -> Index:
    """The left end of a window is ignored: what is left is a causal mask."""
    return 0


@OPTIONS(Kernel.softcap, "sglang#33915, sglang#34093")
def softcap_ignored(kernel: Kernel, call: KernelCall) -> float | None:
    """Scores are not capped."""
    return None


@OPTIONS(Kernel.capped, "FA#2402")
def softcap_not_multiplied_back(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """tanh(s / cap) is not multiplied by the cap."""
    cap = kernel.softcap(tile.seq.call)
    return s if cap is None else Kernel.capped(kernel, tile, s) / cap


@OPTIONS(Kernel.masked, "FA#1025, emmtrix/emx-onnx-cgen#731", applies=reach.all_of(reach.has_softcap, reach.is_band))
def softcap_after_mask(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """Scores are capped after the mask, which turns hidden ones from -inf into -cap."""
    cap = kernel.softcap(tile.seq.call)
    hidden = -math.inf if cap is None else -cap
    return s.masked_fill(~kernel.visible(tile), hidden).masked_fill(~kernel.inside(tile), -math.inf)


@OPTIONS.kernel(
    "onnxruntime#28370", applies=reach.all_of(reach.has_softcap, reach.has_bias, lambda w: not w.bias_before_softcap)
)
class _SoftcapAfterBias(Kernel):
    """Scores are capped after the bias is added, not before."""

    def with_biases(self, tile: Tile, s: Tensor) -> Tensor:
        return s

    def capped(self, tile: Tile, s: Tensor) -> Tensor:
        return super().capped(tile, super().with_biases(tile, s))


@OPTIONS(Kernel.bias, "PT#107884")
def bias_ignored(kernel: Kernel, tile: Tile, bias: Tensor) -> Tensor:
    """No bias is added."""
    return Kernel.bias(kernel, tile, bias) * 0


@OPTIONS(Kernel.bias, "HKUSTDial/flash-sparse-attention#199")
def bias_scaled(kernel: Kernel, tile: Tile, bias: Tensor) -> Tensor:
    """The bias is added before the scale."""
    return Kernel.bias(kernel, tile, bias) * kernel.scale(tile.seq.call)


@OPTIONS(Kernel.alibi, "meta-pytorch/attention-gym#86", faults="alibi-sign-flipped")
def alibi_sign(kernel: Kernel, tile: Tile, slopes: Tensor) -> Tensor:
    """ALiBi rewards distance."""
    return -Kernel.alibi(kernel, tile, slopes)


@OPTIONS(Kernel.alibi_slopes, "paiml/aprender#2143")
def alibi_slope_of_next_power(kernel: Kernel, tile: Tile, slopes: Tensor) -> Tensor:
    """Slopes are 2 ** (-8 h / heads), not 2 ** (-8 (h + 1) / heads)."""
    return slopes * 2 ** (8 / tile.workload.heads)


@OPTIONS(Kernel.distance, "FA#907", applies=reach.has_other_lengths)
def alibi_from_first_key(kernel: Kernel, tile: Tile) -> Tensor:
    """ALiBi counts rows from the first key, where the last row stands at the last key."""
    return tile.row_index - tile.key_index


@OPTIONS(Kernel.alibi, "FA#1585, vllm#945", applies=lambda w: w.mask is None)
def alibi_one_sided(kernel: Kernel, tile: Tile, slopes: Tensor) -> Tensor:
    """ALiBi is that of causal attention, which rewards the keys of the future."""
    return -slopes[:, None, None] * kernel.distance(tile)


@OPTIONS(Kernel.sinks, "FA@e81c237e, fla#831", faults="sinks-ignored")
def sink_ignored(kernel: Kernel, seq: Sequence) -> Tensor | None:
    """Sinks take no share of the denominator."""
    return None


@OPTIONS(Kernel.sinks, "FA@2f78d484", faults="sinks-scaled")
def sink_scaled(kernel: Kernel, seq: Sequence) -> Tensor | None:
    """A sink is scaled like a score."""
    sinks = Kernel.sinks(kernel, seq)
    return None if sinks is None else sinks * kernel.scale(seq.call)


@OPTIONS.kernel("rocm-libraries#12229", applies=reach.has_sinks, faults="sink-in-every-split")
class _SinkCountedInEverySplit(SplitKernel):
    """Each split of the keys counts the sink."""

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        return self.finish(self.merge(*self.partials(seq, rows)))

    def softmax(self, seq: Sequence, rows: range, tiles: list[range]) -> Softmax:
        return self.with_sinks(seq, super().softmax(seq, rows, tiles))


@OPTIONS(
    Kernel.modified,
    "vllm#47332",
    applies=reach.all_of(reach.has_several_row_tiles, reach.has_score_mod),
    faults="score-mod-rows-within-tile",
)
def score_mod_with_tile_rows(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """score_mod is given a row's place in its tile, not its place in the sequence."""
    local = dataclasses.replace(tile, rows=range(len(tile.rows)))
    return Kernel.modified(kernel, tile if tile.workload.score_mod is None else local, s)
