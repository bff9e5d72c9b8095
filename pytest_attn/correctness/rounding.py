"""What one rounding costs: the variance that it adds to a result, to P, or to V, in one precision profile.

eu(x) = max(u |x|, floor): the rounding of a result x to the dtype
e_ij: the rounding of P_ij, that of the dtype or, in quantized kernels, of P's own dtype or step, never more than P_ij
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import FLOOR, LARGEST, TINY, UNIT, Precision

if TYPE_CHECKING:
    import torch


#: Tensor cores add 16 products at a time to a float32 sum and cut off what does not fit (Fasi et al., Numerical behavior of
#: NVIDIA tensor cores, 2021): up to a unit in the last place, 2^-23, at each step, always toward 0, so the losses add up.
_CUT_FROM_SUM = 2.0**-23 / 16


class Rounding:
    """How a kernel of this precision profile rounds to a workload's dtype."""

    def __init__(self, precision: Precision, dtype: str) -> None:
        self.precision = precision
        self.is_float32 = dtype == "float32"
        self.rounds_scores_to_dtype = precision.rounds_scores and not self.is_float32
        self.unit, self.floor = precision.unit(dtype), FLOOR[dtype]
        self.operand_unit = precision.operand_unit if self.is_float32 else 0.0

    def unit_squared(self, terms: int) -> float:
        """Return the squared unit roundoff of a sum of `terms` products: in float32 the sum itself rounds as well.

        A sum of n random terms passes through partial sums whose squares add up to at most n times those of its terms.
        """
        return self.unit**2 * (1 + terms if self.is_float32 else 1)

    def of_result(self, x: torch.Tensor, terms: int, floor: float | None = None) -> torch.Tensor:
        """Return eu(x)^2, in the shape of x; `floor` replaces the least error it may have."""
        floor = max(self.floor, TINY) if floor is None else floor
        variance = x.square().mul_(self.unit_squared(terms))
        return variance.clamp_(min=floor**2) if floor else variance

    def of_sum(self, x: torch.Tensor, terms: int, added: torch.Tensor | None = None) -> torch.Tensor:
        """Like `of_result`, with what the products of the sum x lose together.

        added: how many of the terms are not 0, in a shape that broadcasts with x; all of them by default.
        """
        variance, cut = self.of_result(x, terms), self.of_cut_products(x)
        if not self.is_float32:
            variance += (x * ((terms if added is None else added) * _CUT_FROM_SUM)).square_()
        return variance if cut is None else variance.add_(cut)

    def of_operands(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the variance, in the shape of x, of rounding x and its partner in a product, None where these are exact.

        Where x stands for each term of a sum; what all terms lose alike is `of_cut_products`.
        """
        return x.square().mul_(2 * self.operand_unit**2) if self.operand_unit else None

    def of_cut_products(self, total: torch.Tensor) -> torch.Tensor | None:
        """Return the square of what a sum of products loses where both operands are cut off: their errors do not cancel."""
        return total.square().mul_((2 * self.operand_unit) ** 2) if self.operand_unit else None

    def where_seen(self, x: torch.Tensor, p: torch.Tensor, terms: int, floor: float | None = None) -> torch.Tensor:
        """Like `of_result`, but an element that P never reaches is an exact zero in every kernel."""
        variance = self.of_result(x, terms, self.floor if floor is None else floor)
        return variance.mul_(p > 0) if self.floor else variance

    def of_p(self, p: torch.Tensor, kv_len: int) -> torch.Tensor:
        """Return e_ij^2 of P (..., rows, keys), of which each row is a part of kv_len probabilities."""
        step, dtype = self.precision.p_step, self.precision.p_dtype
        if step:
            return p.minimum(row_tops(p).mul_(step / math.sqrt(12))).square_()
        if dtype:
            return p.minimum((p * UNIT[dtype]).maximum(row_tops(p).mul_(FLOOR[dtype]))).square_()
        rounded, operands = self.where_seen(p, p, kv_len), self.of_operands(p)
        return rounded if operands is None else rounded.add_(operands)

    def of_v(self, v: torch.Tensor) -> torch.Tensor | None:
        """Return the variance of rounding V (..., keys, d) to a small dtype; None where it is taken as it is."""
        dtype = self.precision.v_dtype
        if dtype is None or not v.numel():
            return None
        top = v.abs().amax(-2, keepdim=True)
        return (v.abs() * UNIT[dtype]).maximum(top * (FLOOR[dtype] / LARGEST[dtype])).square_()

    def of_unknown(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the variance (n, heads, 1, 1) of what is unknown of q or k (n, heads, length, d); None where all is known."""
        if not self.precision.qk_error or not x.numel():
            return None
        return x.double().abs().amax((-2, -1), keepdim=True).mul_(self.precision.qk_error).square_()


def row_tops(p: torch.Tensor) -> torch.Tensor:
    """Return each row's largest P, (..., rows, 1); 0 where there are no keys."""
    return p.amax(-1, keepdim=True) if p.shape[-1] else p.new_zeros((*p.shape[:-1], 1))
