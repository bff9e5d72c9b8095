"""An honest attention kernel on plain torch, cut into steps so small that a fault is one step written anew.

The algorithm is FlashAttention's: tiles of query rows and keys, an online softmax in float32, P rounded to the tensors'
dtype before P v, and a backward pass that computes P again from lse. Every workload is served, tensors lie as `Inputs` has
them, and rows that see no key give out = 0, lse = -inf and gradients of 0.

A mutant is a subclass of `Kernel` that overrides a step. The steps are in memory.py, masks.py, scores.py, forward.py and
backward.py. Names in them: s are scores, p probabilities, `top` and `total` the running maximum and denominator of the
softmax (m and l in the papers), and dX is the gradient of X. Between loading and storing, tensors are float32 and lie
heads-first: q (heads, rows, head_dim), k (heads, keys, head_dim), with one key head per query head, s (heads, rows, keys),
lse (heads, rows).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pytest_attn.mutants.honest.backward import Backward
from pytest_attn.mutants.honest.tiles import TILE, Call
from pytest_attn.workloads.inputs import Inputs

if TYPE_CHECKING:
    from torch import Tensor


class Kernel(Backward):
    """Tiled attention: `kernel(inputs, q, k, v)` returns (out, lse), both differentiable.

    `kept` is what a library keeps from one call to the next, workspaces or compiled kernels; an honest one keeps nothing.
    """

    def __init__(self, row_tile: int = TILE, key_tile: int = TILE) -> None:
        self.row_tile, self.key_tile = row_tile, key_tile
        self.kept: dict[Any, Any] = {}

    def __call__(self, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out in q's layout, and lse, float32, (batch, heads, q_len) or, where packed, (heads, tokens)."""
        out, lse = _autograd_function().apply(self, inputs, q, k, v)
        return out, lse


@cache
def _autograd_function() -> Any:
    """Return the autograd node of all kernels; a class that only exists once torch does."""
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, kernel: Kernel, inputs: Inputs, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            ctx.set_materialize_grads(False)
            out, lse = kernel.forward(Call(inputs, *kernel.receive(*tensors)))
            ctx.kernel, ctx.inputs = kernel, inputs
            ctx.save_for_backward(*tensors, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
            *tensors, out, lse = ctx.saved_tensors
            kernel: Kernel = ctx.kernel
            call = Call(ctx.inputs, *kernel.receive_again(*tensors))
            dout = torch.zeros_like(out) if dout is None else kernel.receive_dout(dout)
            return None, None, *kernel.backward(call, out, lse, dout, dlse)

    return Attention
