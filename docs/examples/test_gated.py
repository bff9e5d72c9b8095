"""Attention with a gate on its output, as in Qwen3-Next, whose out and gradients are judged with the usual limits."""

import pytest
import torch


def attention(q, k, v, gate):
    """Replace this by yours. gate: shaped as out; to one that expects the sigmoid, as NSA's do, pass `torch.sigmoid(gate)`."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v) * torch.sigmoid(gate)


def drawn(attn, values):
    """Return one of the values for each element of out; `[..., :1]` of it is one for each head and row.

    The gradient of that, at gates of 0, is `(dout * attn.reference.out).sum(-1, keepdim=True) / 4`.
    """
    shape = (*attn.q.shape[:-1], attn.workload.v_head_dim)
    at = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(0))
    return torch.tensor(values)[at].to(attn.q)


@pytest.mark.attention("smoke-full", backward=True)
def test_out_and_gradients_of_q_k_and_v(attn):
    gate = drawn(attn, [0.0, 30.0])
    attn.check(lambda q, k, v: attention(q, k, v, gate) / torch.sigmoid(gate))


@pytest.mark.attention("smoke-full")
def test_gradient_of_the_gate(attn):
    sign = drawn(attn, [-1.0, 1.0])

    def through_the_gate(q, k, v):
        with torch.enable_grad():
            gate = torch.zeros_like(sign, requires_grad=True)
            return 4 * sign * torch.autograd.grad(attention(q, k, v, gate), gate, sign)[0]

    attn.check(through_the_gate)


@pytest.mark.attention("smoke-full")
def test_in_between(attn):
    gate = drawn(attn, [-4.0, -1.0, 0.5, 2.0])
    out = attention(attn.q, attn.k, attn.v, gate)
    torch.testing.assert_close(out.double(), attn.reference.out * gate.double().sigmoid(), rtol=2**-6, atol=2**-8)
