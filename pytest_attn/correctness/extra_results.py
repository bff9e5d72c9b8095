"""What a kernel may return beside out and lse: the softmax matrix and the largest score of each row, with their budgets.

The variance of a weight follows from the error analysis in `budget.py`, with P as the result:

    weights: e_ij^2 + n_ij + P_ij^2 (sum_k n_ik + r_i + (SHARED LSE_UNIT lse_i)^2)

e_ij is the rounding of P_ij, n_ij the noise of its score, which moves the denominator as well, r_i the variance of what all
P of a row share. max, like lse, is held to what float32 sums allow, and to its score's noise where a profile declares it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import LSE_UNIT, SHARED, TINY
from pytest_attn.correctness.budget import ForwardRows
from pytest_attn.correctness.rounding import Rounding
from pytest_attn.correctness.score_noise import ScoreNoise

if TYPE_CHECKING:
    import torch


def weights_variance(rows: ForwardRows, rounding: Rounding, kv_len: int) -> torch.Tensor:
    """Return the variance of P (n, heads, rows, keys), as a kernel returns it."""
    p, noise_var, lse = rows.p, rows.p_noise_var, rows.lse
    variance = rounding.of_p(p, kv_len).clamp_(min=TINY**2).mul_(p > 0)
    of_lse = lse.where(lse.isfinite(), lse.new_zeros(())).mul(SHARED * LSE_UNIT).unsqueeze(-1)
    shared = of_lse.square_()
    if noise_var is not None:
        variance = variance + noise_var
        shared = shared + noise_var.sum(-1, keepdim=True)
    if rows.row_noise is not None:
        shared = shared + rows.row_noise.variance
    return variance + p.square().mul_(shared)


def row_maxima(scores: torch.Tensor, noise: ScoreNoise | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest final score of each row, -inf where it sees no key, and its variance, both (n, heads, rows).

    scores: after softcap, bias, ALiBi, score_mod and mask, without sinks, (n, heads, rows, keys).
    """
    if not scores.shape[-1]:
        nothing = scores.new_full(scores.shape[:-1], -math.inf)
        return nothing, scores.new_zeros(scores.shape[:-1])
    top = scores.amax(-1)
    if noise is None:
        return top, scores.new_zeros(top.shape)
    return top, noise.variance.masked_fill(scores == -math.inf, 0).amax(-1)
