"""Magnitude: overflow and underflow of exponentials, sums and products in too few bits."""

import math

import torch
from torch import Tensor

from pytest_attn.guests.mutants.kernel import Kernel, Sequence, Softmax, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import hides_keys, is_half

MAGNITUDE = Defects("magnitude")


@MAGNITUDE(
    "executorch#18407",
    "llama.cpp#2665",
    "NVIDIA/FasterTransformer#43",
    condition="magnitude",
    faults=("exp-out-of-reach",),
)
class _NoMaximumSubtracted(Kernel):
    """Exponentials are taken of the scores themselves: beyond 88 they overflow."""

    def row_max(self, top: Tensor, s: Tensor) -> Tensor:
        return top.new_zeros(top.shape)


@MAGNITUDE("HabanaAI/vllm-fork#275", condition="magnitude", faults=("exp-out-of-reach",))
class _MaximumTakenFor10(Kernel):
    """10 is subtracted in place of the maximum: rows far below have a denominator of 0."""

    def row_max(self, top: Tensor, s: Tensor) -> Tensor:
        return top.new_full(top.shape, 10)


@MAGNITUDE("FI#4267", "FI#4450", "FI#4401", condition="magnitude")
class _MaximumStartsAtMinus50000(Kernel):
    """The running maximum starts at -50,000, not at -inf: rows whose scores are all below give zeros."""

    def start(self, seq: Sequence, rows: range) -> Softmax:
        state = super().start(seq, rows)
        return Softmax(state.total - 5e4, state.total, state.acc)

    def lse(self, state: Softmax) -> Tensor:
        return super().lse(state).masked_fill(state.total == 0, -math.inf)


@MAGNITUDE("FA#2082", applies=hides_keys, condition="magnitude")
class _MaximumOverHiddenScores(Kernel):
    """The maximum is taken before the mask: where a hidden score is far above all others, these underflow."""

    def step(self, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
        s = self.modified(tile, self.scaled(tile, self.logits(q, self.load_k(tile))))
        top = self.row_max(state.top, s)
        factor = self.rescale(state.top, top)
        return super().step(tile, q, Softmax(top, state.total * factor, state.acc * factor[..., None]))


@MAGNITUDE("PaddlePaddle/Paddle#71919", "PT#119320", faults=("scores-rounded",))
class _ScoresInFloat16(Kernel):
    """q . k is summed in float16, which ends at 65,504."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k).half().float()


@MAGNITUDE("llama.cpp#17746", "SageAttention#93")
class _ValuesSummedInFloat16(Kernel):
    """P v is summed in float16."""

    def accumulate(self, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
        return super().accumulate(tile, acc, p, v).half().float()


@MAGNITUDE("SageAttention#141", "deepseek-ai/DeepEP#176", applies=is_half)
class _ValuesSummedInTheTensorsDtype(Kernel):
    """P v is summed in 16 bits, 16 keys at a time."""

    def accumulate(self, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
        for keys in range(0, v.shape[1], 16):
            part = slice(keys, keys + 16)
            acc = super().accumulate(tile, acc, p[..., part], v[:, part]).to(tile.dtype).float()
        return acc


@MAGNITUDE("executorch#20089", "ComfyUI#15263", applies=is_half, faults=("denominator-off",))
class _DenominatorInTheTensorsDtype(Kernel):
    """The denominator is summed in 16 bits, 16 keys at a time."""

    def denominator(self, tile: Tile, total: Tensor, p: Tensor) -> Tensor:
        for keys in range(0, p.shape[-1], 16):
            total = super().denominator(tile, total, p[..., keys : keys + 16]).to(tile.dtype).float()
        return total


@MAGNITUDE("SageAttention#141", "PT#119320", applies=is_half, faults=("precision-eager",))
class _ExponentInTheTensorsDtype(Kernel):
    """Scores are rounded to 16 bits before the exponential."""

    def masked(self, tile: Tile, s: Tensor) -> Tensor:
        return super().masked(tile, s.to(tile.dtype).float())


@MAGNITUDE("FA#2717", "FA#2716")
class _ProbabilitiesInFp8(Kernel):
    """P is rounded to fp8 in a kernel that does not say so."""

    def rounded(self, tile: Tile, p: Tensor) -> Tensor:
        return p.to(torch.float8_e4m3fn).float()


@MAGNITUDE("triton#1671", "triton#674", applies=lambda w: w.dtype == "float32", faults=("precision-tf32",))
class _ProductsInTf32(Kernel):
    """float32 inputs lose 13 of their 23 bits before they are multiplied."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(_tf32(q), _tf32(k))

    def accumulate(self, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
        return super().accumulate(tile, acc, _tf32(p), _tf32(v))


def _tf32(x: Tensor) -> Tensor:
    """Round to 10 bits after the leading one, ties away from zero, as cvt.rna.tf32 does."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@MAGNITUDE("PT#196678", "PT#119320", backward=True, condition="magnitude", faults=("exp-out-of-reach", "exp-overflow"))
class _PFromExponentialOfLse(Kernel):
    """The backward pass forms P as exp(s) / exp(lse): below -88 both are 0."""

    def recomputed(self, s: Tensor, lse: Tensor) -> Tensor:
        return s.exp() / self.shift(lse).exp()[..., None]


@MAGNITUDE("vllm#56578", applies=lambda w: w.softcap is not None, condition="magnitude")
class _TanhByExponentials(Kernel):
    """The softcap's tanh is (e - 1) / (e + 1) with e = exp(2 x), infinity over infinity for large x."""

    def capped(self, tile: Tile, s: Tensor) -> Tensor:
        cap = self.softcap(tile.seq.call)
        if cap is None:
            return s
        e = (2 * s / cap).exp()
        return cap * (e - 1) / (e + 1)
