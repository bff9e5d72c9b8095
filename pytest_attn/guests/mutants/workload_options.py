"""Options: ignored, hard-coded, applied twice or in the wrong order."""

import dataclasses
import math

from torch import Tensor

from pytest_attn.guests.mutants.kernel import Index, Kernel, KernelCall, Sequence, Softmax, SplitKernel, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import (
    all_of,
    has,
    has_left_edge,
    has_other_lengths,
    has_right_edge,
    has_several_row_tiles,
    is_band,
    is_causal,
)
from pytest_attn.workloads.masks import Mask

OPTIONS = Defects("options")


_has_softcap, _has_bias, _has_alibi, _has_sinks = map(has, ("softcap", "bias", "alibi", "sinks"))


@OPTIONS("FI#1072", applies=lambda w: w.scale not in (None, 1 / math.sqrt(w.head_dim)), faults=("scale-option-ignored",))
class _ScaleIgnored(Kernel):
    """A scale that is given is ignored: it is always 1 / sqrt(head_dim)."""

    def scale(self, call: KernelCall) -> float:
        return 1 / math.sqrt(call.workload.head_dim)


@OPTIONS(
    "FI#1072",
    applies=lambda w: w.softmax_scale != 1 / 8,
    faults=("scale-wrong", "scale-missing", "scale-applied-twice", "scale-option-ignored"),
)
class _ScaleHardCoded(Kernel):
    """The scale is that of heads of 64."""

    def scale(self, call: KernelCall) -> float:
        return 1 / 8


@OPTIONS("FI#1023", "FI#1254", applies=lambda w: w.softmax_scale != 1, faults=("scale-missing",))
class _ScaleDropped(Kernel):
    """Scores are not scaled."""

    def scaled(self, tile: Tile, s: Tensor) -> Tensor:
        return s


@OPTIONS("aiter#5661", "HKUSTDial/flash-sparse-attention#203", faults=("scale-applied-twice",))
class _ScaleAppliedTwice(Kernel):
    """Scores are scaled once with q and once more as scores."""

    def scaled(self, tile: Tile, s: Tensor) -> Tensor:
        return super().scaled(tile, super().scaled(tile, s))


@OPTIONS("FI#787", faults=("log2e-not-meant",))
class _ScaleWithLog2e(Kernel):
    """The scale has log2(e) folded in for an exponential of base 2, but the exponential is the natural one."""

    def scaled(self, tile: Tile, s: Tensor) -> Tensor:
        return super().scaled(tile, s) / math.log(2)


@OPTIONS("transformers#30652", applies=all_of(has_right_edge, is_causal), faults=("mask-ignored",))
class _CausalIgnored(Kernel):
    """A causal mask is dropped."""

    def mask(self, seq: Sequence) -> Mask | None:
        mask = super().mask(seq)
        return None if mask is not None and mask.band is not None and mask.is_causal else mask


@OPTIONS("zml#763", "sglang#34093", applies=has_left_edge, faults=("window-left-ignored", "mask-ignored"))
class _WindowIgnored(Kernel):
    """The left end of a window is ignored: what is left is a causal mask."""

    def first_key(self, seq: Sequence, row: Index) -> Index:
        return 0


@OPTIONS("sglang#33915", "sglang#34093", applies=_has_softcap, faults=("softcap-ignored",))
class _SoftcapIgnored(Kernel):
    """Scores are not capped."""

    def softcap(self, call: KernelCall) -> float | None:
        return None


@OPTIONS("FA#2402", applies=_has_softcap, faults=("softcap-not-multiplied-back",))
class _SoftcapNotMultipliedBack(Kernel):
    """tanh(s / cap) is not multiplied by the cap."""

    def capped(self, tile: Tile, s: Tensor) -> Tensor:
        cap = self.softcap(tile.seq.call)
        return s if cap is None else super().capped(tile, s) / cap


@OPTIONS("FA#1025", "emmtrix/emx-onnx-cgen#731", applies=all_of(_has_softcap, is_band), faults=("softcap-after-mask",))
class _SoftcapAfterMask(Kernel):
    """Scores are capped after the mask, which turns hidden ones from -inf into -cap."""

    def masked(self, tile: Tile, s: Tensor) -> Tensor:
        cap = self.softcap(tile.seq.call)
        hidden = -math.inf if cap is None else -cap
        return s.masked_fill(~self.visible(tile), hidden).masked_fill(~self.inside(tile), -math.inf)


@OPTIONS(
    "onnxruntime#28370",
    applies=all_of(_has_softcap, _has_bias, lambda w: not w.bias_before_softcap),
    faults=("softcap-after-bias",),
)
class _SoftcapAfterBias(Kernel):
    """Scores are capped after the bias is added, not before."""

    def with_biases(self, tile: Tile, s: Tensor) -> Tensor:
        return s

    def capped(self, tile: Tile, s: Tensor) -> Tensor:
        return super().capped(tile, super().with_biases(tile, s))


@OPTIONS("PT#107884", applies=_has_bias, faults=("bias-ignored",))
class _BiasIgnored(Kernel):
    """No bias is added."""

    def bias(self, tile: Tile, bias: Tensor) -> Tensor:
        return super().bias(tile, bias) * 0


@OPTIONS("HKUSTDial/flash-sparse-attention#199", applies=_has_bias, faults=("bias-scaled",))
class _BiasScaled(Kernel):
    """The bias is added before the scale."""

    def bias(self, tile: Tile, bias: Tensor) -> Tensor:
        return super().bias(tile, bias) * self.scale(tile.seq.call)


@OPTIONS("meta-pytorch/attention-gym#86", applies=_has_alibi, faults=("alibi-sign-flipped",))
class _AlibiSign(Kernel):
    """ALiBi rewards distance."""

    def alibi(self, tile: Tile, slopes: Tensor) -> Tensor:
        return -super().alibi(tile, slopes)


@OPTIONS("paiml/aprender#2143", applies=_has_alibi, faults=("alibi-slope-of-next-power",))
class _AlibiSlopeOfNextPower(Kernel):
    """Slopes are 2 ** (-8 h / heads), not 2 ** (-8 (h + 1) / heads)."""

    def alibi_slopes(self, tile: Tile, slopes: Tensor) -> Tensor:
        return slopes * 2 ** (8 / tile.workload.heads)


@OPTIONS("FA#907", applies=all_of(_has_alibi, has_other_lengths), faults=("alibi-from-first-key",))
class _AlibiFromFirstKey(Kernel):
    """ALiBi counts rows from the first key, where the last row stands at the last key."""

    def distance(self, tile: Tile) -> Tensor:
        return tile.row_index - tile.key_index


@OPTIONS("FA#1585", "vllm#945", applies=all_of(_has_alibi, lambda w: w.mask is None), faults=("alibi-one-sided",))
class _AlibiOneSided(Kernel):
    """ALiBi is that of causal attention, which rewards the keys of the future."""

    def alibi(self, tile: Tile, slopes: Tensor) -> Tensor:
        return -slopes[:, None, None] * self.distance(tile)


@OPTIONS("FA@e81c237e", "fla#831", applies=_has_sinks, faults=("sinks-ignored",))
class _SinkIgnored(Kernel):
    """Sinks take no share of the denominator."""

    def sinks(self, seq: Sequence) -> Tensor | None:
        return None


@OPTIONS("FA@2f78d484", applies=_has_sinks, faults=("sinks-scaled",))
class _SinkScaled(Kernel):
    """A sink is scaled like a score."""

    def sinks(self, seq: Sequence) -> Tensor | None:
        sinks = super().sinks(seq)
        return None if sinks is None else sinks * self.scale(seq.call)


@OPTIONS("rocm-libraries#12229", applies=_has_sinks, faults=("sink-in-every-split",))
class _SinkCountedInEverySplit(SplitKernel):
    """Each split of the keys counts the sink."""

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        return self.finish(self.merge(*self.partials(seq, rows)))

    def softmax(self, seq: Sequence, rows: range, tiles: list[range]) -> Softmax:
        return self.with_sinks(seq, super().softmax(seq, rows, tiles))


@OPTIONS(
    "vllm#47332",
    applies=all_of(has_several_row_tiles, lambda w: w.score_mod is not None),
    faults=("score-mod-rows-within-tile",),
)
class _ScoreModWithTileRows(Kernel):
    """score_mod is given a row's place in its tile, not its place in the sequence."""

    def modified(self, tile: Tile, s: Tensor) -> Tensor:
        local = dataclasses.replace(tile, rows=range(len(tile.rows)))
        return super().modified(tile if tile.workload.score_mod is None else local, s)
