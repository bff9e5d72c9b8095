"""Options, softmax and rounding: scores, probabilities and sums that are not what they should be."""

import dataclasses
import math

import torch
from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS, TAIL_MISSING
from pytest_attn.guests.mutants import reach
from pytest_attn.guests.mutants.kernel import Index, Kernel, KernelCall, Sequence, Softmax, SplitKernel, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.workloads.masks import Mask

#: ignored, hard-coded, applied twice or in the wrong order
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


#: lse in another base or incomplete, sums not rescaled, partial results merged wrongly
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


@LSE(Kernel.attend, "FA@2f78d484, cudnn-frontend#421", applies=reach.has_sinks, faults="sinks-ignored")
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


@LSE(Kernel.attend, "SageAttention@b0a347c", applies=reach.is_half, faults="lse-rounded")
def lse_in_the_tensors_dtype(kernel: Kernel, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
    """lse is rounded to 16 bits."""
    out, lse = Kernel.attend(kernel, seq, rows)
    return out, lse.to(seq.call.q.dtype).float()


@LSE(Kernel.lse, "PT#136232, FA#2706", applies=reach.has_fully_masked_rows, faults=EMPTY_ROWS)
def lse_of_empty_row_is_nan(kernel: Kernel, state: Softmax) -> Tensor:
    """A row that sees no key has lse NaN, not -inf."""
    return Kernel.lse(kernel, state) + state.total / state.total * 0


@LSE(Kernel.step, "FA#2082, FI#3838", applies=reach.has_several_key_tiles)
def sum_not_rescaled(kernel: Kernel, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
    """Values summed so far are not rescaled to a new maximum."""
    after = Kernel.step(kernel, tile, q, state)
    factor = kernel.rescale(state.top, after.top)
    return after._replace(acc=after.acc + state.acc * (1 - factor[..., None]))


@LSE(Kernel.step, "FA#2082", applies=reach.has_several_key_tiles)
def denominator_not_rescaled(kernel: Kernel, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
    """The denominator so far is not rescaled to a new maximum."""
    after = Kernel.step(kernel, tile, q, state)
    factor = kernel.rescale(state.top, after.top)
    return after._replace(total=after.total + state.total * (1 - factor))


@LSE(Kernel.step, "FI#3838", applies=reach.has_several_key_tiles)
def rescaled_by_neighbor_row(kernel: Kernel, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
    """Values summed so far are rescaled by the factor of the row before."""
    after = Kernel.step(kernel, tile, q, state)
    factor = kernel.rescale(state.top, after.top)
    return after._replace(acc=after.acc + state.acc * (factor.roll(1, -1) - factor)[..., None])


@LSE(Kernel.step, "FA#991, FA#333", applies=reach.has_several_key_tiles)
def rescaled_inversely(kernel: Kernel, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
    """Values summed so far are divided by the factor that they should be multiplied by."""
    after = Kernel.step(kernel, tile, q, state)
    factor = kernel.rescale(state.top, after.top)
    inverse = (1 / factor).masked_fill(factor == 0, 0)
    return after._replace(acc=after.acc + state.acc * (inverse - factor)[..., None])


@LSE(Kernel.row_max, "FA#2082, FA#2083", applies=reach.has_row_fully_masked_in_last_tile)
def maximum_of_tile_alone(kernel: Kernel, top: Tensor, s: Tensor) -> Tensor:
    """The running maximum is that of the last tile: a row that sees nothing there ends with lse -inf."""
    return s.amax(-1)


@LSE(SplitKernel.merge, "sglang#35045, FI#2114", applies=reach.has_several_key_tiles, faults="splits-merged-in-base-2")
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
    applies=reach.all_of(reach.any_of(reach.has_several_key_tiles, reach.has_fully_masked_rows), lambda w: w.q_len > 1),
    faults="splits-merged-by-another-row",
)
def merge_weights_of_first_row(kernel: SplitKernel, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
    """All rows' partial results are merged by the lse of the first row, as suits decoding one token."""
    merged = SplitKernel.merge(kernel, outs, [lse[:, :1].expand_as(lse) for lse in lses])
    right = SplitKernel.merge(kernel, outs, lses)
    return Softmax(right.top, right.total, merged.acc / merged.total[..., None] * right.total[..., None])


@LSE(SplitKernel.merge, "FA@26d7d92f, torchtitan#3235", applies=reach.has_fully_masked_rows, faults=EMPTY_ROWS)
def merge_of_empty_splits_is_nan(kernel: SplitKernel, outs: list[Tensor], lses: list[Tensor]) -> Softmax:
    """Weights of a row for which no split has a key are exp(-inf - -inf)."""
    merged = SplitKernel.merge(kernel, outs, lses)
    return merged._replace(acc=merged.acc + (merged.top - merged.top)[..., None])


#: overflow and underflow of exponentials, sums and products in too few bits
MAGNITUDE = Defects("magnitude")


@MAGNITUDE(
    Kernel.row_max,
    "executorch#18407, llama.cpp#2665, NVIDIA/FasterTransformer#43",
    condition="magnitude",
    faults="exp-out-of-reach",
)
def no_maximum_subtracted(kernel: Kernel, top: Tensor, s: Tensor) -> Tensor:
    """Exponentials are taken of the scores themselves: beyond 88 they overflow."""
    return top.new_zeros(top.shape)


@MAGNITUDE(Kernel.row_max, "HabanaAI/vllm-fork#275", condition="magnitude", faults="exp-out-of-reach")
def maximum_taken_for_10(kernel: Kernel, top: Tensor, s: Tensor) -> Tensor:
    """10 is subtracted in place of the maximum: rows far below have a denominator of 0."""
    return top.new_full(top.shape, 10)


@MAGNITUDE.kernel("FI#4267, FI#4450, FI#4401", condition="magnitude")
class _MaximumStartsAtMinus50000(Kernel):
    """The running maximum starts at -50,000, not at -inf: rows whose scores are all below give zeros."""

    def start(self, seq: Sequence, rows: range) -> Softmax:
        state = super().start(seq, rows)
        return Softmax(state.total - 5e4, state.total, state.acc)

    def lse(self, state: Softmax) -> Tensor:
        return super().lse(state).masked_fill(state.total == 0, -math.inf)


@MAGNITUDE(Kernel.step, "FA#2082", applies=reach.hides_keys, condition="magnitude")
def maximum_over_hidden_scores(kernel: Kernel, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
    """The maximum is taken before the mask: where a hidden score is far above all others, these underflow."""
    s = kernel.modified(tile, kernel.scaled(tile, kernel.logits(q, kernel.load_k(tile))))
    top = kernel.row_max(state.top, s)
    factor = kernel.rescale(state.top, top)
    return Kernel.step(kernel, tile, q, Softmax(top, state.total * factor, state.acc * factor[..., None]))


@MAGNITUDE(Kernel.logits, "PaddlePaddle/Paddle#71919, PT#119320", faults="scores-rounded")
def scores_in_float16(kernel: Kernel, q: Tensor, k: Tensor) -> Tensor:
    """q . k is summed in float16, which ends at 65,504."""
    return Kernel.logits(kernel, q, k).half().float()


@MAGNITUDE(Kernel.accumulate, "llama.cpp#17746, SageAttention#93", faults="sums-in-few-bits")
def values_summed_in_float16(kernel: Kernel, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """P v is summed in float16."""
    return Kernel.accumulate(kernel, tile, acc, p, v).half().float()


@MAGNITUDE(Kernel.accumulate, "SageAttention#141, deepseek-ai/DeepEP#176", applies=reach.is_half, faults="sums-in-few-bits")
def values_summed_in_the_tensors_dtype(kernel: Kernel, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """P v is summed in 16 bits, 16 keys at a time."""
    for keys in range(0, v.shape[1], 16):
        part = slice(keys, keys + 16)
        acc = Kernel.accumulate(kernel, tile, acc, p[..., part], v[:, part]).to(tile.dtype).float()
    return acc


@MAGNITUDE(Kernel.denominator, "executorch#20089, ComfyUI#15263", applies=reach.is_half, faults="denominator-off")
def denominator_in_the_tensors_dtype(kernel: Kernel, tile: Tile, total: Tensor, p: Tensor) -> Tensor:
    """The denominator is summed in 16 bits, 16 keys at a time."""
    for keys in range(0, p.shape[-1], 16):
        total = Kernel.denominator(kernel, tile, total, p[..., keys : keys + 16]).to(tile.dtype).float()
    return total


@MAGNITUDE(Kernel.masked, "SageAttention#141, PT#119320", applies=reach.is_half, faults="precision-eager")
def exponent_in_the_tensors_dtype(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """Scores are rounded to 16 bits before the exponential."""
    return Kernel.masked(kernel, tile, s.to(tile.dtype).float())


@MAGNITUDE(Kernel.rounded, "FA#2717, FA#2716")
def probabilities_in_fp8(kernel: Kernel, tile: Tile, p: Tensor) -> Tensor:
    """P is rounded to fp8 in a kernel that does not say so."""
    return p.to(torch.float8_e4m3fn).float()


@MAGNITUDE.kernel("triton#1671, triton#674", applies=lambda w: w.dtype == "float32", faults="precision-tf32")
class _ProductsInTf32(Kernel):
    """float32 inputs lose 13 of their 23 bits before they are multiplied."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(_tf32(q), _tf32(k))

    def accumulate(self, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
        return super().accumulate(tile, acc, _tf32(p), _tf32(v))


def _tf32(x: Tensor) -> Tensor:
    """Round to 10 bits after the leading one, ties away from zero, as cvt.rna.tf32 does."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@MAGNITUDE(
    Kernel.recomputed,
    "PT#196678, PT#119320",
    backward=True,
    condition="magnitude",
    faults=("exp-out-of-reach", "exp-overflow"),
)
def p_from_exponential_of_lse(kernel: Kernel, s: Tensor, lse: Tensor) -> Tensor:
    """The backward pass forms P as exp(s) / exp(lse): below -88 both are 0."""
    return s.exp() / kernel.shift(lse).exp()[..., None]


@MAGNITUDE(Kernel.capped, "vllm#56578", condition="magnitude")
def tanh_by_exponentials(kernel: Kernel, tile: Tile, s: Tensor) -> Tensor:
    """The softcap's tanh is (e - 1) / (e + 1) with e = exp(2 x), infinity over infinity for large x."""
    cap = kernel.softcap(tile.seq.call)
    if cap is None:
        return s
    e = (2 * s / cap).exp()
    return cap * (e - 1) / (e + 1)
