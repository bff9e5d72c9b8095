"""The backward pass of exact attention in float64, with the variance of what a kernel may round on its way.

dS_ij = P_ij (dP_ij - D_i), dP = dO v^T, D_i = sum(do_i o_i); dq = scale dS k, dk = scale dS^T q, dv = P^T dO. The formulas of
the budget are those of `exact.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from pytest_attn.correctness.precision import SHARED, SLOPE_UNIT

if TYPE_CHECKING:
    import torch

    from pytest_attn.correctness.exact import Chunk


class Gradients:
    """The gradients of one chunk of query rows."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    def run(self, p: torch.Tensor, out: torch.Tensor, n2: torch.Tensor | None, e2: torch.Tensor | None) -> None:
        """Form dS from P (n, heads, rows, keys) and out (n, heads, rows, d), and with it the three gradients.

        e2, the rounding of P, is formed again for a part of the rows or keys.
        """
        b, keys = self.chunk.block, self.chunk.block.keys
        if n2 is not None:  # the error of the row's denominator moves all its probabilities together
            n2 = n2 + p.square().mul_(n2.sum(-1, keepdim=True))
        dout = b.dout[:, :, self.chunk.rows].double()
        weighted = dout * out
        row_sum = weighted.sum(-1, keepdim=True)  # D_i
        eps2 = weighted.square_().sum(-1, keepdim=True).mul_(SHARED**2 * b.unit2(b.w.v_head_dim))
        rows = _Rows(self.chunk.q, dout, p, n2, row_sum, eps2, self.chunk.slope, self.chunk.slope_variance, e2)
        if keys is None:
            scores = self._score_gradient(rows, self.chunk.v, self.chunk.v2)
            self._query_gradient(rows, scores)
            self._key_gradients(rows, scores)
            return
        if bool(self.chunk.kept.any()):
            kept = rows.at_rows(self.chunk.kept)
            self._query_gradient(kept, self._score_gradient(kept, self.chunk.v, self.chunk.v2))
        rows = rows.at_keys(keys)
        if len(keys) < self.chunk.v.shape[2]:
            of_out = (dout.square() * self.chunk.over_keys(self.chunk.rounding_of_p(p), self.chunk.v2)).sum(-1, keepdim=True)
            rows = replace(rows, eps2=eps2 + of_out.mul_(SHARED**2))
        self._key_gradients(rows, self._score_gradient(rows, self.chunk.v[:, :, keys], self.chunk.v2[:, :, keys]))

    def _score_gradient(self, rows: _Rows, v: torch.Tensor, v2: torch.Tensor) -> _ScoreGradient:
        """Form dS with its variance, and the variance of D with what only the scores tell of it.

        Where only some keys are looked at, what scores add to the variance of D is scaled up to that of all.
        """
        b, p, n2, eps2 = self.chunk.block, rows.p, rows.n2, rows.eps2
        share = SHARED**2 * self.chunk.v.shape[2] / max(1, v.shape[2])
        e2 = rows.e2 if rows.e2 is not None else self.chunk.rounding_of_p(p)
        dp = self.chunk.per_key(rows.dout, v)
        if v.shape[2] == self.chunk.v.shape[2]:  # D comes from the kernel's own o, which carries the rounding of P
            eps2 = eps2 + _sum_of_products(dp.square(), e2).mul_(share)
        variance = None  # of dS, beside its own rounding
        if b.precision.rounds_scores and b.w.dtype != "float32":
            variance = dp.square().mul_(b.unit**2).mul_(p).mul_(p)
            eps2 = eps2 + share * variance.sum(-1, keepdim=True)
        if b.w.dtype == "float32":
            of_sums = b.unit**2 * (1 + b.w.v_head_dim / 2)
            variance = _plus(variance, self.chunk.per_key(rows.dout.square() * of_sums, v2).mul_(p).mul_(p))
        ds = dp.sub_(rows.row_sum)
        if b.precision.ds_from_rounded_p:
            variance = _plus(variance, ds.square().mul_(e2))
        if n2 is not None:
            moved = ds.square().mul_(n2)  # dS^2 times the score's variance, as n2 = P^2 variance
            eps2 = eps2 + share / SHARED**2 * moved.sum(-1, keepdim=True)  # n2 has its share of SHARED
            variance = _plus(variance, moved)
        ds, weight = ds.mul_(p), p
        if rows.slope is not None:
            before = ds.clone()
            ds, weight = ds.mul_(rows.slope), p * rows.slope
            variance = None if variance is None else variance.mul_(rows.slope).mul_(rows.slope)
            if b.w.softcap is not None:  # 1 - tanh^2 in float32 keeps an absolute error where it is small
                variance = _plus(variance, before.square().mul_(SLOPE_UNIT**2))
            if rows.slope_variance is not None:
                variance = _plus(variance, before.square().mul_(rows.slope_variance))
        terms = max(b.segment.lengths)
        floors = [b.floor / b.scale if b.precision.rounds_scaled_ds else b.floor]
        if b.precision.rounds_scores:  # dS, and then scale * dS
            floors.append(b.floor / b.scale)
        for floor in floors:
            variance = _plus(variance, self.chunk.rounded_where_seen(ds, p, terms, floor))
        assert variance is not None
        return _ScoreGradient(ds, variance, weight, e2, eps2)

    def _query_gradient(self, rows: _Rows, scores: _ScoreGradient) -> None:
        dq = self.chunk.over_keys(scores.ds, self.chunk.k).mul_(self.chunk.block.scale)
        drift = self.chunk.over_keys(scores.weight, self.chunk.k).square_().mul_(scores.eps2)
        tau2 = self.chunk.over_keys(scores.variance, self.chunk.k.square()).add_(drift).mul_(self.chunk.block.scale**2)
        tau2 += self.chunk.block.rounded(dq, self.chunk.block.segment.lengths[1])
        self.chunk.store("dq", dq, tau2)

    def _key_gradients(self, rows: _Rows, scores: _ScoreGradient) -> None:
        keys = self.chunk.block.keys
        noise = scores.e2 if rows.n2 is None else scores.e2 + rows.n2
        self.chunk.add("dv", keys, self.chunk.over_rows(rows.p, rows.dout), self.chunk.over_rows(noise, rows.dout.square()))
        drift = scores.weight.square().mul_(scores.eps2)
        tau2 = self.chunk.over_rows(scores.variance.add_(drift), rows.q.square()).mul_(self.chunk.block.scale**2)
        self.chunk.add("dk", keys, self.chunk.over_rows(scores.ds, rows.q).mul_(self.chunk.block.scale), tau2)


@dataclass
class _Rows:
    """What the backward pass needs of some query rows: P with the variance of the scores' noise, D with its variance."""

    q: torch.Tensor
    dout: torch.Tensor
    p: torch.Tensor
    n2: torch.Tensor | None
    row_sum: torch.Tensor
    eps2: torch.Tensor
    slope: torch.Tensor | None
    slope_variance: torch.Tensor | None
    e2: torch.Tensor | None = None

    def at_rows(self, kept: torch.Tensor) -> _Rows:
        return _Rows(**{f.name: _at_rows(getattr(self, f.name), kept) for f in fields(self)})

    def at_keys(self, keys: torch.Tensor) -> _Rows:
        optional = (self.n2, self.slope, self.slope_variance)
        n2, slope, slope_variance = (None if t is None else t[..., keys] for t in optional)
        return replace(self, p=self.p[..., keys], n2=n2, slope=slope, slope_variance=slope_variance, e2=None)


@dataclass
class _ScoreGradient:
    """dS with respect to the scaled scores, its variance, the weight with which D enters it, e_ij^2, and D's variance."""

    ds: torch.Tensor
    variance: torch.Tensor
    weight: torch.Tensor
    e2: torch.Tensor
    eps2: torch.Tensor


def _at_rows(tensor: torch.Tensor | None, kept: torch.Tensor) -> Any:
    return None if tensor is None else tensor[:, :, kept]


def _sum_of_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum a * b over the last dimension, without writing the product."""
    import torch

    total: torch.Tensor = torch.linalg.vecdot(a, b)
    return total.unsqueeze(-1)


def _plus(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else total.add_(term)
