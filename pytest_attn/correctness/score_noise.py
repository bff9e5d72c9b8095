"""How noisy the scores are that a kernel takes the softmax of: the variance of each, and how far off it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import SHARED, TENSOR_CORE_UNIT, UNIT
from pytest_attn.correctness.blocks import Block, Chunk
from pytest_attn.correctness.exact import before_softcap, sinks_of
from pytest_attn.correctness.products import per_key
from pytest_attn.correctness.rounding import Rounding

if TYPE_CHECKING:
    import torch

#: An error of q or k may be a rare large one: scores are followed this many standard deviations up.
_REACH = 8.0
#: standard deviation of a score above which P changes by more than its derivative tells
_FAR = 1 / 8
#: rows whose norms are formed together
_NORMS = 1 << 16


@dataclass
class ScoreNoise:
    """How noisy the scores of a chunk are; every tensor is (n, heads, rows, keys).

    variance: of the scores. slope_var: of softcap's slope, which a rounded score moves; None without softcap.
    highest: what the scores may be, where they may be far off; None elsewhere.
    """

    variance: torch.Tensor
    slope_var: torch.Tensor | None = None
    highest: torch.Tensor | None = None


def _largest_norm(vectors: torch.Tensor) -> float:
    """Return the largest norm of vectors (n, heads, length, dim)."""
    parts = vectors.tensor_split(-(-vectors.shape[2] // _NORMS), 2)
    return max(float(part.double().norm(dim=-1).max()) for part in parts)


class ScoreBudget:
    """The variance of the scores of one block, chunk by chunk.

    unknown_q_var, unknown_k_var: of what is unknown of q and k, None where they are known.
    """

    def __init__(self, block: Block, rounding: Rounding) -> None:
        self.workload, self.rounding, self.precision = block.workload, rounding, rounding.precision
        self.scale = block.workload.softmax_scale
        self.unknown_q_var, self.unknown_k_var = rounding.of_unknown(block.q), rounding.of_unknown(block.k)
        self.are_noisy = self._are_declared_noisy() or rounding.is_float32 or self._float32_shows(block)

    def _are_declared_noisy(self) -> bool:
        """Whether the precision profile itself makes the scores noisy."""
        return self.precision.has_noisy_scores or self.precision.qk_error > 0

    def _float32_shows(self, block: Block) -> bool:
        """Whether float32's own rounding of the scores shows beside the dtype's rounding of P."""
        if not block.q.numel() or not block.k.numel():
            return False
        largest = self.scale * _largest_norm(block.q) * _largest_norm(block.k)
        return largest * TENSOR_CORE_UNIT * self.workload.head_dim / 4 > self.rounding.unit / 2

    def of_scaled(self, scaled: torch.Tensor, chunk: Chunk) -> ScoreNoise | None:
        """Return the noise of the scaled scores (n, heads, rows, keys), as softcap leaves it; None where none shows."""
        import torch

        if not self.are_noisy:
            return None
        variance, slope_var = self._scaled_score_variance(scaled, chunk), None
        if self.workload.softcap is not None:  # tanh damps what lies before it
            is_far = self._is_far(variance)
            nearest = self._nearest_to_0(before_softcap(scaled, chunk), variance, is_far)
            tanh_squared = torch.tanh(nearest / self.workload.softcap).square_()
            damping = (1 - tanh_squared).square_()
            tanh_squared = tanh_squared.fill_(1) if is_far else tanh_squared  # its most, wherever that is
            slope_var = variance * damping * tanh_squared.mul_((2 / self.workload.softcap) ** 2)
            variance *= damping
        return ScoreNoise(variance.mul_(SHARED**2), slope_var)

    def _is_far(self, variance: torch.Tensor) -> bool:
        """Whether scores may be so far off that their exponentials, and softcap, are far from linear in between."""
        if self.rounding.operand_unit:
            return True
        return self.precision.has_noisy_scores and bool(variance.numel()) and float(variance.max()) * SHARED**2 > _FAR**2

    def _nearest_to_0(self, scaled: torch.Tensor, variance: torch.Tensor, is_far: bool) -> torch.Tensor:
        """Return how near to 0, where softcap damps least, noise may move the scores; as they are where it moves none far."""
        if not is_far:
            return scaled
        return scaled.abs().sub_(variance.sqrt().mul_(SHARED * _REACH)).clamp_(min=0)

    def _scaled_score_variance(self, scaled: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Variance of the scaled scores: of the dtype's rounding where the profile has it, of float32's sums otherwise."""
        unit, scale, head_dim = self.rounding.unit, self.scale, self.workload.head_dim
        k_squared, q_squared = chunk.k.square(), chunk.q.square()
        if self.rounding.is_float32:  # sums that round
            variance = per_key(q_squared.mul(unit**2 * scale**2 * (1 + head_dim / 2)), k_squared)
            variance += scaled.square().mul_(unit**2 * (2 + head_dim / 6))
            variance += self.precision.exponential_unit**2  # a relative error of the exponential is an error of the score
        else:  # sums that truncate: the errors of the products add up, they do not cancel
            variance = scaled.square().mul_((TENSOR_CORE_UNIT * head_dim / 4) ** 2)
        if self.rounding.rounds_scores_to_dtype:
            variance += scaled.square().mul_(2 * unit**2).add_(per_key(q_squared.mul(unit**2 * scale**2), k_squared))
        if self.precision.rounds_scaled_query or self.precision.rounds_scaled_key:
            variance += per_key(q_squared.mul(unit**2 * scale**2), k_squared)
        if self.precision.rounds_products:  # a tree of sums: its levels' squares add up to their terms', and where these agree
            levels = math.ceil(math.log2(max(2, head_dim)))  # to twice the whole's
            variance += per_key(q_squared.mul(1.5 * unit**2 * scale**2 * (1 + levels)), k_squared)
            variance += scaled.square().mul_(3 * unit**2)
        if (cut := self.rounding.of_cut_products(scaled)) is not None:
            variance += per_key(q_squared.mul(2 * self.rounding.operand_unit**2 * scale**2), k_squared).add_(cut)
        if self.unknown_q_var is not None and self.unknown_k_var is not None:
            unknown_k_var = self.unknown_k_var.repeat_interleave(self.workload.group, 1)
            variance += per_key((self.unknown_q_var * scale**2).expand_as(q_squared), k_squared)
            variance += (unknown_k_var * scale**2) * q_squared.sum(-1, keepdim=True)
        return variance

    def add_final_rounding(self, noise: ScoreNoise, scores: torch.Tensor, chunk: Chunk) -> None:
        """Add what float32 rounds of the final scores, after softcap, bias and ALiBi, and keep how high they may be."""
        finite = scores.clamp(min=-1e100)
        noise.variance += finite.square().mul_(2 * (SHARED * UNIT["float32"]) ** 2)
        if self.precision.rounds_shifted_scores and finite.shape[-1]:
            top, sinks = finite.amax(-1, keepdim=True), sinks_of(chunk)
            shifted = finite - (top if sinks is None else top.maximum(sinks))
            noise.variance += shifted.square_().mul_((SHARED * self.rounding.unit) ** 2)
        if self.precision.qk_error or self.rounding.operand_unit:
            noise.highest = scores + _REACH * noise.variance.sqrt()
        elif self.precision.has_noisy_scores:
            deviation = noise.variance.sqrt().masked_fill_(scores == -math.inf, 0)
            is_far = deviation > _FAR
            if bool(is_far.any()):
                noise.highest = scores + deviation.mul_(is_far).mul_(_REACH)
