"""The forward and the backward pass over one block, chunk by chunk: its part of the reference's values and budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.blocks import Block, Chunk, row_chunks
from pytest_attn.correctness.budget import ForwardBudget, ForwardRows
from pytest_attn.correctness.exact import kept_share, modify, scaled_scores, softmax
from pytest_attn.correctness.expected import Expected
from pytest_attn.correctness.extra_results import row_maxima, weights_variance
from pytest_attn.correctness.gradients import BackwardRows, Gradients, KeyGradients
from pytest_attn.correctness.parameters import ParameterGradients, Sums
from pytest_attn.correctness.products import over_keys
from pytest_attn.correctness.rounding import Rounding

if TYPE_CHECKING:
    import torch


def compute_block(block: Block, precision: Precision, tensors: dict[str, Expected], sums: Sums) -> None:
    """Compute the block's part of every tensor: out, lse and, if `tensors` has them, dq, dk and dv.

    sums: of the gradients of parameters, which are added to.
    """
    passes = _Passes(block, precision, tensors, sums)
    for rows in row_chunks(block):
        passes.run(Chunk(block, rows))
    passes.finish()


class _Passes:
    """What the chunks of one block share: the budgets, the sums over the chunks, and where results go."""

    def __init__(self, block: Block, precision: Precision, tensors: dict[str, Expected], sums: Sums) -> None:
        self.block, self.tensors = block, tensors
        self.rounding = Rounding(precision, block.workload.out_dtype)
        self.budget = ForwardBudget(block, self.rounding)
        self.gradients = Gradients(block, self.rounding)
        self.parameters = ParameterGradients(block, self.gradients, sums) if sums else None
        self.key_gradients = KeyGradients(block, self.rounding) if "dk" in tensors else None

    def run(self, chunk: Chunk) -> None:
        """Compute one chunk: put its rows in their place, add its share to the gradients of the keys."""
        scores = scaled_scores(chunk)
        noise = self.budget.scores.of_scaled(scores, chunk)
        scores, slope = modify(scores, chunk)
        if noise is not None:
            self.budget.scores.add_final_rounding(noise, scores, chunk)
        if "max" in self.tensors:
            top, top_var = row_maxima(scores, noise)
            self._put_rows("max", top[:, :, chunk.kept], top_var[:, :, chunk.kept], chunk)
        p, lse = softmax(scores, chunk)
        dropped = kept_share(chunk)
        used = p if dropped is None else p * dropped
        out = over_keys(used, chunk.v)
        row_noise = self.budget.of_rows(used, lse, chunk)
        lse_var = _sum(self.budget.of_lse(noise, p, lse), None if row_noise is None else row_noise.variance.squeeze(-1))
        self._put_rows("lse", lse[:, :, chunk.kept], None if lse_var is None else lse_var[:, :, chunk.kept], chunk)
        p_noise_var = None if noise is None else self.budget.noise_of_p(noise, p, lse)
        rows = ForwardRows(chunk.q, p, lse, out, p_noise_var, row_noise, dropped)
        if "weights" in self.tensors:
            self._put_weights(rows, chunk)
        p_rounding_var = self._put_forward(rows, chunk)
        if self.key_gradients is not None:
            slope_var = None if noise is None else noise.slope_var
            backward_rows = self.gradients.rows_of(rows, p_rounding_var, slope, slope_var, chunk)
            if self.parameters is not None:
                self.parameters.add(backward_rows, lse, lse_var, chunk)
            self._run_backward(backward_rows, chunk, self.key_gradients)

    def _put_forward(self, rows: ForwardRows, chunk: Chunk) -> torch.Tensor | None:
        """Put out and its budget in their place; return e_ij^2 if all rows are kept."""
        all_kept = bool(chunk.kept.all())
        if not all_kept and not bool(chunk.kept.any()):
            return None
        kept = rows if all_kept else rows.at(chunk.kept)
        p_rounding_var = self.rounding.of_p(kept.p, self.block.segment.lengths[1])
        if kept.dropped is not None:  # an eager kernel rounds what dropout leaves once more
            p_rounding_var *= 2
        self._put_rows("out", kept.out, self.budget.of_out(kept, p_rounding_var, chunk), chunk)
        return p_rounding_var if all_kept else None

    def _put_weights(self, rows: ForwardRows, chunk: Chunk) -> None:
        expected, heads = self.tensors["weights"], (self.block.batches, self.block.heads, slice(None), chunk.keys)
        variance = weights_variance(rows, self.rounding, self.block.segment.lengths[1])
        for target, source in ((expected.value, rows.p), (expected.tau, variance.sqrt().float())):
            target[heads].index_copy_(2, chunk.places, source[:, :, chunk.kept])

    def _run_backward(self, rows: BackwardRows, chunk: Chunk, key_gradients: KeyGradients) -> None:
        """Put dq in its place, and add to dk and dv."""
        sampled, all_keys = self.block.segment.keys, chunk.v.shape[2]
        if sampled is None:
            scores = self.gradients.of_scores(rows, chunk.v, chunk.v_squared, all_keys)
            self._put_rows("dq", *self.gradients.of_queries(scores, chunk.k), chunk)
            key_gradients.add(rows, scores, chunk.keys)
            return
        if bool(chunk.kept.any()):  # of sampled rows with all keys
            scores = self.gradients.of_scores(rows.at_rows(chunk.kept), chunk.v, chunk.v_squared, all_keys)
            self._put_rows("dq", *self.gradients.of_queries(scores, chunk.k), chunk)
            del scores  # each of its tensors is as large as the scores
        sampled, places = chunk.seen_among(sampled)
        if len(sampled) < all_keys:
            rows = replace(rows, row_sum_var=self.gradients.row_sum_var_of_all_keys(rows, chunk))
        rows = rows.at_keys(sampled)  # of all rows with sampled keys
        scores = self.gradients.of_scores(rows, chunk.v[:, :, sampled], chunk.v_squared[:, :, sampled], all_keys)
        key_gradients.add(rows, scores, places)

    def finish(self) -> None:
        """Round the sums over the chunks, and put them in their place."""
        if self.key_gradients is None:
            return
        for name, value, variance in self.key_gradients.rounded():
            expected, start = self.tensors[name], self.block.segment.kv_start
            place = (self.block.batches, self.block.kv_heads, slice(start, start + value.shape[2]))
            expected.value[place] = value
            expected.tau[place] = variance.sqrt_().float()

    def _put_rows(self, name: str, value: torch.Tensor, variance: torch.Tensor | None, chunk: Chunk) -> None:
        """Put the rows of a chunk that are kept in their place; `variance` becomes their tau."""
        expected, heads = self.tensors[name], (self.block.batches, self.block.heads)
        expected.value[heads].index_copy_(2, chunk.places, value)
        if variance is not None:
            expected.tau[heads].index_copy_(2, chunk.places, variance.sqrt().float())


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Add two variances, of which either may be none."""
    return other if one is None else one if other is None else one + other
