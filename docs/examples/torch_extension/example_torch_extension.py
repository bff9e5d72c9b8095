"""Attention as an operator of torch.library, with a shape function and a backward pass for autograd and compile."""

import torch


@torch.library.custom_op("example::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out, of the dtype of q, and the probabilities in float32; all tensors (batch, heads, rows, dim)."""
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    p = torch.softmax(scores, -1)
    return (p @ v.float()).to(q.dtype), p


@attention.register_fake
def _(q, k, v, causal):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(*q.shape[:3], k.shape[2], dtype=torch.float32)


def _setup(ctx, inputs, output):
    q, k, v, _ = inputs
    ctx.save_for_backward(q, k, v, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout, _):
    q, k, v, p = ctx.saved_tensors
    dout, scale = dout.float(), q.shape[-1] ** -0.5
    dp = dout @ v.float().mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return (ds @ k.float()).to(q.dtype), (ds.mT @ q.float()).to(k.dtype), (p.mT @ dout).to(v.dtype), None


attention.register_autograd(_backward, setup_context=_setup)
