"""Exact attention as a model can use it: float64 inside, differentiable, and on request rounded where a kernel rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pytest_attn.backends.dense import alibi_bias, boolean_mask
from pytest_attn.backends.eager import probabilities
from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.arithmetic import (
    Block,
    Chunk,
    head_blocks,
    modify,
    over_group,
    over_keys,
    over_rows,
    per_key,
    row_chunks,
    scaled_scores,
    softmax,
)
from pytest_attn.correctness.exact_gradients import BackwardSteps, add_values, zeros_of
from pytest_attn.correctness.reference import heads_first, segments_of
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.parameters import PARAMETERS, parameters_of
from pytest_attn.workloads.workload import repeated


class SeededGenerators(dict[torch.device, torch.Generator]):
    """A generator for each device, made where it is first asked for. seed: of all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __missing__(self, device: torch.device) -> torch.Generator:
        self[device] = made = torch.Generator(device).manual_seed(self._seed)
        return made


@dataclass
class Rounder:
    """Rounds the values that a kernel keeps in the dtype, as `precision` says.

    At random, up or down with the odds that keep the mean, where there is a generator; else to nearest, as kernels do, on a
    grid that is moved by a factor: equal values get equal errors.
    """

    precision: Precision
    generator: torch.Generator | None = None
    factor: float = 1.0

    def __call__(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """Return x (float64) rounded to a dtype, still as float64."""
        if self.generator is None:
            return on_grid(x * self.factor, dtype, 0.5) / self.factor
        return on_grid(x, dtype, torch.rand(x.shape, generator=self.generator, device=x.device, dtype=torch.float64))


def on_grid(x: torch.Tensor, dtype: str, chance: torch.Tensor | float) -> torch.Tensor:
    """Return x on the grid of a dtype. chance: 0.5 rounds to nearest, a number drawn from 0 to 1 at random."""
    x = x.double()
    to = DTYPES[dtype]
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (exponent - to.bits).clamp(min=to.lowest))
    return torch.where(x.isfinite(), (x / step + chance).floor() * step, x)


def exact_attention(inputs: Inputs, rounding: Rounder | None = None) -> torch.Tensor:
    """Return exact attention for these inputs in their dtype, (batch, heads, q_len, v_head_dim) or packed.

    It has gradients with respect to q, k, v and the parameters (workloads/parameters.py). rounding: of what a kernel rounds.
    Memory grows with the sequence, not with its square.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(inputs.q):  # whose transforms take plain operators only
        return (exact_weights(inputs) @ repeated(inputs.v, inputs.workload).double()).to(inputs.q.dtype)
    function: Any = _ExactAttention
    parameters = (getattr(inputs, one.tensor) for one in PARAMETERS.values())
    out: torch.Tensor = function.apply(inputs, rounding, inputs.q, inputs.k, inputs.v, *parameters)
    return out


def exact_weights(inputs: Inputs) -> torch.Tensor:
    """Return the probabilities of these inputs in float64, (batch, heads, q_len, kv_len), with gradients."""
    w = inputs.workload
    scores = inputs.q.double() @ repeated(inputs.k, w).double().mT * w.softmax_scale
    alibi = alibi_bias(inputs) if w.alibi else None
    return probabilities(scores, inputs, boolean_mask(inputs), alibi)


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Inputs, rounding: Rounder | None, *tensors: torch.Tensor | None) -> torch.Tensor:
        passes = Passes(inputs, rounding)
        out = passes.forward()
        ctx.passes = passes
        ctx.save_for_backward(out.clone())  # a model may change out in place, where its own attention does not keep it
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return None, None, *ctx.passes.backward(out, dout)


class Passes:
    """The two passes over one call, chunk by chunk. arithmetic: the dtype of products and sums, float64 by default."""

    def __init__(self, inputs: Inputs, rounding: Rounder | None, arithmetic: torch.dtype | None = None) -> None:
        self.inputs, self.workload, self.rounding, self.arithmetic = inputs, inputs.workload, rounding, arithmetic
        self._writes_scores = rounding is not None and rounding.precision.rounds_scores

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.rounding is None else self.rounding(x, self.workload.dtype)

    def _scores_rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Round what only kernels round that write scores in the dtype."""
        return self._rounded(x) if self._writes_scores else x

    def forward(self) -> torch.Tensor:
        """Return out, in the layout of q."""
        zeros = self.inputs.q.new_zeros((*self.inputs.q.shape[:-1], self.workload.v_head_dim))
        out = heads_first(zeros.clone(), self.workload)

        def run(chunk: Chunk, place: tuple[Any, ...]) -> None:
            p, _, _ = self._probabilities(chunk)
            out[place] = self._rounded(over_keys(self._rounded(p), chunk.v)).to(out.dtype)

        self._over_chunks(zeros, run)
        return self._native(out)

    def backward(self, out: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients of q, k, v and the parameters; None for what there is not."""
        w, inputs = self.workload, self.inputs
        q, k, v = (heads_first(t, w) for t in (inputs.q, inputs.k, inputs.v))
        out = heads_first(out, w)
        dq = torch.zeros_like(q, dtype=torch.float64)
        sums = {"dk": self._key_sums(k), "dv": self._key_sums(v)}
        of_parameters = {name: zeros_of(name, w, q.device) for name in parameters_of(w)}
        heads = sums["dk"].shape[1]

        def run(chunk: Chunk, place: tuple[Any, ...]) -> None:
            block, scale = chunk.block, w.softmax_scale
            p, lse, slope = self._probabilities(chunk)
            d_out = block.dout[:, :, chunk.rows].to(chunk.q.dtype)
            row_sum = (d_out * out[place].to(d_out.dtype)).sum(-1, keepdim=True)
            dp = self._scores_rounded(per_key(d_out, chunk.v))
            if self._writes_scores:  # and takes the gradient of the softmax from what it wrote
                p = self._rounded(p)
                row_sum = (dp * p).sum(-1, keepdim=True)
            ds = p * (dp - row_sum)
            before_softcap = ds if slope is None or not w.bias_before_softcap else ds * slope
            add_values(of_parameters, BackwardSteps(chunk, ds, before_softcap, row_sum, lse))
            ds = self._rounded(ds if slope is None else ds * slope)
            dq[place] = over_keys(ds, chunk.k) * scale
            group = heads // k.shape[1]
            kv_heads = slice(block.kv_heads.start * group, block.kv_heads.stop * group)
            start = block.segment.kv_start
            keys = slice(start + chunk.keys.start, start + chunk.keys.stop)
            rows = kv_heads.stop - kv_heads.start
            sums["dk"][block.batches, kv_heads, keys] += over_rows(ds, chunk.q, rows) * scale
            sums["dv"][block.batches, kv_heads, keys] += over_rows(self._rounded(p), d_out, rows)

        self._over_chunks(dout, run)
        if heads != k.shape[1]:
            sums = {name: over_group(self._rounded(total), heads // k.shape[1]) for name, total in sums.items()}
        dk, dv = sums["dk"], sums["dv"]
        grads: list[torch.Tensor | None] = [self._native(self._rounded(g)).to(t.dtype) for g, t in ((dq, q), (dk, k), (dv, v))]
        for name, one in PARAMETERS.items():
            tensor = getattr(inputs, one.tensor)
            grads.append(of_parameters[name].view(tensor.shape).to(tensor.dtype) if name in of_parameters else None)
        return grads

    def _native(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0].transpose(0, 1) if self.workload.is_packed else tensor

    def _key_sums(self, of: torch.Tensor) -> torch.Tensor:
        """Return zeros for a gradient of keys, per query head where a kernel rounds these before it sums them up."""
        per_head = self.rounding is not None and self.rounding.precision.sums_rounded_heads
        heads = self.workload.heads if per_head else of.shape[1]
        return torch.zeros((of.shape[0], heads, *of.shape[2:]), dtype=torch.float64, device=of.device)

    def _probabilities(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return P (n, heads, rows, keys), lse, and the derivative of the final scores by the scaled ones."""
        scores, slope = modify(self._scores_rounded(scaled_scores(chunk)), chunk)
        p, lse = softmax(self._scores_rounded(scores).to(chunk.q.dtype), chunk)
        p = p.to(chunk.q.dtype)
        return p, lse, slope

    def _over_chunks(self, dout: torch.Tensor, run: Callable[[Chunk, tuple[Any, ...]], None]) -> None:
        """Run over all chunks, each with its place in tensors like out, (batch, heads, rows, ...)."""
        q, k, v = (t.detach() for t in (self.inputs.q, self.inputs.k, self.inputs.v))
        inputs = dataclasses.replace(self.inputs, q=q, k=k, v=v, dout=dout)
        with torch.no_grad():
            for segment in segments_of(inputs, self.workload, inputs.device, None, None):
                for batches, kv_heads in head_blocks(segment):
                    block = Block(segment, batches, kv_heads)
                    for rows in row_chunks(block):
                        chunk = Chunk(block, rows)
                        if self.arithmetic is not None:
                            chunk.q, chunk.k, chunk.v = (t.to(self.arithmetic) for t in (chunk.q, chunk.k, chunk.v))
                        first, last = int(rows[0]) + segment.q_start, int(rows[-1]) + 1 + segment.q_start
                        run(chunk, (block.batches, block.heads, slice(first, last)))
