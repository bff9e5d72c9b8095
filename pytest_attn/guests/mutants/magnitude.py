"""Magnitude: overflow and underflow of exponentials, sums and products in too few bits."""

import math

import torch
from torch import Tensor

from pytest_attn.guests.mutants.kernel import Kernel, Sequence, Softmax, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import hides_keys, is_half

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


@MAGNITUDE(Kernel.step, "FA#2082", applies=hides_keys, condition="magnitude")
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


@MAGNITUDE(Kernel.accumulate, "llama.cpp#17746, SageAttention#93")
def values_summed_in_float16(kernel: Kernel, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """P v is summed in float16."""
    return Kernel.accumulate(kernel, tile, acc, p, v).half().float()


@MAGNITUDE(Kernel.accumulate, "SageAttention#141, deepseek-ai/DeepEP#176", applies=is_half)
def values_summed_in_the_tensors_dtype(kernel: Kernel, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """P v is summed in 16 bits, 16 keys at a time."""
    for keys in range(0, v.shape[1], 16):
        part = slice(keys, keys + 16)
        acc = Kernel.accumulate(kernel, tile, acc, p[..., part], v[:, part]).to(tile.dtype).float()
    return acc


@MAGNITUDE(Kernel.denominator, "executorch#20089, ComfyUI#15263", applies=is_half, faults="denominator-off")
def denominator_in_the_tensors_dtype(kernel: Kernel, tile: Tile, total: Tensor, p: Tensor) -> Tensor:
    """The denominator is summed in 16 bits, 16 keys at a time."""
    for keys in range(0, p.shape[-1], 16):
        total = Kernel.denominator(kernel, tile, total, p[..., keys : keys + 16]).to(tile.dtype).float()
    return total


@MAGNITUDE(Kernel.masked, "SageAttention#141, PT#119320", applies=is_half, faults="precision-eager")
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
